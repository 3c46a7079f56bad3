"""The how-to pages quote messages and log levels that the sources have: a search for one finds its page."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
HOW_TO = REPOSITORY / "docs" / "how-to" / "train"
FAILURES = (HOW_TO / "handle-failures.md").read_text()
LOG = (HOW_TO / "log.md").read_text()
CORE = ("job", "collectives", "replicas", "engine", "comm_ops", "torch_api")
# Of torch.
NOT_OURS = {"terminate called without an active exception", "TORCH_NCCL_BLOCKING_WAIT"}
EXCEPTION = re.compile(r"^\w+Error: ")  # Python's way to print one
SHORTEST = 8  # characters of a quotation that say something


@functools.cache  # not while tests are collected, which every worker does
def strings_of_core() -> list[str]:
    """Every string constant, and the constant pieces of f-strings."""
    found: list[str] = []
    for folder in CORE:
        for path in sorted((REPOSITORY / "bagua" / folder).rglob("*.py")):
            nodes = ast.walk(ast.parse(path.read_text()))
            found += [one.value for one in nodes if isinstance(one, ast.Constant) and isinstance(one.value, str)]
    return found


def quoted_messages() -> list[str]:
    """What stands in code in the first column, cut where a message has values of its own."""
    rows = [line for line in FAILURES.splitlines() if line.startswith("| `")]
    quotations = [quotation for row in rows for quotation in re.findall(r"`([^`]+)`", row.split("|")[1])]
    pieces = [
        piece
        for quotation in quotations
        for piece in re.split(
            r"\.\.\.|\brank (?=\d)|\d+|\(host b\)|\bexited\b|(?<=different )(?:parameters|buffers)",
            EXCEPTION.sub("", quotation),
        )
    ]
    return sorted({piece for piece in pieces if len(piece.strip()) >= SHORTEST})


@pytest.mark.parametrize("piece", [piece for piece in quoted_messages() if piece not in NOT_OURS])
def test_message_is_in_the_sources(piece: str) -> None:
    assert any(piece.strip(" ():") in string for string in strings_of_core())


def test_messages_are_found_on_the_page() -> None:
    assert len(quoted_messages()) > 10


def test_levels_of_the_log_are_those_that_are_known() -> None:
    rows = [line for line in LOG.splitlines() if line.startswith("| `")][1:]
    levels = [level for row in rows for level in re.findall(r"`(\w+)`", row)]
    assert levels == ["debug", "info", "warning", "error"]
    assert set(levels) <= set(strings_of_core())
