"""Starts the user's launcher with our script, and follows what its ranks tell in lines of their standard output."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bagua.net.bench.errors import BenchError
from bagua.net.bench.process_tree import ended_with, lines_of, running, start_command

# They start a Python script themselves; all others start any command.
_SCRIPT_LAUNCHERS = ("torchrun", "baguarun", "deepspeed")
_SCRIPT_MODULES = (
    *("torch.distributed.run", "torch.distributed.launch"),
    *("bagua.distributed.run", "bagua.distributed.launch", "bagua.script.baguarun"),
)
# They start any command, so a Python script that follows them is what they would start.
_COMMAND_LAUNCHERS = ("srun", "mpirun", "mpiexec", "orterun", "prun", "jsrun", "aprun")
_KEPT_LINES = 2000
# After a rank has told an error. The others may be waiting for it until their own time is over.
_GRACE_S = 5.0
# The first is often a consequence, such as a closed connection; the cause is among those that follow at once.
_SHOWN_ERRORS = 3
# Starting Python, torch and NCCL on a loaded node; and of a round, which is measured for a few seconds.
_START_S, _ROUND_S = 180.0, 180.0
_MARK = "bagua-net-test-record:"


@dataclass(frozen=True)
class Plan:
    """What the ranks are told on their command line.

    Attributes:
        rounds: without and with the plugin.
        seconds: for which each size is measured in a round.
        wait_s: until all ranks have met.
    """

    rounds: int
    seconds: float
    wait_s: float

    def as_argument(self) -> str:
        return json.dumps(asdict(self))

    @property
    def limit_s(self) -> float:
        """After which even the slowest healthy test has ended, from when its ranks run."""
        return 2 * self.wait_s + _START_S + self.rounds * (_ROUND_S + 6 * self.seconds)


def emit(kind: str, **values: object) -> None:
    """A record of a rank, in one write, so that lines of other ranks do not get into it. Every launcher forwards it."""
    sys.stdout.write(f"{_MARK}{json.dumps({'kind': kind, **values})}\n")
    sys.stdout.flush()


def parse(line: str) -> dict[str, Any] | None:
    """None if the line is not a record. Launchers may put the rank before it."""
    _, mark, text = line.partition(_MARK)
    if not mark:
        return None
    try:
        record = json.loads(text)
    except ValueError:
        return None
    return record if isinstance(record, dict) and isinstance(record.get("kind"), str) else None


def launcher_command(words: Sequence[str], plan: Plan) -> list[str]:
    """The launcher with its options, then our script."""
    script = str(Path(__file__).with_name("rank_script.py"))
    takes_script = _script_launcher_words(words) is not None
    return [*words, *([] if takes_script else [sys.executable]), script, plan.as_argument()]


def users_script(words: Sequence[str]) -> int | None:
    """Where a script of the user's begins in a launcher's command; None: there is none, as far as the words tell. A
    launcher may itself be a Python script."""
    begin = _script_launcher_words(words)
    if begin is not None:
        found = (at for at in range(begin, len(words)) if words[at].endswith(".py") or words[at] in ("-m", "--module"))
        return next(found, None)
    names = [Path(word).name for word in words]
    launchers = [at for at, name in enumerate(names) if name in _COMMAND_LAUNCHERS]
    pythons = [at for at in range(launchers[0], len(words)) if names[at].startswith("python")] if launchers else []
    has_script = pythons and any(word.endswith(".py") or word == "-m" for word in words[pythons[0] :])
    return pythons[0] if has_script else None


def _has_script(words: Sequence[str]) -> bool:
    return any(word.endswith(".py") for word in words)


def _script_launcher_words(words: Sequence[str]) -> int | None:
    """How many words there are up to a launcher that starts a Python script itself; None: there is no such launcher."""
    names = [Path(word).name for word in words]
    for at, name in enumerate(names):
        if name in _SCRIPT_LAUNCHERS or name in _SCRIPT_MODULES:
            return at + 1
        if names[at : at + 2] == ["accelerate", "launch"]:
            return at + 2
    return None


def run_launcher(
    words: Sequence[str], plan: Plan, environment: Mapping[str, str], say: Callable[[str], None]
) -> dict[str, Any] | None:
    """
    Returns:
        The record "result" of rank 0; None where rank 0 runs under another node's command.

    Raises:
        BenchError: the launcher cannot be started or failed, or a rank did.
    """
    lines: deque[str] = deque(maxlen=_KEPT_LINES)
    result: dict[str, Any] | None = None
    errors: dict[str, None] = {}  # of all ranks, in their order, each once
    kinds: list[str] = []
    with running(lambda: start_command(launcher_command(words, plan), environment, BenchError)) as process:
        for record in _records(process, plan, lines):
            kinds.append(record["kind"])
            if record["kind"] == "said":
                say(record["text"])
            elif record["kind"] == "result":
                result = record
            elif record["kind"] == "error":
                errors[str(record["text"])] = None
        # In here, so that ranks which wait for one that has failed end with the launcher.
        silent = kinds.count("started") - sum(kinds.count(kind) for kind in ("done", "error", "failed"))
        if errors:
            more = len(errors) - _SHOWN_ERRORS
            said = [*list(errors)[:_SHOWN_ERRORS], *([f"and {more} more"] if more > 0 else [])]
            raise BenchError("\n".join([*said, *_unheard(silent)]))
        if "failed" in kinds:
            raise BenchError("the test failed\nThe command on the node of rank 0 says why.")
    if "done" not in kinds:
        code = process.returncode
        how = f"exit code {code}" if code >= 0 else f"killed by signal {-code}"
        hint = "\nIf a script of yours ran, leave it out: `test` has its own." if _has_script(words) else ""
        raise BenchError(f"{words[0]} ended ({how}) before its ranks were done\n{ended_with(lines)}{hint}")
    return result


def _unheard(ranks: int) -> list[str]:
    if ranks <= 0:
        return []
    some = "1 other rank of this command has" if ranks == 1 else f"{ranks} other ranks of this command have"
    return [f"{some} not reported within {_GRACE_S:g} s."]


def _records(process: subprocess.Popen[bytes], plan: Plan, lines: deque[str]) -> Iterator[dict[str, Any]]:
    """Of the ranks that this launcher started; all other lines are kept in `lines`. Ends soon after an error."""
    deadline = time.monotonic() + plan.wait_s
    has_started = has_failed = False
    for line in lines_of(process):
        record = None if line is None else parse(line)
        if record is not None:
            if not has_started:
                has_started = True
                deadline = time.monotonic() + plan.limit_s
            if record["kind"] in ("error", "failed") and not has_failed:
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
