"""A hook of MkDocs: links of pages to files outside docs/ become plain paths, since the site has no copy of them.

The file has to exist: a link to one that does not is left alone, and the strict build fails on it.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
LINK = re.compile(r"\[([^\]]*)\]\(((?:\.\./)+[^)\s#]*)(?:#[^)]*)?\)")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Called by MkDocs for each page before it is rendered."""
    return without_repository_links(markdown, f"docs/{page.file.src_uri}")


def without_repository_links(markdown: str, page: str) -> str:
    """The page with the text of such links, followed by the path where the text does not name it."""

    def plain(link: re.Match[str]) -> str:
        text, target = link[1], posixpath.normpath(posixpath.join(posixpath.dirname(page), link[2]))
        if target.startswith(("docs/", "../")) or not (REPOSITORY / target).exists():
            return link[0]
        shown = text.replace("`", "")
        return f"`{target}`" if shown in target else f"{text} (`{target}`)"

    return LINK.sub(plain, markdown)
