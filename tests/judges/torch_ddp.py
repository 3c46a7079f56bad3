"""Runs torch's own tests of DDP with Bagua's wrapper in the place of torch's, one after the other, and prints a table.

    PYTHONSAFEPATH=1 PYTHONPATH=tests python -m judges.torch_ddp            # two GPUs, NCCL
    PYTHONSAFEPATH=1 PYTHONPATH=tests python -m judges.torch_ddp --pretend  # a CPU passes for them, with gloo

Exits with 1 if a test fails that torch_ddp_expectations does not name, if one of those passes, or if time runs out.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from typing import Any

from judges import torch_ddp_rank
from judges.torch_ddp_expectations import TOO_LONG, expected_failures
from judges.torch_ddp_rank import FAILED, PASSED, WRAPPERS, Outcome

RANKS = 2
START_S = 120.0
GRACE_S = 5.0  # after one rank failed: the other waits for it in a collective


class Pair:
    """Two ranks that make one test after the other. Those of a test that hangs are ended, and others started."""

    def __init__(self, pretended: bool, wrapper: str) -> None:
        self._options = pretended, wrapper
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        pipes = [context.Pipe() for _ in range(RANKS)]
        self._connections = [mine for mine, _ in pipes]
        self._ranks = [
            context.Process(target=_serve, args=(rank, theirs, *self._options), daemon=True)
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for one, (_, theirs) in zip(self._ranks, pipes, strict=True):
            one.start()
            theirs.close()  # the rank alone has it: its end is seen
        if not all(connection.poll(START_S) for connection in self._connections):
            raise RuntimeError(f"the ranks did not start within {START_S:g} s")
        try:
            self.names = [connection.recv() for connection in self._connections].pop()
        except EOFError:
            raise RuntimeError("a rank ended before its tests: BAGUA_JUDGE_OUTPUT=1 shows why") from None

    def run(self, name: str, limit_s: float) -> list[Outcome]:
        """By rank."""
        with tempfile.TemporaryDirectory(prefix="torch-ddp-") as folder:
            for connection in self._connections:
                connection.send((name, folder))
            outcomes: list[Outcome | None] = [None] * RANKS
            deadline = time.monotonic() + limit_s
            while None in outcomes and time.monotonic() < deadline:
                for rank, connection in enumerate(self._connections):
                    if outcomes[rank] is None and connection.poll(0.05):
                        outcomes[rank] = _received(connection)
                        if outcomes[rank] != (PASSED, ""):
                            deadline = min(deadline, time.monotonic() + GRACE_S)
        if None in outcomes or any(one and one.reason == _DIED for one in outcomes):
            self.end()
            self._start()
        late = Outcome(FAILED, f"not done within {limit_s:g} s, or {GRACE_S:g} s after the other rank")
        return [one or late for one in outcomes]

    def end(self) -> None:
        for one in self._ranks:
            one.kill()
            one.join()


_DIED = "the process of this rank died"


def _received(connection: Connection) -> Outcome:
    try:
        return Outcome(*connection.recv())
    except EOFError:
        return Outcome(FAILED, _DIED)


def _serve(rank: int, connection: Connection, pretended: bool, wrapper: str) -> None:
    import torch

    if pretended:
        torch.set_num_threads(1)
    silent = os.open(os.devnull, os.O_WRONLY)
    if "BAGUA_JUDGE_OUTPUT" not in os.environ:
        os.dup2(silent, 1)
        os.dup2(silent, 2)
    torch_ddp_rank.prepare(pretended, rank, wrapper)
    connection.send(torch_ddp_rank.names_of_tests())
    while True:
        connection.send(tuple(torch_ddp_rank.run_test(*connection.recv())))


def verdict(name: str, outcomes: list[Outcome], pretended: bool) -> tuple[str, str, bool]:
    """What the table says, why, and whether that is as it should be."""
    reason = expected_failures(pretended).get(name)
    worst = next((one for one in outcomes if one.verdict == FAILED), outcomes[0])
    if worst.verdict == FAILED and reason is not None:
        return "LISTED", reason, True
    if worst.verdict == PASSED and reason is not None:
        return "PASSES", f"but is listed: {reason}", False
    why = "" if worst.verdict == PASSED else " | ".join(_last_line(one.reason) for one in outcomes)
    return worst.verdict, why, worst.verdict != FAILED


def _last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "passed")[:200]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="tests; default: all that make a wrapper")
    parser.add_argument("--pretend", action="store_true", help="a CPU passes for the GPUs")
    parser.add_argument("--wrapper", choices=WRAPPERS, default="bagua")
    parser.add_argument("--test-limit", type=float, default=40, metavar="S", help="seconds for a test (default: 40)")
    parser.add_argument("--limit", type=float, default=460, metavar="S", help="seconds for all tests (default: 460)")
    parser.add_argument("--verbose", action="store_true", help="whole stacks")
    options = parser.parse_args()
    deadline = time.monotonic() + options.limit
    pair = Pair(options.pretend, options.wrapper)
    counts: dict[str, int] = {}
    is_good = True
    for name in options.names or pair.names:
        if options.pretend and name in TOO_LONG and not options.names:
            continue
        begin = time.monotonic()
        result: Any
        if begin + 1 > deadline:
            result = ("NOT RUN", f"more than {options.limit:g} s", False)
            outcomes = []
        else:
            outcomes = pair.run(name, min(options.test_limit, deadline - begin))
            result = verdict(name, outcomes, options.pretend)
        counts[result[0]] = counts.get(result[0], 0) + 1
        is_good &= result[2]
        print(f"{result[0]:7} {time.monotonic() - begin:5.1f} s  {name}  {result[1]}", flush=True)
        if options.verbose and not result[2]:
            print("\n".join(one.reason for one in outcomes))
    pair.end()
    print(", ".join(f"{number} {what}" for what, number in sorted(counts.items())))
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
