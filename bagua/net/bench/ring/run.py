"""A whole run of bagua-net-bench: from options to a report. Rank 0's side; the others follow (see team.py)."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence

from bagua.net.bench.endpoint import Event
from bagua.net.bench.errors import BenchTimeoutError, UsageError
from bagua.net.bench.machine import describe_machine
from bagua.net.bench.memory_check import check_memory
from bagua.net.bench.progress import Progress
from bagua.net.bench.ring.interleaved_run import Visit, run_interleaved
from bagua.net.bench.ring.iteration_plan import IterationPlan, budget_plan, fixed_plan
from bagua.net.bench.ring.options import Options
from bagua.net.bench.ring.report import Report
from bagua.net.bench.ring.sessions import RawSession, RingSession, Session, default_raw_streams
from bagua.net.bench.ring.summary import comparisons, measurements, paired_series, raw_limit
from bagua.net.bench.ring.team import Team, usable_cpus
from bagua.net.bench.ring.torch_presence import has_torch
from bagua.net.bench.settings import BASELINE, RAW
from bagua.net.bench.sizes import format_size

# TCP has no messages, so raw runs only where a transfer is bandwidth and not its start.
RAW_MIN_BYTES = 1 << 20
# What the limit is measured with when all sizes are smaller.
RAW_ONLY_BYTES = 64 << 20
_DEFAULT_FIXED_WARMUP = 5
# Of the time budget: gloo imports torch, which may take longer than a short budget.
_START_SHARE = 0.4
# Of the time budget: ending the drivers and writing the results.
_END_SHARE = 0.05

_DESCRIPTIONS = {
    "bare": "plain sockets, one per channel, one non-blocking thread: what NCCL's own transport does by default",
    "gloo": "torch.distributed gloo all_reduce, which also adds up",
}


def chosen_backends(options: Options) -> tuple[list[str], list[str]]:
    """The backends that run, and for each that does not a line saying why."""
    if "gloo" not in options.backends or has_torch():
        return list(options.backends), []
    if options.backends_given:
        raise UsageError(
            "backend 'gloo' needs torch, which is not installed; run pip install bagua[torch], or leave it out of"
            " --backends"
        )
    return [name for name in options.backends if name != "gloo"], ["gloo (torch is not installed: bagua[torch])"]


def start_sessions(
    team: Team, options: Options, names: Sequence[str], raw_sizes: Sequence[int], deadline: float
) -> list[Session]:
    """All drivers of all backends, connected. They stay until the team ends."""
    sessions: list[Session] = []
    # The slowest to start first: importing torch overlaps with the others.
    for name in sorted(names, key=lambda name: name != "gloo"):
        if name != RAW:
            sessions.append(RingSession(name, team.places))
            continue
        # One way along the ring's own direction.
        sender = team.measured_link
        receiver = (sender + 1) % team.ranks
        for streams in options.raw_streams or default_raw_streams(usable_cpus()):
            ends = (receiver, team.places[receiver]), (sender, team.places[sender])
            sessions.append(RawSession(streams, *ends, team.ranks, options.channels, max(raw_sizes)))
    ordered = sorted(sessions, key=lambda session: names.index(session.name.split(" ")[0]))
    connected = []
    # gloo last: within a short budget the others do not wait for torch.
    for session in sorted(ordered, key=lambda session: session.name == "gloo"):
        if session.name != "gloo" or options.iterations is not None:
            session.connect(options.timeout_s)
        elif not _connect_by(session, min(options.timeout_s, deadline - time.monotonic()), options):
            continue
        connected.append(session)
    return [session for session in ordered if session in connected]


def _connect_by(session: Session, timeout_s: float, options: Options) -> bool:
    """False if it is not ready in what the time budget leaves for it."""
    try:
        session.connect(max(timeout_s, 0.1))
    except BenchTimeoutError:
        if timeout_s >= options.timeout_s:
            raise
        if isinstance(session, RingSession):
            session.abandon()
        return False
    return True


def run_bench(team: Team, options: Options, environment: Mapping[str, str], stream_is_quiet: bool = False) -> Report:
    names, left_out = chosen_backends(options)
    began = time.monotonic()
    check_memory(max(options.sizes), _ranks_here(team), sum(name != RAW for name in names))
    machine = describe_machine()
    raw_sizes = [size for size in options.sizes if size >= RAW_MIN_BYTES] or [RAW_ONLY_BYTES]
    with Progress(1, quiet=stream_is_quiet) as display:
        display.message(f"starting {len(names)} backend{'' if len(names) == 1 else 's'} of {team.ranks} ranks")
        for reason in left_out:
            display.message(f"left out: {reason}")
        start_deadline = began + _START_SHARE * options.time_budget_s
        sessions = start_sessions(team, options, names, raw_sizes, start_deadline)
        if "gloo" in names and not any(session.name == "gloo" for session in sessions):
            left_out.append(f"gloo (did not start within the time budget of {options.time_budget_s:g} s)")
            names = [name for name in names if name != "gloo"]
    sizes = {
        session.name: raw_sizes if isinstance(session, RawSession) else list(options.sizes) for session in sessions
    }
    results = run_interleaved(
        Visit(sessions, sizes),
        make_plan=lambda costs: _plan(costs, options, time.monotonic() - began),
        deadline=math.inf if options.iterations is not None else began + (1 - _END_SHARE) * options.time_budget_s,
        verify=options.verify,
        timeout_s=options.timeout_s,
        progress=lambda total: Progress(total, quiet=stream_is_quiet),
    )
    assert results.plan is not None
    if results.unmeasured:
        left_out.append(
            f"{', '.join(map(format_size, results.unmeasured))} (no time left of the budget of"
            f" {options.time_budget_s:g} s; raise --time-budget)"
        )
    limit = raw_limit(results, team.links)
    collectives = {session.name: session.collective for session in sessions}
    compared_with = [name for name in names if name not in ("plugin", RAW)]
    return Report(
        title=_title(team, options),
        ranks=team.ranks,
        machine=machine,
        backends={
            session.name: describe_backend(session.name, session.listening[0], options)
            for session in sessions
            if isinstance(session, RingSession)
        },
        left_out=left_out,
        rows=measurements(results, collectives, team.ranks, limit),
        limit=limit,
        comparisons=comparisons(results, compared_with),
        paired=paired_series(results, compared_with),
        wrong=results.wrong(),
        verified=bool(results.verifications),
        repeats=results.plan.repeats,
        parameters={
            "ranks": team.ranks,
            "hosts": team.hosts,
            "channels": options.channels,
            "busy_per_cpu": options.busy_per_cpu,
            "address": team.path.address,
            "interface": team.path.interface or environment.get("NCCL_SOCKET_IFNAME", ""),
            "repeats": results.plan.repeats,
            "iterations": {str(size): plan.iterations for size, plan in results.plan.sizes.items()},
            "warmup": {str(size): plan.warmup for size, plan in results.plan.sizes.items()},
        },
    )


def _ranks_here(team: Team) -> int:
    return sum(place is team.places[0] for place in team.places)


def _plan(costs: Mapping[int, float], options: Options, elapsed_s: float) -> IterationPlan:
    if options.iterations is not None:
        warmup = _DEFAULT_FIXED_WARMUP if options.warmup is None else options.warmup
        return fixed_plan(costs, options.iterations, warmup, options.repeats)
    return budget_plan(
        costs,
        max((1 - _END_SHARE) * options.time_budget_s - elapsed_s, 0.0),
        options.repeats,
        may_reduce_repeats=not options.repeats_given,
        warmup=options.warmup,
    )


def _title(team: Team, options: Options) -> str:
    where = f"{team.hosts} hosts" if team.hosts > 1 else "one host"
    over = f"{team.path.interface} ({team.path.address})" if team.path.interface else team.path.address
    plural = "" if options.busy_per_cpu == 1 else "es"
    busy = f", {options.busy_per_cpu} busy process{plural} per CPU" if options.busy_per_cpu else ""
    return f"ring all-reduce, {team.ranks} ranks x {options.channels} channels on {where} over {over}{busy}"


def describe_backend(name: str, listening: Event, options: Options) -> str:
    """What really runs, as the driver found it."""
    if name in _DESCRIPTIONS:
        return _DESCRIPTIONS[name]
    devices = ", ".join(str(device) for device in listening.get("devices", []))
    text = f"{listening.get('net_name', 'unnamed')}, table {listening.get('table', '?')}, devices {devices or '?'}"
    if name == BASELINE:
        return f"{text}, {options.baseline_library}"
    return f"{text}, BAGUA_NET_NSTREAMS=1" if name == "plugin-1" else text
