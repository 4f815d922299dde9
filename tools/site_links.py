"""A hook of mkdocs: links out of docs/ lead to the repository, as they do where it is browsed."""

import posixpath
import re
from typing import Any

LINK = re.compile(r"(\]\()((?:\.\./)+[^)\s]+)(\))")


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """Make relative links absolute that leave the folder of the pages."""

    def absolute(found: re.Match[str]) -> str:
        place = posixpath.join(posixpath.dirname(page.file.src_uri), found[2])
        place = posixpath.normpath(place)
        if not place.startswith("../"):
            return found[0]
        return f"{found[1]}{config.repo_url}/blob/main/{place.removeprefix('../')}{found[3]}"

    return LINK.sub(absolute, markdown)
