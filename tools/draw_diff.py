"""Draws the picture of docs/diff.md, docs/diff.png: what `megaopt diff --html` shows of two runs.

python tools/draw_diff.py
"""

import tempfile
import textwrap
from pathlib import Path

import matplotlib
import torch
from matplotlib.figure import Figure

from megaopt import Recorder
from megaopt.lab.page import draw_growth, draw_timeline
from megaopt.recording.compare import Comparison, compare
from megaopt.recording.files import Recording

PICTURE = Path(__file__).resolve().parents[1] / "docs" / "diff.png"
AT, STEPS = 6, 16
"""The step at which one run's embedding has a smaller lr, and the last one."""


class Model(torch.nn.Module):
    """An embedding, blocks and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(32, 16)
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(4))
        self.head = torch.nn.Linear(16, 32)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits of tokens."""
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = hidden + torch.tanh(block(hidden))
        return self.head(hidden)


def run(folder: Path, lr: float) -> Recording:
    """Trains, with an lr of the embedding's own at one step, and returns the recording."""
    torch.manual_seed(0)
    model = Model()
    embedding, *others = model.parameters()
    optimizer = torch.optim.AdamW([{"params": [embedding]}, {"params": others}], lr=1e-3)
    with Recorder(model, optimizer, folder, level="blocks"):
        for step in range(1, STEPS + 1):
            optimizer.param_groups[0]["lr"] = lr if step == AT else 1e-3
            tokens = torch.randint(32, (8, 24))
            loss = torch.nn.functional.cross_entropy(model(tokens).mT, tokens.roll(-1, 1))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return Recording(folder)


def compared(folder: Path) -> Comparison:
    """The two runs beside each other."""
    return compare(run(folder / "before", 1e-3), run(folder / "after", 9e-4))


def draw(path: Path, found: Comparison) -> None:
    """The verdict, and the two pictures of the page."""
    figure = Figure(figsize=(9, 5.6), dpi=120, layout="constrained")
    verdict = textwrap.fill(found.line, 120)
    figure.suptitle(verdict, x=0.01, ha="left", fontsize=9, fontweight="bold")
    titles = {draw_timeline: "What differs at which step", draw_growth: "How far it lies apart"}
    with matplotlib.rc_context({"font.size": 8.5}):
        for axes, (drawn, title) in zip(figure.subplots(2), titles.items(), strict=True):
            axes.spines[["top", "right"]].set_visible(False)
            axes.set_title(title, loc="left", style="italic", color="#555555")
            drawn(axes, found.growth)
        figure.savefig(path, metadata={"Software": None})


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        draw(PICTURE, compared(Path(scratch)))
