"""What the line about a wrapped module says of Bagua-Net: what NCCL will do, whoever arranged it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from bagua.net import activation, nccl_config_file
from bagua.net.library import MissingFileError
from bagua.torch_api.wrap_summary import summary


@pytest.fixture(autouse=True)
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """That of an installation made up here, on a host on which nobody has set anything."""
    path = tmp_path / "site-packages" / "lib" / "libnccl-net.so"
    path.parent.mkdir(parents=True)
    path.touch()
    monkeypatch.setattr(activation, "library_path", lambda: path)
    monkeypatch.setattr(activation, "initial_environment", dict)
    monkeypatch.setattr(activation, "wheel_release", lambda: None)
    monkeypatch.setattr(activation, "_replaced", {})
    monkeypatch.setattr(nccl_config_file, "SYSTEM_FILE", tmp_path / "etc" / "nccl.conf")
    with mock.patch.dict(os.environ, {"HOME": str(tmp_path)}, clear=True):
        yield path


def told(device: str = "cuda") -> str:
    parameter = SimpleNamespace(device=torch.device(device), numel=lambda: 784)
    engine: Any = SimpleNamespace(
        module=torch.nn.Sequential(),
        synchronized_parameters=[("0.weight", parameter)],
        process_group=SimpleNamespace(torch_group=None, size=2),
        bagua_algorithm=object(),
        bagua_buckets=[],
    )
    return summary(engine).rpartition(", ")[2]


def import_bagua(**variables: str) -> None:
    os.environ.update(variables)
    activation.activate_at_import()


def write_config(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize("name", ["ENABLE_BAGUA_NET", "BAGUA_NET_REQUIRED"])
def test_on_where_it_was_activated(name: str) -> None:
    import_bagua(**{name: "1"})
    assert told() == "Bagua-Net on"


def test_off_where_nobody_asked() -> None:
    import_bagua()
    assert told() == "Bagua-Net off"


@pytest.mark.parametrize(
    ("name", "value"),
    [("NCCL_NET", "Socket"), ("NCCL_NET_PLUGIN", "none"), ("NCCL_NET_PLUGIN", "ofi"), ("NCCL_NET_PLUGIN", "")],
)
@pytest.mark.parametrize("place", ["environment", "file"])
def test_off_where_a_setting_leads_elsewhere(name: str, value: str, place: str, tmp_path: Path) -> None:
    if place == "environment":
        import_bagua(ENABLE_BAGUA_NET="1", **{name: value})
    else:
        write_config(tmp_path / ".nccl.conf", f"{name}={value}\n")
        import_bagua(ENABLE_BAGUA_NET="1")
    assert told() == "Bagua-Net off"


def test_off_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Path:
        raise MissingFileError("not installed")

    monkeypatch.setattr(activation, "library_path", missing)
    import_bagua(ENABLE_BAGUA_NET="1")
    assert told() == "Bagua-Net off"


def test_off_where_it_was_asked_for_too_late() -> None:
    """Nobody has told NCCL."""
    import_bagua()
    os.environ["ENABLE_BAGUA_NET"] = "1"
    assert told() == "Bagua-Net off"


@pytest.mark.parametrize("file", [".nccl.conf", "etc/nccl.conf"])
def test_on_by_a_configuration_file(file: str, library: Path, tmp_path: Path) -> None:
    path = tmp_path / file
    path.parent.mkdir(exist_ok=True)
    nccl_config_file.enable(path, str(library), force=False)
    import_bagua()
    assert told() == "Bagua-Net on"


@pytest.mark.parametrize("name", ["ENABLE_BAGUA_NET", "NCCL_NET", "NCCL_NET_PLUGIN"])
@pytest.mark.parametrize("place", ["environment", "file"])
def test_off_in_spite_of_a_configuration_file(name: str, place: str, library: Path, tmp_path: Path) -> None:
    setting = {"ENABLE_BAGUA_NET": "0", "NCCL_NET": "IB", "NCCL_NET_PLUGIN": "none"}[name]
    path = tmp_path / ".nccl.conf"
    before = f"{name}={setting}\n" if place == "file" else ""
    write_config(path, f"{before}NCCL_NET_PLUGIN={library}\n")
    import_bagua(**({name: setting} if place == "environment" else {}))
    assert told() == "Bagua-Net off"


def test_on_where_the_process_was_started_with_it(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `bagua-net run` does, and with --by-name, for NCCL 2.20 and older."""
    with mock.patch.dict(os.environ, {"NCCL_NET_PLUGIN": str(library)}):
        assert told() == "Bagua-Net on"
    monkeypatch.setattr(activation, "initial_environment", lambda: {"LD_LIBRARY_PATH": str(library.parent)})
    assert told() == "Bagua-Net on"


@pytest.mark.parametrize("name", ["ENABLE_BAGUA_NET", "BAGUA_NET_REQUIRED"])
def test_a_value_that_means_nothing_is_no_error(name: str, library: Path) -> None:
    """It was one, or a warning, at import; the library does not start with it."""
    os.environ.update({"NCCL_NET_PLUGIN": str(library), name: "maybe"})
    assert told() == "Bagua-Net off"


def test_what_cannot_be_read_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: object) -> list[Path]:
        raise PermissionError("/home/other/.nccl.conf")

    monkeypatch.setattr(nccl_config_file, "config_files", forbidden)
    import_bagua(ENABLE_BAGUA_NET="1")
    assert told() == "Bagua-Net off"


def test_nothing_is_said_of_it_on_the_cpu() -> None:
    import_bagua(ENABLE_BAGUA_NET="1")
    assert told("cpu") == "no group"
