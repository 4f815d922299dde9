"""The site: what its hook and its extension do to pages, and that pages ask no other server."""

from types import SimpleNamespace

import pytest
from modules import loaded
from record_pages import REPOSITORY

SETTINGS = (REPOSITORY / "mkdocs.yml").read_text(encoding="utf-8")
CONFIG = SimpleNamespace(extra={"repository": "https://example.org/megaopt"})


def shown(place, markdown=""):
    """A page as the hook leaves it: its Markdown, and its rank among what a search finds."""
    page = SimpleNamespace(file=SimpleNamespace(src_uri=place), meta={})
    hook = loaded("tools/site_links.py").on_page_markdown
    return hook(markdown, page=page, config=CONFIG, files=None), page.meta["search"]["boost"]


@pytest.mark.parametrize("guide", ["how-to/clipping.md", "diff.md", "faq.md", "api.md"])
@pytest.mark.parametrize(
    "inside", ["reliability.md", "design.md", "internals.md", "adding.md", "benchmarks/README.md"]
)
def test_a_search_finds_guides_before_what_is_inside(guide, inside):
    assert shown(guide)[1] > shown(inside)[1]


def test_links_out_of_the_pages_lead_to_the_repository():
    text, _ = shown("how-to/ddp.md", "[a](../../examples/README.md), [b](../diff.md)")
    assert text == "[a](https://example.org/megaopt/blob/main/examples/README.md), [b](../diff.md)"


def test_no_page_asks_for_the_repositorys_figures():
    """Material for MkDocs asks GitHub wherever there is a repo_url."""
    assert "\nrepo_url:" not in SETTINGS
    assert "font: false" in SETTINGS


@pytest.mark.parametrize("name", ["adam.FusedAdam", "galore.GaLoreAdamW", "muon.FusedMuon"])
def test_the_api_page_names_every_option(name):
    griffe = pytest.importorskip("griffe")
    extensions = griffe.load_extensions(str(REPOSITORY / "tools/site_options.py"))
    read = griffe.load(f"megaopt.{name}", extensions=extensions, search_paths=[REPOSITORY])
    parameters = {each.name: each for each in read.members["__init__"].parameters}
    assert "options" not in parameters
    assert {"dtype", "master_weights", "weight_rounding", "seed"} <= parameters.keys()
    assert parameters["weight_rounding"].default in ("'nearest'", '"nearest"')
    assert parameters["dtype"].default == "None"
    for option in ("dtype", "weight_rounding", "seed"):
        assert f"\n    {option}: " in read.docstring.value
