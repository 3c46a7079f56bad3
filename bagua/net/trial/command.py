"""Starts the user's launcher with our script, and follows what its ranks tell."""

from __future__ import annotations

import itertools
import os
import selectors
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from bagua.net.bench.errors import BenchError
from bagua.net.bench.process_tree import ended_with, running, start_command
from bagua.net.compare.setting import Setting
from bagua.net.trial import records
from bagua.net.trial.plan import Plan
from bagua.net.trial.records import Job, Turn
from bagua.net.trial.verdict import Results

# They start a Python script themselves; all others start any command.
_SCRIPT_LAUNCHERS = ("torchrun", "baguarun", "deepspeed")
_SCRIPT_MODULES = (
    *("torch.distributed.run", "torch.distributed.launch"),
    *("bagua.distributed.run", "bagua.distributed.launch", "bagua.script.baguarun"),
)
_KEPT_LINES = 2000
_TICK_S = 0.25
# After a rank has told an error. The others may be waiting for it until their own time is over.
_GRACE_S = 5.0
# The first is often a consequence, such as a closed connection; the cause is among those that follow at once.
_SHOWN_ERRORS = 3


def launcher_command(words: Sequence[str], plan: Plan) -> list[str]:
    """The launcher with its options, then our script."""
    script = str(Path(__file__).with_name("rank_script.py"))
    names = [Path(word).name for word in words]
    takes_script = any(name in _SCRIPT_LAUNCHERS or name in _SCRIPT_MODULES for name in names)
    takes_script = takes_script or ("accelerate", "launch") in itertools.pairwise(names)
    return [*words, *([] if takes_script else [sys.executable]), script, plan.as_argument()]


def run_trial(
    words: Sequence[str],
    plan: Plan,
    settings: tuple[Setting, Setting],
    environment: Mapping[str, str],
    say: Callable[[str], None],
) -> Results | None:
    """
    Returns:
        None where rank 0 runs under another node's command.

    Raises:
        BenchError: the launcher cannot be started or failed, or a rank did.
    """
    command = launcher_command(words, plan)
    lines: deque[str] = deque(maxlen=_KEPT_LINES)
    results: Results | None = None
    errors: dict[str, None] = {}  # of all ranks, in their order, each once
    silent = 0
    finished = False
    with running(lambda: start_command(command, environment, BenchError)) as process:
        for record in _records(process, plan, lines):
            kind = record["kind"]
            if kind == "job":
                results = Results(Job.of_record(record), settings)
                say(_begin(results.job, plan))
            elif kind == "turn" and results is not None:
                results.turns.append(Turn.of_record(record))
                which = "with" if results.turns[-1].setting else "without"
                say(f"turn {len(results.turns)} of {_turns(results.job, plan)}, {which} the plugin: done")
            elif kind == "error":
                errors[str(record["text"])] = None
            silent += {"started": 1, "error": -1, "done": -1}.get(str(kind), 0)
            finished = finished or kind == "done"
    if errors:
        more = len(errors) - _SHOWN_ERRORS
        said = [*list(errors)[:_SHOWN_ERRORS], *([f"and {more} more"] if more > 0 else [])]
        raise BenchError("\n".join([*said, *_unheard(silent)]))
    if not finished:
        code = process.returncode
        how = f"exit code {code}" if code >= 0 else f"killed by signal {-code}"
        raise BenchError(f"{words[0]} ended ({how}) before its ranks were done\n{ended_with(lines)}")
    return results


def _unheard(ranks: int) -> list[str]:
    if ranks <= 0:
        return []
    some = "1 other rank of this command has" if ranks == 1 else f"{ranks} other ranks of this command have"
    return [f"{some} not reported within {_GRACE_S:g} s."]


def _begin(job: Job, plan: Plan) -> str:
    where = "1 host" if job.hosts == 1 else f"{job.hosts} hosts"
    return f"{job.ranks} ranks on {where}, {job.backend}; {_turns(job, plan)} turns, without and with the plugin"


def _turns(job: Job, plan: Plan) -> int:
    return 2 * plan.rounds_of(job.backend)


def _records(process: subprocess.Popen[bytes], plan: Plan, lines: deque[str]) -> Iterator[dict[str, object]]:
    """Of the ranks that this launcher started; all other lines are kept in `lines`. Ends soon after an error."""
    deadline = time.monotonic() + plan.wait_s
    has_started = has_failed = False
    for line in _lines(process):
        record = None if line is None else records.parse(line)
        if record is not None:
            if not has_started:
                has_started = True
                deadline = time.monotonic() + plan.limit_s
            if record["kind"] == "error" and not has_failed:
                has_failed = True
                deadline = time.monotonic() + _GRACE_S
            yield record
        elif line:
            lines.append(line)
        if time.monotonic() <= deadline:
            continue
        if has_failed:
            return
        if not has_started:
            raise BenchError(
                f"no rank has started within {plan.wait_s:g} s: the launcher waits for other nodes\n"
                f"{ended_with(lines)}\n"
                "Start the same command on every node, check the rendezvous address, or raise --wait."
            )
        raise BenchError(f"the ranks were not done within {plan.limit_s:g} s\n{ended_with(lines)}")


def _lines(process: subprocess.Popen[bytes]) -> Iterator[str | None]:
    """Each line of the output, and None every now and then, until it is closed and the process has ended."""
    assert process.stdout is not None
    descriptor = process.stdout.fileno()
    os.set_blocking(descriptor, False)
    pending = b""
    with selectors.DefaultSelector() as selector:
        selector.register(descriptor, selectors.EVENT_READ)
        while True:
            data = os.read(descriptor, 1 << 16) if selector.select(_TICK_S) else None
            if data:
                *whole, pending = (pending + data).split(b"\n")
                for line in whole:
                    yield line.decode(errors="replace").rstrip("\r")
            elif data == b"" or process.poll() is not None:
                break
            else:
                yield None
    while process.poll() is None:
        yield None
        time.sleep(_TICK_S)
