"""The page how-to/troubleshoot.md has every message of activation, the command line and the doctor, no others."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import bagua

_PACKAGE = Path(bagua.__file__).parent
_REPORTING = {"fail", "warn", "Finding", "_failed"}
# What the native library and the driver say is tested where they are.
_NATIVE = ("NCCL_SOCKET_IFNAME=…: no usable", "BAGUA_NET_…", "no answer from", "… (pid …)")


def _files() -> list[Path]:
    patterns = ("env.py", "net/*.py", "net/doctor/*.py", "cli/*.py")
    return [file for pattern in patterns for file in _PACKAGE.glob(pattern) if file.name != "net_bench.py"]


def _text(node: ast.expr) -> str | None:
    """A string of the source as the page writes it: values are dots, and only the first statement counts."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        text = node.value
    elif isinstance(node, ast.JoinedStr):
        text = "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
    else:
        return None
    return re.split(r"; |\n", text, maxsplit=1)[0]


def _message_of(call: ast.Call) -> ast.expr | None:
    """The argument that is the message, if this call reports one."""
    name = call.func.id if isinstance(call.func, ast.Name) else ""
    position = 1 if name == "Finding" else 0
    if (name in _REPORTING or name.endswith("Error")) and len(call.args) > position:
        return call.args[position]
    return None


def _reported() -> Iterator[str]:
    """Messages that are written out where they are reported."""
    for file in _files():
        for node in ast.walk(ast.parse(file.read_text())):
            message = _message_of(node) if isinstance(node, ast.Call) else None
            text = None if message is None else _text(message)
            if text is not None:
                yield text


def _strings() -> set[str]:
    nodes = (node for file in _files() for node in ast.walk(ast.parse(file.read_text())))
    return {text for node in nodes if isinstance(node, ast.expr) and (text := _text(node)) is not None}


@pytest.fixture
def documented(repository: Path) -> set[str]:
    page = (repository / "docs" / "how-to" / "troubleshoot.md").read_text()
    not_used = page.partition("## Bagua-Net is not used\n")[2].partition("## The job fails\n")[0]
    return {match[1] for match in re.finditer(r"^\| `(.+?)` \|", not_used, re.MULTILINE)}


def test_every_message_is_documented(documented: set[str]) -> None:
    reported = set(_reported())
    assert len(reported) > 25
    assert reported - documented == set()


def test_every_documented_message_exists(documented: set[str]) -> None:
    known = _strings()
    missing = {
        text for text in documented if not text.startswith(_NATIVE) and not any(text in string for string in known)
    }
    assert missing == set()
