"""Hook of MkDocs: which pages the search of the site shows first, and by which words that they do not contain.

The boosts are those of Material's search: 1 is the default. A match in a page's tags comes before any match in a title.
"""

from __future__ import annotations

from typing import Any

# By the first folder or file that fits. Users look for what to do; how it is built and what was measured come last.
BOOSTS = {
    "how-to/": 2.0,
    "tutorials/": 1.5,
    "design/": 0.1,
    "reference/results.md": 0.1,
    "reference/api/legacy.md": 0.1,
    "benchmarks.md": 0.5,
}
# What people type who do not know the page's own words. Each word of a tag counts by itself: a common word would bring
# its page to the top of unrelated searches.
TAGS = {
    "how-to/several-network-cards.md": ["NICs", "multiple", "bonding", "multirail"],
    "how-to/what-should-i-use.md": ["algorithm", "int4", "recommendation"],
    "how-to/train/choose-an-algorithm.md": ["algorithm", "int4"],
    "how-to/train/torch-ddp-hooks.md": ["compression"],
    "how-to/train/compress-fsdp.md": ["compression", "int4"],
    "how-to/encrypt.md": ["encryption", "TLS"],
    "how-to/troubleshoot.md": ["bug", "issue"],
    "reference/versions.md": ["upgrade", "compatibility", "requirements", "conda", "AWS", "EFA"],
}


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Called by MkDocs for each page before it is rendered."""
    name = page.file.src_uri
    boost = next((boost for prefix, boost in BOOSTS.items() if name.startswith(prefix)), 1.0)
    page.meta["search"] = {"boost": boost}
    if name in TAGS:
        page.meta["tags"] = TAGS[name]
    return markdown
