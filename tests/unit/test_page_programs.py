"""Every Python block of the pages about training belongs to a program that tests/distributed runs, and the reader of
these programs finds what it must find."""

from __future__ import annotations

import traceback
from pathlib import Path

import pytest
from support.page_programs import MOST_RANKS, REPOSITORY, parse_page, read_page

# Pages whose Python is about training, and that existed before: theirs is about networks and needs more than ranks.
NOT_RUN = {"docs/activation.md", "docs/netlab.md"}
PAGES = sorted(
    str(page.relative_to(REPOSITORY))
    for page in [
        *REPOSITORY.glob("*.md"),
        *(REPOSITORY / "docs").rglob("*.md"),
        *(REPOSITORY / "examples").rglob("*.md"),
    ]
)


@pytest.mark.parametrize("page", [page for page in PAGES if page not in NOT_RUN])
def test_every_python_block_is_run(page: str) -> None:
    assert [f"{page}:{line}" for line in read_page(page).loose] == []


def test_pages_that_are_left_out_exist() -> None:
    assert set(PAGES) >= NOT_RUN


@pytest.mark.parametrize("page", ["README.md", "docs/training.md", "docs/migration.md", "docs/algorithms.md"])
def test_the_pages_about_training_have_programs(page: str) -> None:
    assert read_page(page).programs


PAGE = """
# A page

<!-- program: one, 2 ranks -->
```python
x = 1
```

Text, and a comment. <!-- about something else -->

<!-- program: one, hidden
y = x + 1
-->

<!-- program: one -->

```python
z = y + 1
```

```python
loose = True
```

```text
<!-- program: shown, not meant -->
```
"""


class TestReader:
    def test_parts_in_order_with_their_lines(self) -> None:
        (program,) = parse_page("p.md", PAGE).programs
        assert (program.name, program.ranks) == ("one", 2)
        assert [(part.line, part.source, part.hidden) for part in program.parts] == [
            (6, "x = 1\n", False),
            (12, "y = x + 1\n", True),
            (18, "z = y + 1\n", False),
        ]
        assert program.run()["z"] == 3

    def test_blocks_that_belong_to_no_program(self) -> None:
        assert parse_page("p.md", PAGE).loose == [21]

    def test_errors_are_those_of_the_page(self) -> None:
        text = PAGE.replace("z = y + 1", "z = y + none")
        (program,) = parse_page("p.md", text).programs
        with pytest.raises(NameError) as raised:
            program.run()
        last = traceback.extract_tb(raised.value.__traceback__)[-1]
        assert (Path(last.filename).name, last.lineno) == ("p.md", 18)

    @pytest.mark.parametrize(
        ("text", "problem"),
        [
            ("<!-- program: a -->\n```python\n```\n", "how many ranks"),
            (f"<!-- program: a, {MOST_RANKS + 1} ranks -->\n```python\n```\n", "how many ranks"),
            ("<!-- program: a, 2 ranks -->\ntext\n```python\n```\n", "has to follow"),
            ("<!-- program: a, 2 ranks -->\n```sh\n```\n", "has to follow"),
            ("<!-- program: -->\n```python\n```\n", "cannot read"),
            ("<!-- program: a, 2 ranks, hiden\nx = 1\n-->\n", "cannot read"),
            ("<!-- program: a, 1 rank, hidden\nx = 1\n-->\n<!-- program: a, 1 rank -->\n```python\n```\n", "has begun"),
        ],
    )
    def test_mistakes_are_errors(self, text: str, problem: str) -> None:
        with pytest.raises(ValueError, match=problem):
            parse_page("p.md", text)
