"""The tests that are chosen for GPUs exist."""

from __future__ import annotations

import ast
from pathlib import Path

from support.cuda_choice import CHOICE, chosen_tests, file_of


def test_every_chosen_test_exists(repository: Path) -> None:
    for topic, tests in CHOICE.items():
        tree = ast.parse((repository / file_of(topic)).read_text())
        there = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        assert {test.partition("[")[0] for test in tests} <= there, topic
        plain = {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and not node.decorator_list}
        assert not [test for test in tests if "[" in test and test.partition("[")[0] in plain], "has no parameters"
    assert len(set(chosen_tests())) == len(chosen_tests())
