"""NCCL's configuration files: what they set, and that nothing of the user's gets lost when we write one."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bagua.net.nccl_config_file import ConfigFileError, ConfigSetting, config_files, disable, enable, read_settings

_PLUGIN = "/opt/bagua/lib/libnccl-net.so"

_LINES = st.sampled_from(
    [b"NCCL_DEBUG=INFO\n", b"# comment \xff=1\n", b"\n", b"NCCL_NET_PLUGIN=ofi\n", b"NCCL_NET_PLUGIN =x\n", b"a=b\r\n"]
)
_CONTENT = st.builds(lambda lines, rest: b"".join(lines) + rest, st.lists(_LINES), st.binary(max_size=20))


def _values(file: Path) -> dict[str, str]:
    return {setting.name: setting.value for setting in read_settings([file])}


def test_what_a_file_sets(tmp_path: Path) -> None:
    file = tmp_path / "nccl.conf"
    file.write_bytes(
        b"# NCCL_NET=IB\nNCCL_DEBUG=WARN\nNCCL_SOCKET_IFNAME==ens1f0\nno setting\n NCCL_NET=x\nNCCL_DEBUG=INFO\n"
        b"NCCL_ALGO=Ring\r\nEMPTY=\nLAST=1"
    )
    assert _values(file) == {
        "NCCL_DEBUG": "WARN",  # the first of two lines
        "NCCL_SOCKET_IFNAME": "=ens1f0",
        " NCCL_NET": "x",  # nothing is trimmed
        "NCCL_ALGO": "Ring",
        "EMPTY": "",
        "LAST": "1",
    }


def test_which_files_are_read(tmp_path: Path) -> None:
    system, home, named = tmp_path / "etc.conf", tmp_path / ".nccl.conf", tmp_path / "named.conf"
    for file in (system, home, named):
        file.write_text(f"WHERE={file.name}\n")
    in_home = {"HOME": str(tmp_path)}
    assert config_files(in_home, system) == [home, system]
    assert config_files({**in_home, "NCCL_CONF_FILE": str(named)}, system) == [named, system]
    assert config_files({**in_home, "NCCL_CONF_FILE": ""}, system) == [home, system]
    assert config_files({}, tmp_path / "none") == []
    assert read_settings([home, system]) == [ConfigSetting("WHERE", ".nccl.conf", home)]
    assert read_settings([tmp_path]) == [], "one that cannot be read"


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=_CONTENT)
def test_enable_and_disable_leave_every_byte(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "nccl.conf"
    file.write_bytes(content)
    others = {name: value for name, value in _values(file).items() if name != "NCCL_NET_PLUGIN"}

    assert enable(file, _PLUGIN, force=True)
    assert _values(file) == {**others, "NCCL_NET_PLUGIN": _PLUGIN}
    assert not enable(file, _PLUGIN, force=False), "it is there already"
    assert enable(file, "/moved" + _PLUGIN, force=False)
    assert _values(file) == {**others, "NCCL_NET_PLUGIN": "/moved" + _PLUGIN}

    assert disable(file)
    assert (file.read_bytes() if file.exists() else b"") == content
    assert not disable(file)


def test_a_line_of_the_users_own_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "nccl.conf"
    file.write_text("NCCL_DEBUG=WARN\nNCCL_NET_PLUGIN=ofi\n")
    with pytest.raises(
        ConfigFileError, match=r"nccl\.conf sets NCCL_NET_PLUGIN=ofi already\n.*`bagua-net enable --force`"
    ):
        enable(file, _PLUGIN, force=False)
    assert file.read_text() == "NCCL_DEBUG=WARN\nNCCL_NET_PLUGIN=ofi\n"
    assert enable(file, _PLUGIN, force=True)
    assert not enable(file, _PLUGIN, force=False), "what was set aside once needs no second --force"


def test_a_new_file_is_readable_by_all_and_goes_again(tmp_path: Path) -> None:
    file = tmp_path / "nccl.conf"
    assert enable(file, _PLUGIN, force=False)
    assert stat.S_IMODE(file.stat().st_mode) == 0o644
    assert list(tmp_path.iterdir()) == [file], "no temporary file is left"
    assert disable(file)
    assert not file.exists()


@pytest.mark.parametrize("mode", [0o600, 0o664])
def test_mode_and_link_are_kept(mode: int, tmp_path: Path) -> None:
    file, link = tmp_path / "dotfiles.conf", tmp_path / "nccl.conf"
    file.write_text("NCCL_DEBUG=WARN\n")
    file.chmod(mode)
    link.symlink_to(file)
    assert enable(link, _PLUGIN, force=False)
    assert link.is_symlink()
    assert stat.S_IMODE(file.stat().st_mode) == mode
    assert _values(file)["NCCL_NET_PLUGIN"] == _PLUGIN
    assert disable(link)
    assert link.is_symlink()
    assert file.read_text() == "NCCL_DEBUG=WARN\n"


def test_errors_of_the_system_name_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulated: root, as whom containers test, may write everywhere."""

    def refused(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    with pytest.raises(ConfigFileError, match=r"cannot be written \(No such file or directory\)\nCreate the directory"):
        enable(tmp_path / "none" / "nccl.conf", _PLUGIN, force=False)
    file = tmp_path / "nccl.conf"
    enable(file, _PLUGIN, force=False)
    for owner, name, call, told in (
        (Path, "unlink", disable, "removed"),
        (tempfile, "mkstemp", lambda one: enable(one, "/moved", force=False), "written"),
        (Path, "read_bytes", disable, "read"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, refused)
            with pytest.raises(ConfigFileError, match=f"cannot be {told} .Permission denied.\n"):
                call(file)


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "nccl.conf"
    file.write_text("NCCL_DEBUG=WARN\n")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ConfigFileError, match="No space left on device"):
        enable(file, _PLUGIN, force=False)
    assert file.read_text() == "NCCL_DEBUG=WARN\n"
    assert list(tmp_path.iterdir()) == [file]
