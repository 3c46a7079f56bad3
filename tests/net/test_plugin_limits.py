"""The plugin in a process that the system gives little: /dev/shm without room, and few descriptors."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from support.load_driver import ANSWER_S, LoadDriver, StartDriver, driver_executable, plugin_library, quit_all

_FULL_SHARED_MEMORY = """exec unshare --mount sh -c '
    mount -t tmpfs -o size=4k none /dev/shm && head -c 4096 /dev/zero >/dev/shm/full && exec "$0" "$@"' {driver} "$@"
"""
_FEW_FILES = """ulimit -n {files}
exec {driver} "$@"
"""


def _wrap(monkeypatch: pytest.MonkeyPatch, path: Path, script: str, **values: object) -> None:
    """From now on load drivers start by way of this script."""
    path.write_text("#!/bin/sh\n" + script.format(driver=shlex.quote(str(driver_executable())), **values))
    path.chmod(0o755)
    monkeypatch.setenv("BAGUA_DRIVER", str(path))


def _start(start: StartDriver, **variables: str) -> list[LoadDriver]:
    common = ["--nranks", 2, "--transport", "plugin", "--library", plugin_library()]
    return [start("ring", "--rank", rank, *common, **variables) for rank in range(2)]


def _ask(ranks: list[LoadDriver], lines: list[str], expected: str) -> list[str]:
    """Every rank's answer to its line; an error's message instead."""
    for rank, line in zip(ranks, lines, strict=True):
        rank.say(line)
    errors = []
    for rank in ranks:
        event = rank.next_event(ANSWER_S)
        assert event["event"] in (expected, "error"), event
        errors += [event["message"]] if event["event"] == "error" else []
        assert event.get("wrong_elements", 0) == 0
    return errors


def _connect_lines(ranks: list[LoadDriver]) -> list[str]:
    handles = [" ".join(rank.expect("listening")["handles"]) for rank in ranks]
    return [f"connect {handles[1]}", f"connect {handles[0]}"]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount a /dev/shm")
def test_a_full_dev_shm_does_not_matter(
    start_driver: StartDriver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _wrap(monkeypatch, tmp_path / "driver", _FULL_SHARED_MEMORY)
    ranks = _start(start_driver)
    assert _ask(ranks, _connect_lines(ranks), "connected") == []
    assert _ask(ranks, ["verify 1000000"] * 2, "verified") == []
    # Their statistics are there all the same.
    pid = str(ranks[0].process.pid)
    command = [Path(sys.executable).with_name("bagua-net"), "stats", "--json", "--pid", pid]
    stats = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_S, check=True)
    assert f'"pid": {pid}' in stats.stdout
    quit_all(ranks)


@pytest.mark.parametrize("files", [8, 12, 20, 200])
def test_few_descriptors_are_enough_or_named(
    start_driver: StartDriver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: int
) -> None:
    _wrap(monkeypatch, tmp_path / "driver", _FEW_FILES, files=files)
    # With enough of them no deadline matters. Without, one ends the wait for a connect that cannot succeed. A slow
    # machine reaches it after fewer attempts, perhaps before an error of the system is seen.
    deadline = {} if files == 200 else {"BAGUA_NET_CONNECT_TIMEOUT_MS": "500"}
    ranks = _start(start_driver, BAGUA_NET_NSTREAMS="4", BAGUA_DRIVER_LOG="warn", **deadline)
    errors = _ask(ranks, _connect_lines(ranks), "connected")
    if files == 200:
        assert errors == []
        assert _ask(ranks, ["verify 1000000"] * 2, "verified") == []
        quit_all(ranks)
        return
    said = "\n".join([*errors, *(rank.log() for rank in ranks)])
    assert errors, said
    assert "Too many open files" in said or "may open too few files (ulimit -n)" in said, said
