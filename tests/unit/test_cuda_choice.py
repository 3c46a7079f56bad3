"""The tests that are chosen for GPUs exist."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.cuda_choice import chosen_tests


def test_every_chosen_test_exists(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With its parameters: pytest runs nothing at all if one of the tests that it is given is not there."""
    tests = chosen_tests()
    assert len(set(tests)) == len(tests)
    collect = ["--collect-only", "-q", "-m", "deep or not deep", "-p", "no:cacheprovider", f"--rootdir={repository}"]
    code = pytest.main([*collect, *(str(repository / test) for test in tests)])
    assert code == pytest.ExitCode.OK, capsys.readouterr()
