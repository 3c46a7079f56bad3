#!/usr/bin/env python3
"""Draws what `bagua-net top` shows of the jobs that run now, as docs/images/top.svg:

    PYTHONPATH=tools .venv/bin/python -m netlab run --rate 10G -- .venv/bin/bagua-net-bench --backends plugin &
    .venv/bin/python tools/docs/picture_of_top.py docs/images/top.svg

The second command waits for nothing: give the first one the time to begin.
"""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path

from bagua.net.stats.sources import LocalSource
from bagua.net.top.app import TopApp

_SIZE = (142, 14)  # columns and lines
_WATCHED_S = 5.0


async def main(path: Path) -> None:
    source = LocalSource(1.0)
    app = TopApp([source], 1.0)
    try:
        async with app.run_test(size=_SIZE) as pilot:
            await pilot.pause(_WATCHED_S)
            picture = app.export_screenshot(title="bagua-net top")
            picture = re.sub(r"@font-face \{.*?\}", "", picture, flags=re.DOTALL)  # of another site
            path.write_text(re.sub(r"(<svg [^>]*>)", r"\1<title>bagua-net top</title>", picture, count=1))
    finally:
        source.close()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
