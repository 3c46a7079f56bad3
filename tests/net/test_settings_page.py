"""docs/knobs.md is what the knob table says, and no page names a variable that does not exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from bagua.net import _core

REPOSITORY = Path(__file__).resolve().parents[2]
GENERATOR = REPOSITORY / "tools" / "docs" / "generate_knobs.py"
PAGE = REPOSITORY / "docs" / "knobs.md"

# Not part of a longer name, such as MY_BAGUA_NET_X; `BAGUA_NET_*` stands for all of them.
VARIABLE = re.compile(r"(?<![A-Z0-9_])(?:ENABLE_BAGUA_NET|BAGUA_NET_[A-Z][A-Z0-9_]*)")


def generate(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(GENERATOR), *arguments], capture_output=True, text=True, timeout=60, check=False
    )


def pages() -> list[Path]:
    return [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]


def known_variables() -> set[str]:
    return {knob["name"] for knob in _core.knobs()} | {knob["name"] for knob in _core.retired_knobs()}


def test_the_page_is_up_to_date() -> None:
    result = generate("--check")
    assert result.returncode == 0, result.stdout + result.stderr


def test_the_page_has_every_knob_with_all_its_columns() -> None:
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    for knob in _core.knobs():
        (row,) = [line for line in rows if line.startswith(f"| `{knob['name']}` ")]
        for column in ("type", "default_value", "range", "unit", "meaning"):
            assert knob[column] in row


@pytest.mark.parametrize("damage", ["other text", "a lost row", "no page"])
def test_the_check_finds_a_page_that_differs(tmp_path: Path, damage: str) -> None:
    page = tmp_path / "knobs.md"
    assert generate("--page", str(page)).returncode == 0
    assert generate("--check", "--page", str(page)).returncode == 0
    text = page.read_text()
    if damage == "other text":
        page.write_text(text.replace("1 to 64", "1 to 65"))
    elif damage == "a lost row":
        page.write_text("".join(line for line in text.splitlines(keepends=True) if "BAGUA_NET_SPIN_US" not in line))
    else:
        page.unlink()
    result = generate("--check", "--page", str(page))
    assert result.returncode == 1
    assert "+" in result.stdout
    assert "BAGUA_NET_" in result.stdout
    assert "generate_knobs.py" in result.stderr


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_variables_in_the_documentation_exist(page: Path) -> None:
    mentioned = set(VARIABLE.findall(page.read_text()))
    assert mentioned - known_variables() == set()


def test_the_search_for_variables_finds_them() -> None:
    text = "`BAGUA_NET_NO_SUCH=1`, BAGUA_NET_*, MY_BAGUA_NET_X, ENABLE_BAGUA_NET=1"
    assert VARIABLE.findall(text) == ["BAGUA_NET_NO_SUCH", "ENABLE_BAGUA_NET"]
