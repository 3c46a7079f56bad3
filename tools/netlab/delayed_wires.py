"""Wires with a delay: pairs of TAP devices, and the one process that carries packets between them (forwarder/).

A `DelayedWires` belongs to a Lab, whose thread uses it. The process ends when its standard input does, which is at the
latest when this process ends, however it ends.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import select
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from .errors import NetlabError
from .namespace import NetworkNamespace
from .tap import open_tap, plug_in

_SOURCES = Path(__file__).with_name("forwarder")
# Ignored by git, removed by `make clean`.
_CACHE = Path(__file__).resolve().parents[2] / "build" / "netlab"
_FLAGS = ("-std=c++17", "-O2", "-pthread")
_COMPILE_SECONDS = 120.0

_DELAY = re.compile(r"0|(?P<number>\d+(\.\d+)?)(?P<unit>us|ms|s)")
_UNIT_MS = {"us": 1e-3, "ms": 1.0, "s": 1e3}
MIN_DELAY_MS, MAX_DELAY_MS = 0.01, 10_000.0
# Of a link without a rate; more than one core forwards.
_FASTEST_MBIT = 25_000.0
# Beside what the delay alone keeps under way: bursts, and a forwarder that was late.
_SPARE_BYTES = 8 << 20
_MOST_RING_BYTES = 2 << 30

_ANSWER_SECONDS = 5.0
_END_SECONDS = 5.0


def check_delay(delay_ms: float) -> None:
    if not MIN_DELAY_MS <= delay_ms <= MAX_DELAY_MS:
        raise ValueError(f"delay is {delay_ms:g} ms; it must be {MIN_DELAY_MS:g} to {MAX_DELAY_MS:g} ms, or 0 for none")


def parse_delay_ms(text: str) -> float:
    """`5ms`, `250us` or `0.1s`, one way, as milliseconds; `0` is none."""
    match = _DELAY.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"delay {text!r} is not a number with a unit: write 250us, 5ms or 0.1s (one way)")
    delay_ms = float(match["number"]) * _UNIT_MS[match["unit"]] if match["unit"] else 0.0
    if delay_ms:
        check_delay(delay_ms)
    return delay_ms


@dataclass(frozen=True)
class DelayUsage:
    """One direction of one wire since it was made."""

    packets: int
    full: int  # times that a packet had to wait at its source for room
    mean_late_ms: float  # how much longer than the delay packets were kept
    most_late_ms: float


@dataclass(frozen=True)
class _Wire:
    descriptors: tuple[int, int]
    delay_ms: float
    ring_bytes: int

    def __str__(self) -> str:
        first, second = self.descriptors
        return f"{first}:{second}:{round(self.delay_ms * 1e6)}:{self.ring_bytes}"


class DelayedWires:
    """`add` every wire, then `start`, then set the interfaces up and `plug_in`; `close` in any state."""

    def __init__(self) -> None:
        self._wires: list[_Wire] = []
        self._process: subprocess.Popen[str] | None = None

    def add(
        self,
        first: tuple[NetworkNamespace, str],
        second: tuple[NetworkNamespace, str],
        *,
        delay_ms: float,
        rate_mbit: float | None,
    ) -> None:
        """Makes an interface in either namespace, each named by its second part."""
        descriptors: list[int] = []
        try:
            for namespace, name in (first, second):
                with namespace.inside():
                    descriptors.append(open_tap(name))
        except BaseException:
            for descriptor in descriptors:
                os.close(descriptor)
            raise
        under_way = (rate_mbit or _FASTEST_MBIT) * 1e6 / 8 * delay_ms * 1e-3
        ring_bytes = min(_MOST_RING_BYTES, int(1.25 * under_way) + _SPARE_BYTES)
        self._wires.append(_Wire((descriptors[0], descriptors[1]), delay_ms, ring_bytes))

    def start(self) -> None:
        program = forwarder_program()
        self._process = subprocess.Popen(
            [str(program), *map(str, self._wires)],
            pass_fds=[descriptor for wire in self._wires for descriptor in wire.descriptors],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C reaches the owner of the lab, who ends this in its turn
        )
        if self._line() != "ready":
            raise NetlabError(f"netlab: the forwarder {program} did not start; it said why on stderr")

    def plug_in(self) -> None:
        for wire in self._wires:
            for descriptor in wire.descriptors:
                plug_in(descriptor)

    def usage(self) -> list[DelayUsage]:
        """Two for each wire, its first end's direction first. Empty before `start`."""
        if self._process is None or self._process.stdin is None:
            return []
        with suppress(BrokenPipeError):
            self._process.stdin.write("\n")
            self._process.stdin.flush()
        line = self._line()
        if not line:
            raise NetlabError(f"netlab: the forwarder ended with code {self._process.poll()} while the lab was in use")
        return [
            DelayUsage(
                one["packets"], one["full"], one["late_ns"] / max(1, one["packets"]) * 1e-6, one["latest_ns"] * 1e-6
            )
            for one in json.loads(line)
        ]

    def close(self) -> None:
        process, self._process = self._process, None
        try:
            if process is not None:
                _end(process)
        finally:
            for wire in self._wires:
                for descriptor in wire.descriptors:
                    os.close(descriptor)
            self._wires.clear()

    def _line(self) -> str:
        assert self._process is not None
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], _ANSWER_SECONDS)[0]:
            raise NetlabError(f"netlab: no answer of the forwarder within {_ANSWER_SECONDS:g} s")
        return self._process.stdout.readline().strip()


def _end(process: subprocess.Popen[str]) -> None:
    with process:  # closes the pipes and reaps
        assert process.stdin is not None
        with suppress(BrokenPipeError):
            process.stdin.close()
        try:
            process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()


def describe_delays(delay_ms: float, usages: Sequence[DelayUsage]) -> str:
    """`packets were kept 5 ms and 0.031 ms more, at most 0.4 ms more`, and what was lost, if anything was."""
    packets = sum(usage.packets for usage in usages)
    mean = sum(usage.mean_late_ms * usage.packets for usage in usages) / max(1, packets)
    most = max((usage.most_late_ms for usage in usages), default=0.0)
    text = f"packets were kept {delay_ms:g} ms and {mean:.3f} ms more, at most {most:.2f} ms more"
    if any(usage.full for usage in usages):
        text += "; the forwarder was full at times, so that they also waited at their source"
    return text


def forwarder_program() -> Path:
    """The compiled forwarder. The first use compiles it, with the compiler in CXX (default c++)."""
    sources = sorted(_SOURCES.glob("*.cc"))
    compiler = shlex.split(os.environ.get("CXX") or "c++")
    digest = hashlib.sha256(" ".join([*compiler, *_FLAGS]).encode())
    for path in sorted(_SOURCES.iterdir()):
        digest.update(path.read_bytes())
    program = _CACHE / f"forwarder-{digest.hexdigest()[:12]}"
    if program.exists():
        return program
    if shutil.which(compiler[0]) is None:
        raise NetlabError(
            f"netlab: delays need a C++ compiler, once; there is no {compiler[0]!r} on the PATH: install one (Debian:"
            " apt-get install g++) or set CXX"
        )
    _CACHE.mkdir(parents=True, exist_ok=True)
    # Two processes may compile at once: each its own file, and the name gets a whole one.
    with tempfile.TemporaryDirectory(dir=_CACHE) as folder:
        fresh = Path(folder) / "forwarder"
        done = subprocess.run(
            [*compiler, *_FLAGS, *map(str, sources), "-o", str(fresh)],
            capture_output=True,
            text=True,
            timeout=_COMPILE_SECONDS,
        )
        if done.returncode != 0:
            raise NetlabError(f"netlab: {compiler[0]} could not compile {_SOURCES}:\n{done.stderr.strip()}")
        fresh.replace(program)
    return program
