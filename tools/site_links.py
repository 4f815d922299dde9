"""A hook of mkdocs: links out of docs/ lead to the repository; searches find guides first."""

import posixpath
import re
from typing import Any

INSIDE = ("design.md", "internals.md", "adding.md", "regression.md", "reliability.md", "tried.md")
INSIDE += ("numbers.md", "benchmarks/")
"""Pages for those who ask how it is made: a search lists them behind the others."""
LINK = re.compile(r"(\]\()((?:\.\./)+[^)\s]+)(\))")


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """Make links absolute that leave the folder of the pages; say where a search lists a page."""
    repository = config.extra["repository"]
    page.meta["search"] = {"boost": 0.2 if page.file.src_uri.startswith(INSIDE) else 1}

    def absolute(found: re.Match[str]) -> str:
        place = posixpath.join(posixpath.dirname(page.file.src_uri), found[2])
        place = posixpath.normpath(place)
        if not place.startswith("../"):
            return found[0]
        return f"{found[1]}{repository}/blob/main/{place.removeprefix('../')}{found[3]}"

    return LINK.sub(absolute, markdown)
