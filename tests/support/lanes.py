"""Runs tests in lanes: pytest processes side by side, each with its share of the GPUs and its part of the tests.

Many processes on one GPU slow each other down, because the kernels of NCCL spin while they wait. So a GPU belongs to
`LANES_PER_GPU` lanes at a time. First every lane has two GPUs. The tests that were skipped there for want of GPUs then
run again in lanes that have four, or all if there are three; those that need still more, with ranks that share GPUs.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from support.ranks import DEVICE_VARIABLE, SHARING_VARIABLE

REPOSITORY = Path(__file__).resolve().parents[2]
LANES_PER_GPU = 2
LANES_SHARING = 4  # of ranks that share GPUs: most of their time they start, or wait for turns
FEW, MANY = 2, 4  # GPUs of a lane; no test has more than four ranks
TEST_TIMEOUT_S = 120
OUTPUT_END = 4000
# Of the pytest that this process may be itself. A lane has its own words.
OUTER_PYTEST = ("PYTEST_ADDOPTS", "PYTEST_CURRENT_TEST", "PYTEST_XDIST_")
WANT_OF_GPUS = re.compile(r"needs \d+ GPUs, one per rank")  # run_ranks


@dataclass
class Outcome:
    """Of one test, in one lane."""

    test: str
    kind: str = "begun"  # passed, failed or skipped once it has ended
    text: str = ""
    seconds: float = 0.0
    ended: bool = False

    def add(self, kind: str, text: str, seconds: float) -> None:
        """The report of its set-up, its call or its tear-down."""
        rank = ("begun", "passed", "skipped", "failed")
        self.kind = max(self.kind, kind, key=rank.index)
        self.text = "\n".join(filter(None, (self.text, text)))
        self.seconds += seconds

    @property
    def lacked_gpus(self) -> bool:
        return self.kind == "skipped" and WANT_OF_GPUS.search(self.text) is not None


@dataclass
class Report:
    outcomes: dict[str, Outcome] = field(default_factory=dict)  # by node id; all have ended
    problems: list[str] = field(default_factory=list)  # lanes that did not come to their end, and what they left

    def of_kind(self, kind: str) -> list[Outcome]:
        return [outcome for outcome in self.outcomes.values() if outcome.kind == kind]


def run_lanes(
    tests: Sequence[str], gpus: Sequence[str], deadline_s: float, *, device: str = "cuda", root: Path = REPOSITORY
) -> Report:
    """
    Runs the tests, and returns when all have ended or after `deadline_s`.

    Args:
        tests: node ids below `root`, with or without parameters, or files.
        gpus: as CUDA_VISIBLE_DEVICES names them.
        device: what BAGUA_TEST_DEVICE says.
        root: has the pyproject.toml.
    """
    deadline = time.monotonic() + deadline_s
    report = Report()
    for phase, (size, ranks_share) in enumerate(phases_of(len(gpus))):
        if phase:
            tests = [outcome.test for outcome in report.outcomes.values() if outcome.lacked_gpus]
        if not tests:
            break
        lanes_each = LANES_SHARING if ranks_share else LANES_PER_GPU
        shares = [share for share in shares_of(gpus, size) for _ in range(lanes_each)]
        parts = [tests[number :: len(shares)] for number in range(len(shares))]
        with tempfile.TemporaryDirectory(prefix="bagua-lanes-") as folder, ExitStack() as at_the_end:
            lanes = []
            for number, (part, share) in enumerate(zip(parts, shares, strict=True)):
                if part:
                    lanes.append(_Lane(number, part, share, ranks_share, device, Path(folder), root))
                    at_the_end.callback(lanes[-1].kill)
            for lane in lanes:
                lane.wait(deadline)
            for lane in lanes:
                lane.report_to(report, deadline_s)
    return report


def phases_of(gpus: int) -> list[tuple[int, bool]]:
    """GPUs of a lane, and whether ranks share them if a test has more; each phase is for what the last one skipped."""
    if gpus < FEW:
        return [(gpus, True)]
    return [(FEW, False), *([(MANY, False)] if gpus > FEW else []), (MANY, True)]


def shares_of(gpus: Sequence[str], size: int) -> list[Sequence[str]]:
    """As many shares of `size` GPUs as there are; one smaller share if there are fewer."""
    return [gpus[at : at + size] for at in range(0, max(1, len(gpus) - size + 1), size)]


class _Lane:
    def __init__(
        self,
        number: int,
        tests: Sequence[str],
        gpus: Sequence[str],
        ranks_share: bool,
        device: str,
        folder: Path,
        root: Path,
    ) -> None:
        self.name = f"lane {number} (GPUs {','.join(gpus)})"
        self.tests = tests
        self.events = folder / f"{number}.events"
        self.output = folder / f"{number}.out"
        self.code: int | None = None  # None: it was not done in time
        plan = folder / f"{number}.plan"
        # pytest-benchmark, where it is installed, warns, and warnings are errors here.
        options = ["-q", "--tb=short", "-p", "no:cacheprovider", "-p", "no:benchmark", "-m", "deep or not deep"]
        options += ["-o", f"timeout={TEST_TIMEOUT_S}", f"--rootdir={root}", f"--config-file={root / 'pyproject.toml'}"]
        words = {"parent": os.getpid(), "events": str(self.events), "options": options, "tests": list(tests)}
        plan.write_text(json.dumps(words))
        self.events.touch()
        environment = {name: value for name, value in os.environ.items() if not name.startswith(OUTER_PYTEST)}
        environment[DEVICE_VARIABLE] = device
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        environment[SHARING_VARIABLE] = str(int(ranks_share))
        # A program that uses NVLink multicast can harm other users of the host's GPUs.
        environment.setdefault("NCCL_NVLS_ENABLE", "0")
        with plan.open() as stdin, self.output.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-P", str(Path(__file__).with_name("lane_program.py"))],
                cwd=root,
                env=environment,
                stdin=stdin,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # so that it ends with all that its tests have started
            )

    def wait(self, deadline: float) -> None:
        try:
            self.code = self.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """The rank server, in a session of its own, ends with us, and its ranks with it."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def report_to(self, report: Report, deadline_s: float) -> None:
        outcomes: dict[str, Outcome] = {}
        for line in self.events.read_text().splitlines(keepends=True):
            if not line.endswith("\n"):
                break  # it was killed while it wrote
            event = json.loads(line)
            outcome = outcomes.setdefault(event["test"], Outcome(event["test"]))
            if event["kind"] == "ended":
                outcome.ended = True
            elif event["kind"] != "begun":
                outcome.add(event["kind"], event["text"], event["seconds"])
        report.outcomes.update((test, outcome) for test, outcome in outcomes.items() if outcome.ended)
        running = [test for test, outcome in outcomes.items() if not outcome.ended]
        missing = [test for test in self.tests if not any(belongs_to(begun, test) for begun in outcomes)]
        if self.code in (0, 1) and not running and not missing:
            return
        how = f"was not done within {deadline_s:g} s" if self.code is None else f"ended with exit status {self.code}"
        lines = [f"{self.name} {how}"]
        lines += [f"while this test was running: {test}" for test in running]
        lines += [f"not begun: {test}" for test in missing]
        output = self.output.read_text(errors="replace").strip()[-OUTPUT_END:]
        report.problems.append("\n".join([*lines, "its output ends with:", output]))


def belongs_to(test: str, chosen: str) -> bool:
    """Whether a node id is one of those that a node id without parameters, or a file, stands for."""
    return test == chosen or test.startswith((f"{chosen}[", f"{chosen}::"))
