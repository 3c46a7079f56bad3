"""Hooks of MkDocs, for links between pages and files outside docs/.

Links of pages to such files become plain paths, since the site has no copy of them. The file has to exist: a link to
one that does not is left alone, and the strict build fails on it. It also fails on dead links of README.md and of other
pages outside docs/.
"""

from __future__ import annotations

import logging
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
LINK = re.compile(r"\[([^\]]*)\]\(((?:\.\./)+[^)\s#]*)(?:#[^)]*)?\)")
CODE = re.compile(r"^ *```.*?^ *```|`[^`\n]*`|<!--.*?-->", re.MULTILINE | re.DOTALL)
LOCAL_LINK = re.compile(r"\]\((?!https?:|mailto:)([^)#\s]*)(?:#([^)\s]*))?\)")
log = logging.getLogger("mkdocs.plugins.repository_links")


def on_env(_env: Any, files: Any, **_: Any) -> None:
    """Called by MkDocs when all pages are rendered. A warning is an error of a strict build."""
    for page in [*REPOSITORY.glob("*.md"), *(REPOSITORY / "examples").rglob("*.md")]:
        for target, problem in _dead_links(page, files):
            log.warning(f"{page.relative_to(REPOSITORY)} contains a link '{target}', but {problem}")


def _dead_links(page: Path, files: Any) -> Iterator[tuple[str, str]]:
    """Target and problem. Anchors are looked for in the pages of the site."""
    for path, anchor in LOCAL_LINK.findall(CODE.sub("", page.read_text())):
        file = (page.parent / path).resolve()
        if not file.exists() or not file.is_relative_to(REPOSITORY):
            yield path, "there is no such file"
        elif anchor:
            found = file.is_relative_to(REPOSITORY / "docs") and files.get_file_from_path(
                str(file.relative_to(REPOSITORY / "docs"))
            )
            if not found or not found.page or anchor not in (found.page.present_anchor_ids or ()):
                yield f"{path}#{anchor}", "the site has no page with this anchor"


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
