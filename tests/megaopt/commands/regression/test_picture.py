"""What the picture of a regression says, beside its pixels."""

from dataclasses import dataclass

import pytest

from megaopt.commands.regression import picture


@dataclass(frozen=True)
class Place:
    step: int
    variant: str = "ours"
    tensor: str = "loss"


@dataclass
class Trial:
    short_name: str
    losses: list
    baseline: object = None
    difference: Place | None = None
    recipe: str | None = None


@pytest.fixture
def draw(monkeypatch, tmp_path):
    """Draws a baseline and variants with these first differences; the panel of differences."""
    made, figure = [], picture.Figure

    def kept(**options):
        made.append(figure(**options))
        return made[-1]

    def run(*steps):
        baseline = Trial("plain", [5.0, 4.0, 3.0, 2.0])
        places = [None if step is None else Place(step) for step in steps]
        trials = [Trial(f"ours{n}", baseline.losses, baseline, p) for n, p in enumerate(places)]
        picture.draw_losses(tmp_path / "losses.png", "title", [baseline, *trials])
        return made[-1].axes[1]

    monkeypatch.setattr(picture, "Figure", kept)
    return run


def upright(axes):
    """Where upright lines stand: at one x, over the whole height."""
    lines = [line.get_xdata() for line in axes.get_lines() if list(line.get_ydata()) == [0, 1]]
    return [float(x[0]) for x in lines]


@pytest.mark.parametrize("steps", [(3,), (None, 4, 3)])
def test_the_first_difference_is_marked_even_where_no_loss_differs(draw, steps):
    axes = draw(*steps)
    assert axes.get_ylabel() == "loss: variant - baseline"
    assert upright(axes) == [3.0]
    assert "first difference: step 3" in [text.get_text() for text in axes.texts]


def test_where_nothing_differs_nothing_is_marked(draw):
    axes = draw(None, None)
    assert upright(axes) == []
    assert not [text for text in axes.texts if "difference" in text.get_text()]
