"""A whole run of bagua-net-bench: from options to a report. Rank 0's side; the others follow (see ranks.py)."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bagua.net import secret_file
from bagua.net.bench.driver import BASELINE, RAW
from bagua.net.bench.machine import check_memory, describe_machine
from bagua.net.bench.measurement import Case
from bagua.net.bench.paced_run import Pace, PacedRun
from bagua.net.bench.processes import Event
from bagua.net.bench.ranks import Ranks
from bagua.net.bench.ring.options import Options
from bagua.net.bench.ring.report import Report, measurements, paired_series, raw_limit
from bagua.net.bench.ring.sessions import RawSession, RingSession, default_raw_streams
from bagua.progress import Progress

# TCP has no messages, so raw runs only where a transfer is bandwidth and not its start.
RAW_MIN_BYTES = 1 << 20
# What the limit is measured with when all sizes are smaller.
RAW_ONLY_BYTES = 64 << 20
# Of the time budget: ending the drivers and writing the results.
_END_SHARE = 0.05

_BARE = "plain sockets, one per channel, one non-blocking thread: what NCCL's own transport does by default"


def start_sessions(ranks: Ranks, options: Options, raw_bytes: int) -> list[RingSession | RawSession]:
    """All drivers of all backends, connected. They stay until the run ends."""
    sessions: list[RingSession | RawSession] = []
    for name in options.backends:
        if name != RAW:
            sessions.append(RingSession(name, ranks.places))
            continue
        # One way along the ring's own direction.
        sender = ranks.measured_link
        receiver = (sender + 1) % ranks.count
        for streams in options.raw_streams or default_raw_streams(len(os.sched_getaffinity(0))):
            ends = (receiver, ranks.places[receiver]), (sender, ranks.places[sender])
            sessions.append(RawSession(streams, *ends, ranks.count, options.channels, raw_bytes))
    for session in sessions:
        session.connect(options.timeout_s)
    return sessions


def run_bench(ranks: Ranks, options: Options, environment: Mapping[str, str]) -> Report:
    began = time.monotonic()
    ranks_here = sum(place is ranks.places[0] for place in ranks.places)
    check_memory(max(options.sizes), ranks_here, sum(name != RAW for name in options.backends))
    raw_sizes = [size for size in options.sizes if size >= RAW_MIN_BYTES] or [RAW_ONLY_BYTES]
    with Progress(1) as display:
        display.message(f"starting {', '.join(options.backends)}: {ranks.count} ranks each")
        sessions = start_sessions(ranks, options, max(raw_sizes))
    sizes = {session.name: raw_sizes if isinstance(session, RawSession) else options.sizes for session in sessions}
    run = PacedRun(
        {
            Case("all_reduce", size): [session for session in sessions if size in sizes[session.name]]
            for size in sorted({size for found in sizes.values() for size in found})
        },
        pace_of(options, max((1 - _END_SHARE) * options.time_budget_s - time.monotonic() + began, 0.1), options.verify),
        Progress,
    )
    run.run()
    limit = raw_limit(run.turns, ranks.links)
    rows = measurements(run, ranks.count, limit)
    repeats = max(row.repetitions for row in rows)
    turns = {str(case.bytes): plan for case, plan in run.turn_plans.items()}
    return Report(
        **described(
            *(ranks, options, environment, repeats),
            iterations={size: plan.iterations for size, plan in turns.items()},
            warmup={size: plan.warmup for size, plan in turns.items()},
        ),
        backends={
            session.name: describe_backend(session.name, session.listening[0], options, environment)
            for session in sessions
            if isinstance(session, RingSession)
        },
        notes=[*run.turns.notes, *_unequal(sessions, ranks, environment)],
        rows=rows,
        limit=limit,
        paired=paired_series(run.turns, [name for name in options.backends if name not in ("plugin", RAW)]),
        wrong=run.faults(),
        verified=bool(run.verified),
    )


def described(
    ranks: Ranks, options: Options, environment: Mapping[str, str], repeats: int, **more: object
) -> dict[str, Any]:
    """What every report says of its run. `more`: parameters."""
    where = f"{ranks.hosts} hosts" if ranks.hosts > 1 else "one host"
    address, interface = ranks.path.address, ranks.path.interface
    over = f"{interface} ({address})" if interface else address
    plural = "" if options.busy_per_cpu == 1 else "es"
    busy = f", {options.busy_per_cpu} busy process{plural} per CPU" if options.busy_per_cpu else ""
    return {
        "title": f"ring all-reduce, {ranks.count} ranks x {options.channels} channels on {where} over {over}{busy}",
        "ranks": ranks.count,
        "machine": describe_machine(),
        "repeats": repeats,
        "parameters": {
            "ranks": ranks.count,
            "hosts": ranks.hosts,
            "channels": options.channels,
            "busy_per_cpu": options.busy_per_cpu,
            "address": address,
            "interface": interface or environment.get("NCCL_SOCKET_IFNAME", ""),
            "repeats": repeats,
            **more,
        },
    }


def pace_of(options: Options, left_s: float, verifies: bool) -> Pace:
    return Pace(
        rounds=options.repeats,
        timeout_s=options.timeout_s,
        time_limit_s=left_s if options.iterations is None else math.inf,
        turn_s=left_s,
        iterations=options.iterations,
        warmup=options.warmup,
        least=(1,),
        verifies=verifies,
        limit=f"--time-budget {options.time_budget_s:g}",
    )


def _unequal(
    sessions: Sequence[RingSession | RawSession], ranks: Ranks, environment: Mapping[str, str]
) -> Iterator[str]:
    """What the plugin is compared with has one address, and sends plaintext."""
    alone = dict.fromkeys(RAW if one.name.startswith(RAW) else one.name for one in sessions)
    names = [name for name in alone if name in ("bare", RAW)]
    devices = [str(one) for session in sessions for event in session.listening[:1] for one in event.get("devices", [])]
    joined = [name for name in devices if "+" in name]
    what = " and ".join(names)
    if names and joined:
        yield f"{what}: over {ranks.path.address} alone; the plugin's device is {joined[0]}"
    if names and secret_file.cipher(environment):
        verb = "is" if len(names) == 1 else "are"
        yield f"the plugin's traffic is encrypted, and {what} {verb} not: unset BAGUA_NET_ENCRYPTION to compare equals"


def describe_backend(name: str, listening: Event, options: Options, environment: Mapping[str, str]) -> str:
    """What really runs, as the driver found it."""
    cipher = secret_file.cipher(environment)
    if name == "bare":
        return f"{_BARE}; not encrypted" if cipher else _BARE
    devices = ", ".join(str(device) for device in listening.get("devices", []))
    text = f"{listening.get('net_name', 'unnamed')}, table {listening.get('table', '?')}, devices {devices or '?'}"
    if cipher:
        text += f", encrypted ({cipher})"
    if name == BASELINE:
        return f"{text}, {options.baseline_library}"
    return f"{text}, BAGUA_NET_NSTREAMS=1" if name == "plugin-1" else text
