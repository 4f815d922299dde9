"""Every case has the bits of the record, on every backend that is here."""

import pytest
import torch

from megaopt.lab import source
from megaopt.lab.golden.cases import ANY_MACHINE, CASES, NVIDIA_GPU, packaged
from megaopt.lab.golden.run import run

RECORD = packaged()
CPU, GPU = torch.device("cpu"), torch.device("cuda")

# 7 seconds on Triton's interpreter; the others take it a quarter of an hour, Muon's as much
QUICK = {"ieee/adamw/delayed-weight/fp32-master/fp32-fp32/capturable/overflow"}


def with_new_words(cases):
    """Names of the cases with a rule, format or variation that no case before them has."""
    seen, found = set(), set()
    for case in cases:
        words = {*case.name.split("/")}
        if not words <= seen:
            found.add(case.name)
        seen |= words
    return found


def cases_of(part, quick=None, one_in=1):
    """All of a part; of those that are not in `quick` one in so many is slow, others exhaustive."""
    marks = {case.name: () for case in CASES[part]}
    if quick is not None:
        for number, name in enumerate(marks):
            marks[name] = pytest.mark.exhaustive if number % one_in else pytest.mark.slow
        marks |= dict.fromkeys(quick, ())
    cases = [pytest.param(case, marks=marks[case.name], id=case.name) for case in CASES[part]]
    return pytest.mark.parametrize("case", cases)


@cases_of(ANY_MACHINE, with_new_words(CASES[ANY_MACHINE]))
@pytest.mark.sample(3)
def test_the_reference_has_the_bits_of_the_record(case):
    assert run(case, "reference", CPU) == RECORD.digests[ANY_MACHINE][case.name]


@cases_of(ANY_MACHINE, QUICK, 8)
def test_the_kernels_have_the_bits_of_the_record(case, device):
    assert run(case, "triton", device) == RECORD.digests[ANY_MACHINE][case.name]


@pytest.mark.sample(6)
@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton", "reference"])
@cases_of(ANY_MACHINE)
def test_a_gpu_has_the_bits_of_the_record(case, backend):
    assert run(case, backend, GPU) == RECORD.digests[ANY_MACHINE][case.name]


@pytest.mark.sample(3)
@pytest.mark.gpu
@cases_of(NVIDIA_GPU)
def test_a_gpu_has_the_bits_of_its_own_part(case):
    here = source.describe()["compute_capability"]
    recorded = RECORD.made_on["compute_capability"]
    if here != recorded:
        pytest.skip(f"recorded on compute capability {recorded}, the GPU here has {here}")
    backends = ("triton", "reference") if case.contract == "torch" else ("triton",)
    for backend in backends:
        assert run(case, backend, GPU) == RECORD.digests[NVIDIA_GPU][case.name], backend


@pytest.mark.skipif(torch.cuda.is_available(), reason="there the cases are stepped")
@cases_of(NVIDIA_GPU)
def test_without_a_gpu_its_cases_are_refused_for_that_alone(case):
    """Every option is allowed: the device is checked after them."""
    with pytest.raises(RuntimeError, match=f"contract '{case.contract}' needs an NVIDIA GPU"):
        run(case, "triton", CPU)


# --- what the record says about itself

# where lr and step lie, a new optimizer with a loaded state, masters that are given
NO_BITS = ("capturable", "resume", "external-masters")


def equals(variation):
    """Names of ieee's cases with a variation, and of those without it."""
    names = [case.name for case in CASES[ANY_MACHINE]]
    without = [name.replace(f"/{variation}", "") for name in names]
    return [(n, other) for n, other in zip(names, without, strict=True) if n != other in names]


@pytest.mark.parametrize("variation", NO_BITS)
def test_what_moves_no_bit_has_the_same_line(variation):
    found = equals(variation)
    assert found
    for name, other in found:
        assert RECORD.digests[ANY_MACHINE][name] == RECORD.digests[ANY_MACHINE][other], name
