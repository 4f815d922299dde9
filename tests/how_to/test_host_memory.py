from contextlib import nullcontext

import pytest
from fake_pinning import FakePinning
from how_to import everything, plain_loop
from runs import assert_same, on_cpu

from megaopt.kernels.host_memory import pinned_by


@pytest.fixture(scope="module")
def plain(how_to):
    """The same steps, none released, with states beside the weights."""
    return plain_loop(how_to, None)


@pytest.mark.parametrize("pinning", [None, FakePinning()], ids=["as it is here", "mapped"])
def test_the_run_has_the_bits_of_states_on_the_card(how_to, plain, pinning, tmp_path):
    with pinned_by(pinning) if pinning else nullcontext():
        straight = how_to.main(["--folder", str(tmp_path)])
        assert_same(on_cpu(everything(*straight)), on_cpu(plain))
        saved = ["--resume", str(tmp_path / "step-3.pt")]
        for where in ([], ["--on-the-card"]):
            resumed = how_to.main(["--folder", str(tmp_path / "again"), *saved, *where])
            assert_same(on_cpu(everything(*resumed)), on_cpu(plain))
