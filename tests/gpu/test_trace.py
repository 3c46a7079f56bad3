"""A real job's trace: NCCL's collectives and the plugin's messages in one file per rank, on one clock."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.gpu_job import RANKS, RunJob

from bagua.cli.net import main

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

Event = dict[str, Any]


def named(events: list[Event], name: str, phase: str = "X") -> list[Event]:
    return [event for event in events if (event["name"], event["ph"]) == (name, phase)]


def test_collectives_and_their_messages_are_in_one_file(run_job: RunJob, tmp_path: Path) -> None:
    job = run_job(ENABLE_BAGUA_NET="1", BAGUA_NET_TRACE=str(tmp_path / "trace.json"))
    assert (job.code, job.right, job.networks) == (0, True, {"BaguaNet"}), job.output
    paths = sorted(tmp_path.glob("trace.rank*.json"))
    assert len(paths) == RANKS
    for path in paths:
        events = json.loads(path.read_text())
        (end,) = (event["args"] for event in events if event["name"] == "bagua_net_trace_end")
        assert end["dropped"] == 0
        enqueued = {event["args"]["seq"]: event for event in named(events, "AllReduce", "i")}
        moved = named(events, "AllReduce")
        sends, receives = named(events, "isend"), named(events, "irecv")
        assert {event["args"]["seq"] for event in moved} == set(enqueued), "every all-reduce used the network"
        counts = [event["args"]["count"] for event in named(events, "AllReduce", "i")]
        assert {1, 1000, 1 << 18, (8 << 20) + 3, 70_001} <= set(counts)
        assert sends
        assert receives
        of_reductions = [event for event in sends if event["args"].get("operation") == "AllReduce"]
        assert len(of_reductions) == len(sends), "the job runs all-reduces only"
        assert {event["args"]["seq"] for event in of_reductions} == set(enqueued)
        # A ring of two sends the data once.
        assert sum(event["args"]["bytes"] for event in sends) >= 4 * sum(counts)
        operations = named(events, "AllReduce send")
        assert {event["args"]["seq"] for event in operations} == set(enqueued)
        sent = sum(event["args"]["bytes"] for event in sends)
        assert sum(event["args"]["bytes"] for event in operations) == sent
        # NCCL 2.28 has calls, too.
        assert len(named(events, "ncclAllReduce")) in {0, len(counts)}
    assert main(["trace", "merge", *map(str, paths), "-o", str(tmp_path / "both.json")]) == 0
    both = json.loads((tmp_path / "both.json").read_text())["traceEvents"]
    assert len({event["pid"] for event in both}) == RANKS


def test_without_a_trace_nccl_is_asked_for_no_events(run_job: RunJob) -> None:
    job = run_job(ENABLE_BAGUA_NET="1")
    assert (job.code, job.right, job.networks) == (0, True, {"BaguaNet"}), job.output
    # Newer versions of NCCL say which events they collect.
    assert "Profiler event mask" not in job.logs
