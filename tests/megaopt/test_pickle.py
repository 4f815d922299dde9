"""An optimizer pickled, copied or saved whole goes on with the same bits, in every format."""

import copy
import io
import itertools
import pickle

import pytest
import torch
from float8_models import assert_same_parts, model, parts
from runs import (
    FORMATS,
    FP8,
    FP16,
    FP32,
    MASTER,
    assert_same,
    assert_same_run,
    parameters,
    params_of,
    train,
)

import megaopt
from megaopt import FusedAdam
from megaopt.float8 import RECIPES
from megaopt.kernels.formats import MASTERS, MOMENTS, WEIGHTS

HYPER = {"lr": 0.01, "weight_decay": 0.1, "backend": "reference"}
MASTER_OPTIONS = {
    "float32": MASTER,
    "scaled_float16": {"master_weights": True, "master_weight_dtype": FP16},
    "remainder16": {"dtype": FP32, "store_param_remainders": True},
    "none": {},
}


def options_of(form):
    """Of a row of the masters' table."""
    named = {"master_weights": True, "master_weight_dtype": form.name.replace("_float16", "")}
    return MASTER_OPTIONS.get(form.name, named)


def through_torch(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS = {
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),
    "pickle_2": lambda value: pickle.loads(pickle.dumps(value, protocol=2)),
    "deepcopy": copy.deepcopy,
    "torch.save": through_torch,
}


def assert_goes_on(optimizer, done):
    """Twins are what the optimizer is, remain it for five steps, and share nothing with it."""
    train(optimizer, done)
    twins = {name: way(optimizer) for name, way in WAYS.items()}
    for twin in twins.values():
        assert_same_run(twin, optimizer)
        assert twin.options == optimizer.options
        train(twin, 5, first=done)
    train(optimizer, 5, first=done)
    for twin in twins.values():
        assert_same_run(twin, optimizer)


@pytest.mark.parametrize("done", [0, 2])
@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("options", FORMATS.values(), ids=FORMATS)
def test_every_format(options, capturable, done):
    assert_goes_on(FusedAdam(parameters(), capturable=capturable, **HYPER, **options), done)


def products():
    """The options of all combinations of the tables, and the weights' dtype.

    Without moments in blocks, which test_block_moments.py has: parameters this small keep fp32.
    """
    moments = [key for key in MOMENTS.allowed if not MOMENTS[key].block]
    tables = (WEIGHTS.allowed, MASTERS.allowed, moments, moments)
    for weight, master, first, second in itertools.product(*tables):
        form = MASTERS[master]
        if form.requires_weight in (None, weight):
            moments = {"exp_avg_dtype": first, "exp_avg_sq_dtype": second}
            yield {**options_of(form), **moments}, weight


@pytest.mark.slow
def test_the_product_of_the_tables():
    for options, weight in products():
        assert_goes_on(FusedAdam(parameters(dtype=weight), **HYPER, **options), 1)


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_external_masters_stay_external(way):
    params = parameters()
    masters = [param.detach().float() for param in params]
    optimizer = FusedAdam(params, master_weights=masters, exp_avg_dtype=FP8, **HYPER)
    train(optimizer, 2)
    twin = way(optimizer)
    for param, master in zip(params_of(twin), twin.master_weights, strict=True):
        assert twin.state[param]["master_param"] is master
    train(optimizer, 5, first=2)
    train(twin, 5, first=2)
    assert_same_run(twin, optimizer)


FLOAT8_OPTIONS = {
    "no_masters": {},
    "fp8_moments": {**MASTER, "exp_avg_dtype": FP8, "exp_avg_sq_dtype": FP8},
    "fp16": {**FORMATS["fp16_masters"], "exp_avg_dtype": FP16, "exp_avg_sq_dtype": FP16},
}


def assert_same_training(found, expected):
    """Fails unless two models with fp8 weights and their optimizers are the same."""
    (net, optimizer), (other_net, other) = found, expected
    for index in (0, 2):
        assert_same_parts(parts(net[index].weight), parts(other_net[index].weight))
    pairs = zip(net.parameters(), other_net.parameters(), strict=True)
    for index, (own, theirs) in enumerate(pairs):
        assert params_of(optimizer)[index] is own
        assert_same(dict(optimizer.state[own]), dict(other.state[theirs]))


@pytest.mark.parametrize("options", FLOAT8_OPTIONS.values(), ids=FLOAT8_OPTIONS)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("done", [0, 2])
def test_fp8_weights_with_their_model(done, recipe, options):
    """Before the first step too, when masters start from the values that codes were made of."""
    net = megaopt.to_float8(model(), recipe)
    capturable = recipe == "delayed"
    optimizer = FusedAdam(net.parameters(), capturable=capturable, **HYPER, **options)
    train(optimizer, done)
    twins = [way((net, optimizer)) for way in WAYS.values()]
    for twin in twins:
        assert_same_training(twin, (net, optimizer))
        train(twin[1], 5, first=done)
    train(optimizer, 5, first=done)
    for twin in twins:
        assert_same_training(twin, (net, optimizer))
