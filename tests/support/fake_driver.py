"""A bagua-net-driver that moves nothing: it answers in the driver's protocol, and fails where a test says.

FAKE_DRIVER_FAULT is a JSON object: {"at": command or "start", "do": what, "rank": 0, "transport": "plugin", "library":
"name.so"}; without rank, transport or library every driver fails. FAKE_DRIVER_PIDS is a directory in which each driver
leaves a file named by its pid, which says HANGS once it hangs. A library is a file with a number, by which its times
are multiplied; empty means 1.
Stdlib only: tests run it as a program of its own (see `install_fake_driver`).
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from pathlib import Path

# What a message costs: 10 us and 1 ns a byte, so that expected figures can be computed.
SECONDS_PER_MESSAGE = 10e-6
SECONDS_PER_BYTE = 1e-9
CPU_SECONDS_PER_BYTE = 0.25e-9

HANGS = "hangs"


def install_fake_driver(folder: Path) -> Path:
    """A program in `folder` that runs this file with this interpreter."""
    program = folder / "fake-bagua-net-driver"
    source = Path(__file__).read_text(encoding="utf-8")
    program.write_text(f"#!{sys.executable} -ES\n{source}", encoding="utf-8")
    program.chmod(0o755)
    return program


def emit(event: str, **fields: object) -> None:
    print(json.dumps({"event": event, **fields}), flush=True)


class Faults:
    """Decides whether this driver fails at a command, and does it."""

    def __init__(self, arguments: dict[str, str]) -> None:
        self._fault = json.loads(os.environ.get("FAKE_DRIVER_FAULT", "{}"))
        mine = {
            "rank": int(arguments.get("--rank", -1)),
            "transport": arguments.get("--transport", arguments.get("--role", "")),
            "library": Path(arguments.get("--library", "")).name,
        }
        self._applies = all(self._fault[key] == value for key, value in mine.items() if key in self._fault)

    def kind(self, at: str) -> str | None:
        return self._fault.get("do") if self._applies and self._fault.get("at") == at else None

    def strike(self, at: str) -> None:
        kind = self.kind(at)
        if kind == "exit":
            print("fake driver: gave up", file=sys.stderr, flush=True)
            os._exit(3)
        elif kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif kind == "hang":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            if "FAKE_DRIVER_PIDS" in os.environ:
                Path(os.environ["FAKE_DRIVER_PIDS"], str(os.getpid())).write_text(HANGS, encoding="utf-8")
            time.sleep(3600)
        elif kind == "error":
            emit("error", message="injected: the peer 10.0.0.9 refused the connection")
            os._exit(1)
        elif kind == "garbage":
            print("this is no JSON", flush=True)
        elif kind == "other_event":
            emit("surprise")


def slowness(arguments: dict[str, str]) -> float:
    library = arguments.get("--library")
    return float(Path(library).read_text(encoding="utf-8") or 1) if library else 1.0


def run_ring(arguments: dict[str, str], faults: Faults) -> None:
    channels = int(arguments["--channels"])
    handles = [f"{int(arguments['--rank']):02x}{channel:02x}" for channel in range(channels)]
    emit(
        "listening",
        handles=handles,
        transport=arguments["--transport"],
        table="v12",
        net_name="BaguaNet",
        devices=["lo"],
        pid=os.getpid(),
    )
    scale = slowness(arguments)
    following = (int(arguments["--rank"]) + 1) % int(arguments["--nranks"])
    for line in sys.stdin:
        words = line.split()
        faults.strike(words[0])
        if words[0] == "connect":
            expected = [f"{following:02x}{channel:02x}" for channel in range(channels)]
            if words[1:] != expected:
                emit("error", message=f"handles {words[1:]} are not those of rank {following}: {expected}")
                return
            emit("connected")
        elif words[0] == "run":
            size, iterations = int(words[1]), int(words[2])
            count = iterations - 1 if faults.kind("run") == "short" else iterations
            seconds = scale * (SECONDS_PER_MESSAGE + size * SECONDS_PER_BYTE)
            cpu = 2 * scale * size * iterations * CPU_SECONDS_PER_BYTE
            emit("result", bytes=size, seconds=[seconds] * count, cpu_s=cpu)
        elif words[0] == "verify":
            wrong = 3 if faults.kind("verify") == "wrong" else 0
            first = {"index": 17, "expected": 5, "found": 6} if wrong else None
            emit("verified", bytes=int(words[1]), wrong_elements=wrong, first_wrong=first)
        elif words[0] == "quit":
            emit("bye")
            return


def run_raw(arguments: dict[str, str], faults: Faults) -> None:
    if arguments["--role"] == "server":
        emit("listening", address="127.0.0.1:9")
    emit("connected")
    streams = int(arguments["--streams"])
    for line in sys.stdin:
        words = line.split()
        faults.strike(words[0])
        if words[0] == "run":
            moved, memory = int(words[1]), int(words[2])
            kept = int(arguments["--memory-bytes"])
            if memory > kept:
                emit("error", message=f"a run of {memory} B of memory, of which there are {kept}")
                return
            # More streams are faster here.
            seconds = moved * SECONDS_PER_BYTE / (4 * streams)
            emit("result", bytes=moved, seconds=seconds, cpu_s=moved * 0.1e-9)
        elif words[0] == "quit":
            emit("bye")
            return


def die_with_parent() -> None:
    """As the real driver does, so that a test that kills the command leaves nothing behind."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL, 0, 0, 0)


def main() -> None:
    die_with_parent()
    words = sys.argv[2:]
    arguments = dict(zip(words[::2], words[1::2], strict=True))
    if "FAKE_DRIVER_PIDS" in os.environ:
        Path(os.environ["FAKE_DRIVER_PIDS"], str(os.getpid())).touch()
    faults = Faults(arguments)
    faults.strike("start")
    if sys.argv[1] == "ring":
        run_ring(arguments, faults)
    else:
        run_raw(arguments, faults)


if __name__ == "__main__":
    main()
