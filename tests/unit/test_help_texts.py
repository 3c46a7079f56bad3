"""What --help says of the scripts that users start: every option is explained, and no description breaks off."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]


def scripts() -> list[Path]:
    files = [path for folder in ("tools", "examples") for path in (REPOSITORY / folder).rglob("*.py")]
    return sorted(
        path for path in files if any(one in path.read_text() for one in ("ArgumentParser(", "add_argument("))
    )


def faults(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        keywords = {keyword.arg: keyword.value for keyword in node.keywords}
        first = node.args[0] if node.args else None
        is_option = isinstance(first, ast.Constant) and isinstance(first.value, str) and first.value.startswith("-")
        # `add` is what some call their parser's add_argument.
        if (
            is_option
            and ast.unparse(node.func).rpartition(".")[2] in ("add_argument", "add")
            and "help" not in keywords
        ):
            yield f"{node.lineno}: {ast.unparse(node.args[0])} has no help"
        function = ast.unparse(node.func)
        if function.endswith("ArgumentParser"):
            # The whole docstring of a module is fine, a part of it breaks off when somebody writes it anew.
            description = keywords.get("description")
            if isinstance(description, ast.Name) and description.id == "description":
                continue  # of measure.runner: the docstring of a tool's module
            text = description.value if isinstance(description, ast.Constant) else None
            if not (ast.unparse(description) == "__doc__" if description else False) and not str(text).endswith("."):
                yield f"{node.lineno}: the description does not end with a full stop"


@pytest.mark.parametrize("path", scripts(), ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_help_is_complete(path: Path) -> None:
    assert list(faults(path.read_text())) == []
