"""Checkpoints of other formats: refused before anything is written, or changed into one's own."""

import re

import fsdp2_blocks
import fsdp2_formats
import pytest
from fsdp2_blocks import BLOCKS, SHAPES
from runs import BF16, MASTER, REMAINDERS, assert_same

HYPER = {"lr": 0.01, "weight_decay": 0.1, "weights": BF16}
KINDS = {
    "fp32": {},
    "bf16": {"exp_avg_dtype": BF16, "exp_avg_sq_dtype": BF16},
    "blocks": BLOCKS,
    "blocks of 64": {"exp_avg_dtype": "block64_e4m3", "exp_avg_sq_dtype": "block64_e5m3"},
    "4 bits": {"exp_avg_dtype": "block32_e3m0", "exp_avg_sq_dtype": "block32_e4m0"},
    "masters": MASTER,
    "remainders": REMAINDERS,
    "24 bits": {"master_weights": True, "master_weight_dtype": "remainder8"},
}
KINDS = {name: {**HYPER, **options} for name, options in KINDS.items()}
WORLDS = [(None, 2), (2, None), (2, 3), (None, None)]  # of None: a process without ranks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture
def on(on_ranks):
    def run(world, what, *given):
        return [what(*given)] if world is None else on_ranks(world, what, *given)

    return run


UNLIKE = [
    *(("fp32", "blocks"), ("blocks", "fp32"), ("blocks", "blocks of 64"), ("blocks", "4 bits")),
    *(("fp32", "bf16"), ("masters", "fp32"), ("fp32", "remainders"), ("remainders", "masters")),
    ("masters", "24 bits"),
]


@pytest.mark.parametrize(
    ("saved", "own", "worlds", "flat"),
    [
        pytest.param(*names, worlds, flat, marks=[pytest.mark.slow] * is_slow)
        for place, names in enumerate(UNLIKE)
        for number, worlds in enumerate(WORLDS)
        for flat in (False, True)
        for is_slow in [(number, flat) != (place % 4, place % 3 == 0)]
    ],
    ids=str,
)
@pytest.mark.thirds
@pytest.mark.sample(2)
def test_what_is_refused_was_never_loaded(on, tmp_path, saved, own, worlds, flat):
    """Also with what is missing left out: the run goes on with the bits of one that did not try."""
    folder, options = str(tmp_path / "checkpoint"), KINDS[own]
    on(worlds[0], fsdp2_blocks.save, KINDS[saved], 2, folder, flat)
    (expected, *_) = on(worlds[1], fsdp2_formats.goes_on, options)
    for partial in (False, True):
        load = (fsdp2_formats.goes_on_after_a_load, options, folder, flat, partial)
        for said, found in on(worlds[1], *load):
            assert re.search("Size mismatch|Missing key", said), said
            assert_same(found, expected)


@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flat"])
@pytest.mark.parametrize(
    ("at_save", "running"),
    [(True, False), (True, True), (False, True)],
    ids=["the checkpoint has it", "both have it", "the optimizer has it"],
)
def test_a_frozen_parameters_state_is_lost_on_no_rank(on, tmp_path, at_save, running, flat):
    """All ranks raise, also those without an element of it."""
    given = (KINDS["masters"], str(tmp_path / "checkpoint"), flat, at_save, running)
    for said in on(2, fsdp2_formats.says_of_frozen, *given):
        assert re.search("parameter 2 of group 0: requires_grad must be True .*got False", said)


def test_a_parameter_frozen_on_all_ranks_from_the_first_loads(on, tmp_path):
    options = {**KINDS["masters"], "makes_states": "all"}
    for said in on(2, fsdp2_formats.always_frozen, options, str(tmp_path / "checkpoint")):
        assert said == "it loads"


@pytest.mark.sample(2)
@pytest.mark.parametrize("worlds", WORLDS[:3], ids=str)
@pytest.mark.parametrize(
    ("saved", "own"),
    [
        ("fp32", "blocks"),
        ("blocks", "fp32"),
        ("blocks", "4 bits"),
        ("masters", "24 bits"),
    ],
)
@pytest.mark.sample(2)
def test_states_are_changed_into_other_formats(on, tmp_path, saved, own, worlds):
    """Read, split anew and stored again: the bits of one process that saved nothing."""
    folder, (saved, own) = str(tmp_path / "checkpoint"), (KINDS[saved], KINDS[own])
    on(worlds[0], fsdp2_blocks.save, saved, 2, folder, True)
    model, optimizer = fsdp2_formats.build(saved, shapes=SHAPES)
    fsdp2_formats.train(model, optimizer, 2)
    expected = fsdp2_formats.into(own, model, optimizer, 2)
    for found in on(worlds[1], fsdp2_formats.changed, saved, own, folder, True, 2):
        assert_same(found, expected)
