"""Every Python block of the documentation is run: by a program of tests/docs/programs, or as a script of its own."""

from __future__ import annotations

import pytest
from support.page_programs import PROGRAMS, REPOSITORY, blocks_of, blocks_run_by

PAGES = sorted(
    str(page.relative_to(REPOSITORY)) for page in [REPOSITORY / "README.md", *(REPOSITORY / "docs").rglob("*.md")]
)
RUN = {block for program in PROGRAMS.glob("*.py") for block in blocks_run_by(program)}


@pytest.mark.parametrize("page", PAGES)
def test_every_python_block_is_run(page: str) -> None:
    blocks = {(page, number): block for number, block in enumerate(blocks_of(page), start=1) if block.script is None}
    missing = [f"{page}:{block.line}" for key, block in blocks.items() if key not in RUN]
    assert missing == [], "run them in tests/docs/programs, or give a fragment another language, such as `text`"


def test_programs_run_blocks_that_exist() -> None:
    assert {key for key in RUN if key[1] > len(blocks_of(key[0]))} == set()
