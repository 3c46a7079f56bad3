"""`make deep`: what takes too long for every change, before a release; and a file that says what came of it.

    python tools/release/deep_run.py [--output FILE] [STEP ...]

Runs the targets of the Makefile below one after the other, all of them also after a failure, and writes FILE: when, at
which commit, how long, and what failed. Exits with 1 if anything has.
"""

from __future__ import annotations

import argparse
import datetime
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
OUTPUT = REPOSITORY / "tests" / "deep-run.md"
LOGS = REPOSITORY / "build" / "deep"

# Target of the Makefile, and what it is.
STEPS = {
    "deep-tests": "tests marked `deep`, and those that draw examples with twenty times as many",
    "deep-faults": "faults from a seed, cuts and damage, on every NCCL table",
    "lint-tidy-all": "clang-tidy with its analyzer, on all C++ sources but the tests",
    "sanitize-all": "all C++ tests under each sanitizer",
    "deep-fuzz": "fuzzing of handshake, frames and sealed records",
}


@dataclass(frozen=True)
class Outcome:
    step: str
    status: int
    seconds: float
    closing: str  # the last line that pytest or libFuzzer wrote about numbers


def closing_line(log: Path) -> str:
    telling = ("passed", "failed", "stat::number_of_executed", "no tests ran")
    lines = [line.strip(" =") for line in log.read_text(errors="replace").splitlines()]
    return next((line for line in reversed(lines) if any(word in line for word in telling)), "")


def run(step: str) -> Outcome:
    LOGS.mkdir(parents=True, exist_ok=True)
    log = LOGS / f"{step}.log"
    print(f"=== make {step} (log in {log.relative_to(REPOSITORY)})", flush=True)
    started = time.monotonic()
    with log.open("w") as file:
        status = subprocess.run(["make", step], cwd=REPOSITORY, stdout=file, stderr=subprocess.STDOUT).returncode
    outcome = Outcome(step, status, time.monotonic() - started, closing_line(log))
    print(f"=== make {step}: {'passed' if status == 0 else 'FAILED'} after {outcome.seconds:.0f} s", flush=True)
    return outcome


def git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout.strip()


def page(outcomes: list[Outcome], commit: str, date: str) -> str:
    failed = [one.step for one in outcomes if one.status]
    missing = [step for step in STEPS if step not in {one.step for one in outcomes}]
    left_out = f"; not run: {', '.join(missing)}" if missing else ""
    result = f"failed: {', '.join(failed)}" if failed else "passed"
    rows = [
        f"| `{one.step}` | {STEPS[one.step]} | {'passed' if one.status == 0 else f'**failed** ({one.status})'} "
        f"| {one.seconds / 60:.1f} min | {one.closing.replace('|', '/')} |"
        for one in outcomes
    ]
    return "\n".join(
        [
            "# The last deep run",
            "",
            "Written by `make deep`, which runs what is too long for `make test`. Run it before a release, and commit",
            "this file; a failure blocks the release.",
            "",
            f"- Date: {date}",
            f"- Commit: {commit}",
            f"- Result: {result}{left_out}",
            f"- Duration: {sum(one.seconds for one in outcomes) / 60:.0f} minutes",
            "",
            "| step | what | result | duration | last line |",
            "|---|---|---|---|---|",
            *rows,
            "",
        ]
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("steps", metavar="STEP", nargs="*", help=f"of: {', '.join(STEPS)} (default: all)")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="what is written (default: %(default)s)")
    options = parser.parse_args(arguments)
    if unknown := [step for step in options.steps if step not in STEPS]:
        parser.error(f"unknown step {unknown[0]!r}; there are {', '.join(STEPS)}")
    changed = " with changes that are not committed" if git("status", "--porcelain", "--untracked-files=no") else ""
    commit = git("rev-parse", "HEAD") + changed
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    outcomes = [run(step) for step in options.steps or STEPS]
    options.output.write_text(page(outcomes, commit, date))
    print(f"=== written: {options.output}")
    return int(any(one.status for one in outcomes))


if __name__ == "__main__":
    sys.exit(main())
