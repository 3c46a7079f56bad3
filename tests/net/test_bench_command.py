"""How a run of bagua-net-bench ends: an exit code, and one line for what went wrong."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bagua.net.bench.command import run_in_order
from bagua.net.bench.errors import BenchError, UsageError
from bagua.net.bench.nccl_ab import command
from bagua.net.bench.nccl_ab.options import NcclOptions, parse_options


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


class TestGpusThatAreNotThere:
    @pytest.fixture
    def options(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., NcclOptions]:
        library = tmp_path / "libnccl-net.so"
        library.touch()

        def parsed(gpus: int, *words: str) -> NcclOptions:
            monkeypatch.setattr(command, "_gpu_count", lambda: gpus)
            return parse_options(["--library", str(library), *words])

        return parsed

    @pytest.mark.parametrize("gpus", [0, 1])
    def test_there_must_be_two(self, gpus: int, options: Callable[..., NcclOptions], tmp_path: Path) -> None:
        message = f"--nccl needs 2 GPUs or more, and torch sees {gpus}; look at CUDA_VISIBLE_DEVICES and nvidia-smi, or"
        with pytest.raises(BenchError, match=message):
            command._local_crew(options(gpus), {}, tmp_path)

    def test_and_one_for_each_rank(self, options: Callable[..., NcclOptions], tmp_path: Path) -> None:
        with pytest.raises(BenchError, match="--ranks 4 needs as many GPUs, and torch sees 2; give 2 or fewer"):
            command._local_crew(options(2, "--ranks", "4"), {}, tmp_path)
