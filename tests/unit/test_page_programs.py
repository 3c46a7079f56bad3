"""Every Python block of the documentation is run: by a program of tests/docs/programs, or as a script of its own."""

from __future__ import annotations

import traceback
from pathlib import Path

import pytest
from support import page_programs
from support.page_programs import PROGRAMS, REPOSITORY, blocks_of, blocks_run_by, ranks_of, run_blocks

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


def test_errors_name_page_and_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_programs, "REPOSITORY", tmp_path)
    (tmp_path / "p.md").write_text("# Page\n\n```python\nx = 1\n```\n\n```sh\nls\n```\n\n```python\n\nx = none\n```\n")
    with pytest.raises(NameError) as raised:
        run_blocks("p.md", 1, 2)
    last = traceback.extract_tb(raised.value.__traceback__)[-1]
    assert (Path(last.filename).name, last.lineno) == ("p.md", 13)


def test_a_program_says_its_ranks(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("x = 1\n")
    with pytest.raises(ValueError, match="how many ranks"):
        ranks_of(program)
