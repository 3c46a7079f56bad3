"""How a run of bagua-net-bench ends: an exit code, and one line for what went wrong."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bagua.net.bench.command_line import run_in_order
from bagua.net.bench.errors import BenchError, UsageError
from bagua.net.bench.gpu_sharing import GpuSharing
from bagua.net.bench.nccl_ab import processes
from bagua.net.bench.nccl_ab.options import NcclOptions, parse_options
from bagua.net.bench.nccl_ab.processes import RankRequest, RankSettings, own_ranks
from bagua.net.bench.processes import LocalPlace
from bagua.net.bench.ring.options import parse_options as parse_ring_options
from bagua.net.bench.ring.sessions import own_ranks as ring_ranks


@pytest.fixture(autouse=True)
def former_handler() -> Iterator[None]:
    handler = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, handler)


def raising(error: BaseException) -> Callable[[], int]:
    def run() -> int:
        raise error

    return run


def terminate_this_process() -> int:
    os.kill(os.getpid(), signal.SIGTERM)
    signal.sigtimedwait([], 5)
    return 0


@pytest.mark.parametrize(
    ("run", "code", "line"),
    [
        (lambda: 7, 7, ""),
        (raising(UsageError("wrong")), 2, "prog: error: wrong (all options: prog --help)\n"),
        (raising(BenchError("a rank died")), 1, "prog: error: a rank died\n"),
        (raising(KeyboardInterrupt()), 130, "prog: error: interrupted; all drivers are ended\n"),
        (terminate_this_process, 130, "prog: error: interrupted; all drivers are ended\n"),
    ],
    ids=["good", "usage", "failure", "Ctrl-C", "SIGTERM"],
)
def test_each_end_has_its_code_and_line(
    run: Callable[[], int], code: int, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_in_order("prog", "drivers", run) == code
    assert capsys.readouterr().err == line


def test_settings_that_the_plugin_refuses_are_told_before_a_driver_starts(tmp_path: Path) -> None:
    bad, missing = {"BAGUA_NET_RAILS": "foo"}, tmp_path / "none"
    with pytest.raises(BenchError, match=r"\ABAGUA_NET_RAILS=foo: must be an integer from 1 to 16"):
        ring_ranks(parse_ring_options([]), bad)
    with pytest.raises(BenchError, match=rf"\ABAGUA_NET_SECRET_FILE={missing}: the file cannot be opened"):
        ring_ranks(parse_ring_options([]), {"BAGUA_NET_SECRET_FILE": str(missing)})
    ring_ranks(parse_ring_options(["--backends", "bare"]), bad).close(failed=False)  # does not read them
    ring_ranks(parse_ring_options([]), {"ENABLE_BAGUA_NET": "maybe"}).close(failed=False)  # drivers do not get it


class TestGpusThatAreNotThere:
    @pytest.fixture
    def options(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., NcclOptions]:
        library = tmp_path / "libnccl-net.so"
        library.touch()

        def parsed(gpus: int, *words: str) -> NcclOptions:
            monkeypatch.setattr(processes, "_gpu_count", lambda: gpus)
            return parse_options(["--library", str(library), *words])

        return parsed

    @pytest.mark.parametrize(
        ("gpus", "words", "remedy"),
        [
            (0, [], "look at CUDA_VISIBLE_DEVICES and nvidia-smi, or"),
            (0, ["--share-gpus"], "look at CUDA_VISIBLE_DEVICES and nvidia-smi, or"),
            (1, [], "add --share-gpus to have several ranks on one, look at CUDA_VISIBLE_DEVICES and nvidia-smi, or"),
        ],
    )
    def test_there_must_be_two(
        self, gpus: int, words: list[str], remedy: str, options: Callable[..., NcclOptions], tmp_path: Path
    ) -> None:
        message = f"--nccl needs 2 GPUs or more, and torch sees {gpus}; {remedy}"
        with pytest.raises(BenchError, match=message):
            own_ranks(options(gpus, *words), {}, tmp_path)

    def test_and_one_for_each_rank(self, options: Callable[..., NcclOptions], tmp_path: Path) -> None:
        with pytest.raises(BenchError, match="--ranks 4 needs as many GPUs, and torch sees 2; give 2 or fewer"):
            own_ranks(options(2, "--ranks", "4"), {}, tmp_path)

    def test_or_one_that_all_ranks_share(self, options: Callable[..., NcclOptions], tmp_path: Path) -> None:
        ranks, sharing = own_ranks(options(1, "--share-gpus"), {}, tmp_path)
        assert (ranks.count, sharing) == (2, GpuSharing(1, through_mps=False))
        assert own_ranks(options(2, "--share-gpus", "--ranks", "5"), {}, tmp_path)[0].count == 5
        assert own_ranks(options(4, "--share-gpus"), {}, tmp_path)[1] is None

    def test_their_processes_are_hosts_of_their_own(self, options: Callable[..., NcclOptions], tmp_path: Path) -> None:
        place = own_ranks(options(1, "--share-gpus"), {}, tmp_path)[0].places[0]
        assert isinstance(place, LocalPlace)
        assert isinstance(place.settings, RankSettings)
        requests = [RankRequest(0, rank, rank, 2, "cuda", tcp_only=True, bind="", title="") for rank in range(2)]
        first, second = (place.settings.process_environment(request) for request in requests)
        assert first["NCCL_HOSTID"] != second["NCCL_HOSTID"]
        assert first["LOCAL_WORLD_SIZE"] == "2"

    @pytest.mark.parametrize("word", ["--shared-memory", "--no-tcp-only"])
    def test_they_have_tcp_only(self, word: str, options: Callable[..., NcclOptions], tmp_path: Path) -> None:
        name = word.removeprefix("--").replace("shared-memory", "shared memory").replace("no-tcp", "--no-tcp")
        with pytest.raises(BenchError, match=f"{name}: 2 ranks that share 1 GPU reach each other over TCP only"):
            own_ranks(options(1, "--share-gpus", word), {}, tmp_path)
