"""Secrets: `bagua-net secret new`, and rights of BAGUA_NET_SECRET_FILE that are warned of, also by the bench,
in which the library's own log is off."""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path

import pytest

from bagua.cli import net_bench
from bagua.cli.net import main
from bagua.net import secret_file


def test_a_secret_is_random_and_its_owners_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = os.umask(0)
    try:
        assert [main(["secret", "new", str(tmp_path / name)]) for name in ("a", "b")] == [0, 0]
    finally:
        os.umask(before)
    contents = [(tmp_path / name).read_bytes() for name in ("a", "b")]
    assert [len(content) for content in contents] == [32, 32]
    assert contents[0] != contents[1]
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o600
    assert "BAGUA_NET_SECRET_FILE" in capsys.readouterr().out


def test_a_file_that_exists_is_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "secret"
    file.write_text("precious")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for path in (file, tmp_path / "link"):
        assert main(["secret", "new", str(path)]) == 1
        assert "exists" in capsys.readouterr().err
    assert file.read_text() == "precious"
    assert not (tmp_path / "nowhere").exists()


def test_a_folder_that_is_missing_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["secret", "new", str(tmp_path / "missing" / "secret")]) == 1
    error = capsys.readouterr().err
    assert str(tmp_path / "missing" / "secret") in error
    assert "No such file" in error


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
