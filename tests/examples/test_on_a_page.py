"""The pages that show an algorithm whole have the library's bits, after each of several steps."""

import runpy
from types import ModuleType

import pytest
import torch
from modules import REPOSITORY, loaded

from megaopt import FusedAdam, FusedMuon, GaLoreAdamW
from megaopt.kernels.norm.bins import new_bins
from megaopt.kernels.norm.reference import accumulate_reference, total_reference

STEPS = 6
PAGES = ("adam", "muon", "galore")
DECAY = {"lr": 1e-2, "weight_decay": 0.1}
ON_CPU = {"dtype": torch.float32, "backend": "reference"}
SVD = {"kernel": "torch", "precision": "ieee", "refresh": "svd", "stagger": False}


def path_of(name):
    return f"examples/{name}_on_a_page.py"


def page_of(name):
    return loaded(path_of(name))


def drawn(shape, dtype=torch.bfloat16, size=1.0):
    return (size * torch.randn(shape)).to(dtype)


def same(param, state, copy, page_state):
    """Whether a weight and all that the page has in its state are the library's."""
    pairs = [(param, copy)]
    for name, tensor in page_state.items():
        pairs.append((state["master_param" if name == "master" else name], tensor))
    return all(torch.equal(first, second) for first, second in pairs)


def adam_is_the_librarys(page, shapes, dtype=torch.bfloat16, size=1.0, clip_norm=None, **options):
    options = {**DECAY, **options}
    params = [drawn(shape, dtype) for shape in shapes]
    copies, states = [param.clone() for param in params], [page.begin(param) for param in params]
    optimizer = FusedAdam(params, **options, **ON_CPU)
    for number in range(1, STEPS + 1):
        for index, (param, copy) in enumerate(zip(params, copies, strict=True)):
            grad = drawn(param.shape, dtype, size)
            param.grad = copy.grad = None if number == 2 and index == 1 else grad
        optimizer.step(clip_norm=clip_norm)
        page.step(copies, states, number, clip_norm=clip_norm, **options)
        for param, copy, state in zip(params, copies, states, strict=True):
            if not same(param, optimizer.state[param], copy, state):
                return False
    return True


def muon_is_the_librarys(page, shape, size=1.0, **options):
    options = {**DECAY, **options}
    param = drawn(shape)
    copy, page_state = param.clone(), page.begin(param)
    optimizer = FusedMuon([param], **options, **ON_CPU)
    for _ in range(STEPS):
        param.grad = drawn(shape, size=size)
        optimizer.step()
        page.step(copy, param.grad, page_state, **options)
        if not same(param, optimizer.state[param], copy, page_state):
            return False
    return True


def galore_is_the_librarys(page, shape, rank, size=1.0, first=1.0, **options):
    options = {**DECAY, "update_proj_gap": 2, **options}
    param = drawn(shape)
    copy, page_state = param.clone(), page.begin(param, rank)
    optimizer = GaLoreAdamW([param], rank=rank, **options, **SVD, **ON_CPU)
    for number in range(1, STEPS + 1):
        param.grad = drawn(shape, size=size * (first if number == 1 else 1.0))
        optimizer.step()
        page.step(copy, param.grad, page_state, number, **options)
        assert optimizer.state[param]["exp_avg"].shape == page_state["exp_avg"].shape
        if not same(param, optimizer.state[param], copy, page_state):
            return False
    return True


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"clip_norm": 1.0},
        {"clip_norm": 1e6},
        {"dtype": torch.float16, "clip_norm": 0.5},
        {"lr": 0.3, "betas": (0.7, 0.95), "eps": 1e-3, "weight_decay": 0.01},
        {"size": 1e-30, "eps": 1e-30, "clip_norm": 1e-29},
        {"size": 1e18, "clip_norm": 1.0},
    ],
)
@pytest.mark.parametrize("shapes", [[(64, 48), (48,), (3, 5, 7)], [(1,), (1031,)]])
def test_adam(shapes, options):
    assert adam_is_the_librarys(page_of("adam"), shapes, **options)


@pytest.mark.parametrize("shape", [(48, 48), (64, 24), (24, 80), (1, 33), (33, 1)])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"nesterov": False, "momentum": 0.8, "lr": 0.3},
        {"ns_steps": 1, "ns_coefficients": (1.5, -0.5, 0.25)},
        {"size": 1e-12},
        {"size": 1e15, "eps": 1e-3, "weight_decay": 0.01},
    ],
)
def test_muon(shape, options):
    assert muon_is_the_librarys(page_of("muon"), shape, **options)


@pytest.mark.parametrize(
    ("shape", "rank"), [((64, 48), 8), ((48, 48), 5), ((24, 80), 4), ((130, 3), 1)]
)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"scale": 0.25, "betas": (0.7, 0.95), "eps": 1e-3, "lr": 0.3},
        {"first": 0.0, "update_proj_gap": 4},
        {"size": 1e-20, "eps": 1e-20, "weight_decay": 0.01},
    ],
)
def test_galore(shape, rank, options):
    assert galore_is_the_librarys(page_of("galore"), shape, rank, **options)


@pytest.mark.parametrize("exponents", [0, 20, 60])
def test_norms(exponents):
    """Numbers of many sizes, of which some are lost beside the largest."""
    grad = drawn((64, 48)) * 2.0 ** torch.randint(-exponents, exponents + 1, (64, 48))
    bins = new_bins(grad.device)
    accumulate_reference([grad], bins)
    norm, _ = total_reference(bins)
    assert torch.equal(page_of("adam").norm([grad]), norm)
    assert torch.equal(page_of("muon").norm(grad), norm)


@pytest.mark.parametrize("name", PAGES)
def test_a_page_compares_itself(name, capsys):
    runpy.run_path(str(REPOSITORY / path_of(name)), run_name="__main__")
    (line,) = capsys.readouterr().out.splitlines()
    assert line.endswith("bits: True")


CLIPPED, UNCLIPPED = {"size": 1e-3, "clip_norm": 0.01}, {"size": 1e-3, "clip_norm": 1.0}
CHECKS = {
    "adam": lambda page: all(
        adam_is_the_librarys(page, [(64, 48), (48,)], **options) for options in (CLIPPED, UNCLIPPED)
    ),
    "muon": lambda page: muon_is_the_librarys(page, (64, 24)),
    "galore": lambda page: galore_is_the_librarys(page, (64, 48), 8),
}
CHANGES = [
    ("adam", "1.0 - beta1) * grad", "1.0 - beta1) * param.grad"),
    ("adam", "(1.0 - beta2) * (grad * grad)", "(1.0 - beta2) * grad * grad"),
    ("adam", "(exp_avg * correction1) / (root", "correction1 * exp_avg / (1e-9 + root"),
    ("adam", "1.0 / (1.0 - power(beta, number))", "1.0 / (1.0 - power(beta, number + 1))"),
    ("adam", "(whole_norm + 1e-6)", "whole_norm"),
    ("adam", ".clamp(max=1.0)", ""),
    ("adam", "lr * (update + weight_decay * state", "(lr * update + lr * weight_decay * state"),
    ("adam", "param.copy_(master)", "param.sub_(lr * update)"),
    ("muon", "1.0 - momentum) * grad\n    direction", "1.0) * grad\n    direction"),
    ("muon", "one / norm(matrix)", "one / norm(direction)"),
    ("muon", "a * matrix.float())", "a * matrix.float()).bfloat16()"),
    ("muon", "b * gram.float()", "b * gram"),
    ("muon", "(1.0 - lr * weight_decay) * state", "state"),
    ("galore", "step_size * update", "lr * update"),
    ("galore", "master - lr * weight_decay * master\n    state", "master\n    state"),
    ("galore", "if (number - 1) % update_proj_gap", "if number % update_proj_gap"),
    ("galore", ".sqrt().float() + eps", ".sqrt().float() + 2 * eps"),
]


@pytest.mark.parametrize(("name", "line", "change"), CHANGES)
def test_a_changed_operation_is_noticed(name, line, change):
    source = (REPOSITORY / path_of(name)).read_text(encoding="utf-8")
    assert source.count(line) == 1
    page = ModuleType("changed")
    exec(source.replace(line, change), vars(page))
    assert not CHECKS[name](page)
