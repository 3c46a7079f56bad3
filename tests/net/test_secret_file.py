"""Rights of BAGUA_NET_SECRET_FILE that are warned of, also by the bench, in which the library's own log is off."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from bagua.cli import net_bench
from bagua.net import secret_file


@pytest.mark.parametrize(
    ("mode", "remedies"),
    [(0o600, []), (0o440, []), (0o644, ["chmod o-r"]), (0o660, ["chmod g-w"]), (0o664, ["chmod o-r", "chmod g-w"])],
)
def test_who_else_may_read_or_write_is_warned_of(tmp_path: Path, mode: int, remedies: list[str]) -> None:
    file = tmp_path / "secret"
    file.touch()
    file.chmod(mode)
    found = secret_file.warnings(str(file))
    assert [remedy in text for (_, text), remedy in zip(found, remedies, strict=True)] == [True] * len(remedies)


def test_what_is_no_file_is_left_to_the_library(tmp_path: Path) -> None:
    assert secret_file.warnings("") == secret_file.warnings(str(tmp_path)) == secret_file.warnings("/missing") == []


def test_the_bench_warns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "secret"
    file.touch()
    file.chmod(0o644)
    monkeypatch.setenv(secret_file.SECRET_FILE, str(file))
    monkeypatch.setenv("_BAGUA_NET_SAID", "")
    with caplog.at_level(logging.WARNING, logger="bagua.net"), pytest.raises(SystemExit):
        net_bench.main(["--no-such-option"])
    assert f"can read {file}" in caplog.text
