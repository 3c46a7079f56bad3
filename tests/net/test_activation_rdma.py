"""RDMA ports, read from a sysfs made up here."""

from __future__ import annotations

from pathlib import Path

import pytest

from bagua.net import rdma
from bagua.net.activation import Surroundings, Target, activate


def make_port(sysfs: Path, device: str, port: str, state: str, rate: str = "") -> None:
    folder = sysfs / device / "ports" / port
    folder.mkdir(parents=True)
    (folder / "state").write_text(state + "\n")
    if rate:
        (folder / "rate").write_text(rate + "\n")


def test_only_active_ports_count(tmp_path: Path) -> None:
    make_port(tmp_path, "mlx5_1", "1", "4: ACTIVE", "400 Gb/sec (4X NDR)")
    make_port(tmp_path, "mlx5_0", "1", "1: DOWN", "10 Gb/sec")
    make_port(tmp_path, "mlx5_0", "2", "4: ACTIVE")
    make_port(tmp_path, "mlx4_0", "1", "2: INIT")
    make_port(tmp_path, "mlx4_0", "2", "5: ACTIVE_DEFER")
    assert rdma.active_ports(tmp_path) == [
        rdma.RdmaPort("mlx5_0", "2", ""),
        rdma.RdmaPort("mlx5_1", "1", "400 Gb/sec (4X NDR)"),
    ]
    assert rdma.active_ports(tmp_path / "none") == []
    assert not rdma.has_device_files(tmp_path)
    (tmp_path / "uverbs0").touch()
    assert rdma.has_device_files(tmp_path)


def test_activation_reads_this_hosts_ports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    make_port(tmp_path, "mlx5_0", "1", "4: ACTIVE")
    active_ports = rdma.active_ports
    monkeypatch.setattr(rdma, "active_ports", lambda: active_ports(tmp_path))
    variables = {"ENABLE_BAGUA_NET": "1", "HOME": str(tmp_path)}
    assert Surroundings.of_this_host(variables, Target.NEW_PROCESS).rdma_ports == (rdma.RdmaPort("mlx5_0", "1", ""),)
    activate(variables)
    activate(variables)
    (record,) = caplog.records
    assert record.name == "bagua.net"
    assert "Bagua-Net: this host has an RDMA network, mlx5_0:1, which" in record.message


@pytest.mark.parametrize(("value", "is_used"), [("", True), ("0", True), ("1", False), ("2", False), ("no", True)])
def test_nccl_ib_disable_is_read_as_nccl_does(value: str, is_used: bool) -> None:
    assert rdma.is_used_by_nccl({"NCCL_IB_DISABLE": value}) is is_used
