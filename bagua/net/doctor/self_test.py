"""The loopback self-test: two processes load the library as NCCL does and reduce a buffer over it; every element is
compared. It proves the library and the host's TCP, not the chosen interface or the peers.

[Note: what a driver is] See bagua/net/bench/processes.py: the processes are those of bagua-net-bench.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bagua.net import secret_file
from bagua.net.doctor.finding import Section, Status, fail, ok, skip, split_message
from bagua.net.library import MissingFileError, driver_path

_STEP_TIMEOUT_S = 5.0
_RANKS = 2
_CHANNELS = 2
_VERIFIED_BYTES = 1 << 20
_TIMED_BYTES = 8 << 20
_ITERATIONS = 10
# Which interface a job uses is another section's question: here the loopback device must do.
_NETWORK_CHOICE = ("NCCL_SOCKET_FAMILY", "NCCL_COMM_ID", "NCCL_NET", "NCCL_NET_PLUGIN", "BAGUA_NET_JOIN_NICS")
_TITLE = "Loopback self-test"
_REPORT_IT = "run it again with BAGUA_DRIVER_LOG=info, and report what it prints if the cause is not clear from it"


def check_loopback(environment: Mapping[str, str], library: Path | None, *, settings_fail: bool = False) -> Section:
    if library is None:
        return _skipped("not run: there is no library")
    if settings_fail:
        return _skipped("not run: the plugin does not start with these settings")
    try:
        driver = driver_path()
    except MissingFileError as error:
        finding = split_message(Status.FAIL, str(error))
        return _failed(finding.text, finding.remedy)
    # Imported here: `bagua-net doctor` without a library needs none of it.
    from bagua.net.bench.errors import BenchError

    started = time.monotonic()
    try:
        verified, timed = _run(environment, library, driver)
    except BenchError as error:
        finding = split_message(Status.FAIL, str(error))
        return _failed(finding.text, finding.remedy or _REPORT_IT)
    wrong = sum(int(event["wrong_elements"]) for event in verified)
    if wrong:
        return _failed(f"{wrong} elements of {_VERIFIED_BYTES} bytes arrived wrong", _REPORT_IT)
    seconds = min(max(times) for times in zip(*(event["seconds"] for event in timed), strict=True))
    busbw = _TIMED_BYTES / seconds * 2 * (_RANKS - 1) / _RANKS / 1e9
    facts = {"passed": True, "busbw_gb_per_s": busbw, "seconds": time.monotonic() - started}
    text = f"{_RANKS} processes, {_VERIFIED_BYTES >> 20} MiB compared element by element: all correct"
    rate = f"best of {_ITERATIONS} all-reduces of {_TIMED_BYTES >> 20} MiB: {busbw:.1f} GB/s busbw (no benchmark)"
    if secret_file.cipher(environment):
        rate += ", encrypted"
    return Section("self_test", _TITLE, (ok(text), ok(rate)), facts)


def _skipped(text: str) -> Section:
    return Section("self_test", _TITLE, (skip(text),), {"passed": None})


def _failed(text: str, remedy: str) -> Section:
    return Section("self_test", _TITLE, (fail(text, remedy),), {"passed": False})


def _run(
    environment: Mapping[str, str], library: Path, driver: Path
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    from bagua.net.bench.processes import DriverProcess, ask, gather

    variables = {name: value for name, value in environment.items() if name not in _NETWORK_CHOICE}
    variables |= {"ENABLE_BAGUA_NET": "1", "NCCL_SOCKET_IFNAME": "=lo"}
    with ExitStack() as closing:
        drivers = []
        for rank in range(_RANKS):
            command = [str(driver), "ring", "--transport", "plugin", "--library", str(library)]
            command += ["--rank", str(rank), "--nranks", str(_RANKS), "--channels", str(_CHANNELS)]
            command += ["--timeout-ms", str(int(_STEP_TIMEOUT_S * 1000))]
            drivers.append(DriverProcess(f"self-test, rank {rank}", command, variables))
            closing.callback(drivers[-1].close)
        try:
            listening = gather(drivers, "listening", _STEP_TIMEOUT_S, "starting")
            for rank, process in enumerate(drivers):
                process.post("connect " + " ".join(listening[(rank + 1) % _RANKS]["handles"]))
            gather(drivers, "connected", _STEP_TIMEOUT_S, "connecting")
            verified = ask(drivers, f"verify {_VERIFIED_BYTES}", "verified", _STEP_TIMEOUT_S)
            timed = ask(drivers, f"run {_TIMED_BYTES} {_ITERATIONS} 1", "result", _STEP_TIMEOUT_S)
        except BaseException:
            # They may wait for each other: no point in asking them politely.
            for process in drivers:
                process.kill()
            raise
    return verified, timed
