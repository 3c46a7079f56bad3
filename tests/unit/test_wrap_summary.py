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
        setup=SimpleNamespace(algorithm_name="gradient_allreduce"),
        bagua_buckets=[],
    )
    return summary(engine).rpartition(", ")[2]


def import_bagua(**variables: str) -> None:
    os.environ.update(variables)
    activation.activate_at_import()


def write_config(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)


ASKED = {"ENABLE_BAGUA_NET": "1"}


@pytest.mark.parametrize(
    ("variables", "file", "state"),
    [
        (ASKED, "", "on"),
        ({"BAGUA_NET_REQUIRED": "1"}, "", "on"),
        ({}, "", "off"),
        ({}, "NCCL_NET_PLUGIN={library}", "on"),
        *((ASKED | {name: value}, "", "off") for name, value in (("NCCL_NET", "Socket"), ("NCCL_NET_PLUGIN", "ofi"))),
        (ASKED, "NCCL_NET=Socket", "off"),
        (ASKED, "NCCL_NET_PLUGIN=", "off"),
        *(
            case
            for name, value in (("ENABLE_BAGUA_NET", "0"), ("NCCL_NET", "IB"), ("NCCL_NET_PLUGIN", "none"))
            for case in (
                ({name: value}, "NCCL_NET_PLUGIN={library}", "off"),
                ({}, f"{name}={value}\nNCCL_NET_PLUGIN={{library}}", "off"),
            )
        ),
    ],
)
@pytest.mark.parametrize("place", [".nccl.conf", "etc/nccl.conf"])
def test_what_nccl_will_do(
    variables: dict[str, str], file: str, state: str, place: str, library: Path, tmp_path: Path
) -> None:
    write_config(tmp_path / place, file.format(library=library) + "\n")
    import_bagua(**variables)
    assert told() == f"Bagua-Net {state}"
    assert told("cpu") == ("which does not use Bagua-Net" if state == "on" else "no group")


def test_off_where_it_was_asked_for_too_late() -> None:
    """Nobody has told NCCL."""
    import_bagua()
    os.environ["ENABLE_BAGUA_NET"] = "1"
    assert told() == "Bagua-Net off"


def test_on_where_the_process_was_started_with_it(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `bagua-net run` does, and with --by-name, for NCCL 2.20 and older."""
    with mock.patch.dict(os.environ, {"NCCL_NET_PLUGIN": str(library)}):
        assert told() == "Bagua-Net on"
    monkeypatch.setattr(activation, "initial_environment", lambda: {"LD_LIBRARY_PATH": str(library.parent)})
    assert told() == "Bagua-Net on"


@pytest.mark.parametrize(
    ("owner", "name", "error"),
    [(activation, "library_path", MissingFileError("x")), (nccl_config_file, "config_files", PermissionError("x"))],
)
def test_what_cannot_be_found_out_is_no_error(
    owner: Any, name: str, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, mock.Mock(side_effect=error))
    import_bagua(**ASKED)
    assert told() == "Bagua-Net off"


@pytest.mark.parametrize("name", ["ENABLE_BAGUA_NET", "BAGUA_NET_REQUIRED"])
def test_a_value_that_means_nothing_is_no_error(name: str, library: Path) -> None:
    """It was one, or a warning, at import; the library does not start with it."""
    os.environ.update({"NCCL_NET_PLUGIN": str(library), name: "maybe"})
    assert told() == "Bagua-Net off"
