"""Several ranks on one GPU: who has which, and what NCCL and the reader are told."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs PyTorch: the tools' ranks train")

sys.path.append(str(Path(__file__).resolve().parents[2] / "tools"))

from measure.options import add_ranks, choose_device
from measure.ranks.lab_placement import LabPlacement
from measure.ranks.placement import HostPlacement

from bagua.net.bench.gpu_sharing import GpuSharing, gpu_name, mps_is_running, sharing_of

NO_MPS = {"CUDA_MPS_PIPE_DIRECTORY": "/nonexistent"}


def test_a_gpu_for_each_rank_is_no_sharing() -> None:
    assert sharing_of(2, 2, NO_MPS) is None
    assert sharing_of(1, 8, NO_MPS) is None


def test_more_ranks_than_gpus_share_them() -> None:
    assert sharing_of(4, 1, NO_MPS) == GpuSharing(gpus=1, through_mps=False)
    assert sharing_of(3, 2, NO_MPS) == GpuSharing(gpus=2, through_mps=False)


def test_without_a_gpu_there_is_nothing_to_share() -> None:
    with pytest.raises(ValueError, match="2 ranks cannot share GPUs where there are none; look at nvidia-smi"):
        sharing_of(2, 0, NO_MPS)


def test_nccl_takes_each_rank_for_a_host_of_its_own() -> None:
    sharing = GpuSharing(1, through_mps=True)
    hosts = [sharing.environment(rank)["NCCL_HOSTID"] for rank in range(4)]
    assert len(set(hosts)) == 4


def test_the_reader_is_told() -> None:
    assert str(GpuSharing(1, through_mps=True)) == "1 GPU shared through MPS"
    assert str(GpuSharing(2, through_mps=False)) == "2 GPUs shared in turns, without MPS"
    assert "start nvidia-cuda-mps-control -d" in GpuSharing(2, through_mps=False).note
    assert "nvidia-cuda-mps-control" not in GpuSharing(2, through_mps=True).note


class TestMps:
    def environment(self, folder: Path, pid: object) -> dict[str, str]:
        # The daemon writes no newline.
        (folder / "nvidia-cuda-mps-control.pid").write_text(str(pid))
        return {"CUDA_MPS_PIPE_DIRECTORY": str(folder)}

    def test_it_runs_if_its_process_does(self, tmp_path: Path) -> None:
        assert mps_is_running(self.environment(tmp_path, os.getpid()))

    def test_a_daemon_that_is_gone_has_left_its_file(self, tmp_path: Path) -> None:
        with subprocess.Popen(["true"]) as gone:
            gone.wait()
        assert not mps_is_running(self.environment(tmp_path, gone.pid))

    @pytest.mark.parametrize("content", ["", "no number", "../self"])
    def test_what_is_no_process_is_none(self, content: str, tmp_path: Path) -> None:
        assert not mps_is_running(self.environment(tmp_path, content))

    def test_there_may_never_have_been_one(self) -> None:
        assert not mps_is_running(NO_MPS)


def test_gpus_are_those_that_we_see() -> None:
    assert gpu_name(1, {}) == "1"
    assert gpu_name(1, {"CUDA_VISIBLE_DEVICES": "3, GPU-5"}) == "GPU-5"


def chosen(*words: str, gpus: int) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_ranks(parser)
    given = parser.parse_args(words)
    choose_device(parser, given, lambda: gpus)
    return given


class TestOption:
    def test_it_changes_nothing_with_a_gpu_for_each_rank(self) -> None:
        given = chosen("--share-gpus", gpus=2)
        assert (given.device, given.sharing) == ("cuda", None)

    def test_it_makes_one_gpu_enough(self) -> None:
        assert chosen(gpus=1).device == "cpu"
        for device in ("auto", "cuda"):
            shared = chosen("--share-gpus", "--device", device, gpus=1)
            assert (shared.device, shared.sharing.gpus) == ("cuda", 1)

    def test_without_a_gpu_it_is_of_no_use(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert chosen("--share-gpus", gpus=0).device == "cpu"
        with pytest.raises(SystemExit):
            chosen("--share-gpus", "--device", "cuda", gpus=0)
        error = capsys.readouterr().err
        assert "--nproc-per-node 2 needs as many GPUs, this machine shows 0; lower it, or use --device cpu" in error

    def test_the_error_without_it_names_it(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit):
            chosen("--device", "cuda", gpus=1)
        assert "this machine shows 1; lower it, add --share-gpus to have several ranks" in capsys.readouterr().err


class TestPlacement:
    def test_on_one_host(self) -> None:
        assert HostPlacement().environment(1) == {}
        sharing = GpuSharing(1, through_mps=False)
        assert HostPlacement(sharing).environment(1) == sharing.environment(1)

    @pytest.mark.parametrize(
        ("gpus", "visible", "names"),
        [
            (None, None, [None] * 4),
            (4, None, ["0", "1", "2", "3"]),
            (2, None, ["0", "1", "0", "1"]),
            (2, "5,7", ["5", "7", "5", "7"]),
        ],
    )
    def test_on_the_hosts_of_a_lab(
        self, gpus: int | None, visible: str | None, names: Sequence[str | None], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        placement = LabPlacement(PlayedLab(), gpus=gpus)  # type: ignore[arg-type]
        assert [placement.environment(rank).get("CUDA_VISIBLE_DEVICES") for rank in range(4)] == names
        assert placement.environment(3)["NCCL_HOSTID"] == "host 3"


class PlayedHost:
    def address(self) -> str:
        return "10.0.0.1"


class PlayedLab:
    hosts = (PlayedHost(),)

    def rank_environment(self, host: int) -> dict[str, str]:
        return {"RANK": str(host), "NCCL_HOSTID": f"host {host}"}
