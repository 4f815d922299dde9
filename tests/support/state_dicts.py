"""The optimizers whose state dicts are saved, loaded and refused."""

import pytest
from runs import BF16, FORMATS, parameters

from megaopt import FusedAdam

all_formats = pytest.mark.parametrize("options", FORMATS.values(), ids=FORMATS)
HYPER = {"lr": 0.01, "weight_decay": 0.1}


def made(options, dtype=BF16, **more):
    return FusedAdam(parameters(dtype=dtype), **{**HYPER, **options, **more})
