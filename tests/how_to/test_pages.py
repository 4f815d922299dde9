"""The code of pages that have no script beside them runs as it is printed."""

import re
import subprocess
import sys
from pathlib import Path

import how_to
import pytest
import torch
from runs import assert_same
from safetensors.torch import load_file, save_file

from megaopt import FusedMuon
from megaopt.recording.compare import compare
from megaopt.recording.files import Recording

DOCS = Path(__file__).parents[2] / "docs"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PAGES = {
    "../README.md": "",
    "index.md": "",
    "audit.md": "",
    "install.md": "",
    "how-to/average.md": "",
    "how-to/formats.md": "",
    "how-to/clipping.md": "",
    "how-to/external_masters.md": "",
    "how-to/float8.md": "",
    "how-to/weights.md": "## Three ways to refresh a master",
}
"""The heading from which on, up to the next one, a page's code stands alone."""


def blocks(page, heading=""):
    text = (DOCS / page).read_text(encoding="utf-8")
    if heading:
        text = text.split(f"{heading}\n")[1].split("\n## ")[0]
    return BLOCK.findall(text)


def run(page, heading=""):
    """All of a page's code, in order; what it leaves behind."""
    found = {}
    for number, code in enumerate(blocks(page, heading)):
        exec(compile(code, f"{page}, block {number}", "exec"), found)
    return found


@pytest.mark.filterwarnings("ignore:.*was written outside the optimizer:UserWarning")
@pytest.mark.parametrize(("page", "heading"), PAGES.items(), ids=PAGES)
def test_the_code_of_a_page_runs(page, heading, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert blocks(page, heading)
    run(page, heading)


def test_the_code_of_muons_page_has_the_bits_of_one_rank_on_two(on_ranks):
    """Means of two equal gradients are exact."""
    (expected,) = on_ranks(1, how_to.trained_by, blocks("how-to/muon.md"))
    for found in on_ranks(2, how_to.trained_by, blocks("how-to/muon.md")):
        assert_same(found, expected)


def test_what_the_pages_say_is_printed(capsys):
    run("how-to/formats.md")
    worked = ["107.8", "67.4", "20.6", "81.9", "47.5", "20.5", "17.6"]
    assert capsys.readouterr().out.split() == ["7", "None", "3.06", *worked, "5.015625"]
    run("how-to/float8.md")
    line = "(0): Float8Linear(in_features=256, out_features=256, bias=True, fp8 weight="
    assert line in capsys.readouterr().out


def test_the_page_of_a_plain_loop_resumes_with_the_same_bits(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run("how-to/torch.md", "## Resume with the same bits")
    line = compare(Recording("runs/straight"), Recording("runs/resumed")).line
    assert line in (DOCS / "how-to/torch.md").read_text(encoding="utf-8")
    assert line.startswith("same: 3 steps")


def held(optimizer):
    """Bytes a parameter of each weight with its states."""
    optimizer.initialize_states()
    for param, state in optimizer.state.items():
        own = [param, *(each for each in state.values() if isinstance(each, torch.Tensor))]
        yield round(sum(each.nbytes for each in own) / param.numel(), 2)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"dtype": torch.float32}, [10, 14]),
        (
            {
                "dtype": torch.float32,
                "store_param_remainders": True,
                "momentum_buffer_dtype": "block_e4m3",
                "exp_avg_dtype": "block_e4m3",
                "exp_avg_sq_dtype": "block_e5m3",
            },
            [5.01, 6.02],
        ),
        (
            {
                "weight_rounding": "stochastic",
                "momentum_buffer_dtype": "block_int8",
                "exp_avg_dtype": "block_e4m3",
                "exp_avg_sq_dtype": "block_e5m3",
            },
            [3.01, 4.02],
        ),
    ],
)
def test_muon_holds_what_the_page_counts(options, expected):
    matrix, other = (torch.nn.Parameter(torch.zeros(512, 1024).bfloat16()) for _ in range(2))
    groups = [{"params": [matrix]}, {"params": [other], "use_muon": False}]
    assert [*held(FusedMuon(groups, **options))] == expected


def test_what_the_page_hands_over_of_fp8_weights_is_saved_and_multiplies_back(tmp_path):
    found = run("how-to/float8.md")
    model, codes = found["model"], found["codes"]
    for name in ("values", "codes"):
        save_file(found[name], tmp_path / name)
        assert_same(load_file(tmp_path / name), dict(found[name]))
    weight = model[0].weight
    assert {"0.weight", "0.weight_scale_inv", "0.bias"} == codes.keys()
    product = codes["0.weight"].float() * codes["0.weight_scale_inv"]
    assert torch.equal(product.bfloat16(), weight.dequantize())


@pytest.mark.slow
def test_a_saved_fp8_model_loads_where_float8_is_imported(tmp_path):
    """In a new process, as the page says."""
    torch.save(run("how-to/float8.md")["model"].state_dict(), tmp_path / "model.pt")
    for line, code in (("import megaopt.float8, torch", 0), ("import torch", 1)):
        command = f"{line}; torch.load('{tmp_path / 'model.pt'}')"
        done = subprocess.run([sys.executable, "-c", command], capture_output=True, check=False)
        assert done.returncode == code, done.stderr
