"""Every Python block of the documentation is run: by a program of tests/docs/programs, or as a script of its own."""

from __future__ import annotations

from support.page_programs import PROGRAMS, REPOSITORY, blocks_of, blocks_run_by

PAGES = sorted(
    str(page.relative_to(REPOSITORY)) for page in [REPOSITORY / "README.md", *(REPOSITORY / "docs").rglob("*.md")]
)


def run_blocks_of_pages() -> set[tuple[str, int]]:
    return {block for program in PROGRAMS.glob("*.py") for block in blocks_run_by(program)}


def test_every_python_block_is_run() -> None:
    run = run_blocks_of_pages()
    missing = [
        f"{page}:{block.line}"
        for page in PAGES
        for number, block in enumerate(blocks_of(page), start=1)
        if block.script is None and (page, number) not in run
    ]
    assert missing == [], "run them in tests/docs/programs, or give a fragment another language, such as `text`"


def test_programs_run_blocks_that_exist() -> None:
    assert {key for key in run_blocks_of_pages() if key[1] > len(blocks_of(key[0]))} == set()
