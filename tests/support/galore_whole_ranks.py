"""What ranks do in the tests of GaLore's matrices that go to owners."""

from galore_ranks import ranked
from muon_ranks import placed

from megaopt import GaLoreAdamW


def placed_galore(options, steps, *placed_as, **named):
    """`placed` with a GaLoreAdamW."""
    return placed(ranked({**options, "optimizer": GaLoreAdamW}), steps, *placed_as, **named)
