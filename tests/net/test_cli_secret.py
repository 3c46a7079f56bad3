"""`bagua-net secret new`."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from bagua.cli.net import main


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
