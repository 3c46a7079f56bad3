"""Runs the C++ tests: each case of each executable is one pytest test, in a process and with a deadline of its own.

`make test` builds the executables in build/native, one for each folder of tests. BAGUA_CPP_BUILD names another build
folder (`make sanitize`), BAGUA_CPP_SLOWDOWN the factor by which its deadlines are longer, and BAGUA_CPP_SANITIZER the
sanitizer for which sanitizers.txt chooses the files; without it there are all.
"""

from __future__ import annotations

import os
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.processes import is_alive, wait_until

SOURCES = Path(__file__).resolve().parent
REPOSITORY = SOURCES.parents[1]
BUILD = REPOSITORY / os.environ.get("BAGUA_CPP_BUILD", "build/native")
SLOWDOWN = float(os.environ.get("BAGUA_CPP_SLOWDOWN", "1"))
CASE_DEADLINE_S = 120.0 * SLOWDOWN
NOT_LISTED = "cases_not_listed"
LIST_DEADLINE_S = 20.0 * SLOWDOWN

# pytest's own limit only catches what the deadlines below do not.
pytestmark = pytest.mark.timeout(CASE_DEADLINE_S + 60)


@dataclass(frozen=True)
class Outcome:
    return_code: int
    output: str
    timed_out: bool


def run_with_deadline(command: list[str], deadline_s: float) -> Outcome:
    """Runs in a session of its own, so that whatever the command forked ends with it."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
        cwd=REPOSITORY,
    )
    try:
        output, _ = process.communicate(timeout=deadline_s)
        return Outcome(process.returncode, output, timed_out=False)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate(timeout=30)
        return Outcome(process.returncode, output, timed_out=True)


def sanitizers_of_files() -> dict[str, set[str]]:
    """What sanitizers.txt says, by a file's path below this folder."""
    lines = (SOURCES / "sanitizers.txt").read_text().splitlines()
    rows = [line.split() for line in lines if line and not line.startswith("#")]
    assert len({row[0] for row in rows}) == len(rows), "sanitizers.txt names a file twice"
    return {row[0]: set(row[1:]) for row in rows}


def executable_of(source: Path) -> Path:
    room = source.parent.name
    return BUILD / "tests" / "cpp" / (source.stem if room == "alone" else room)


ALL_SOURCES = sorted(SOURCES.glob("*/*_test.cc"))
SANITIZER = os.environ.get("BAGUA_CPP_SANITIZER", "")
TEST_SOURCES = [
    source
    for source in ALL_SOURCES
    if not SANITIZER or SANITIZER in sanitizers_of_files().get(str(source.relative_to(SOURCES)), set())
]
EXECUTABLES = sorted({executable_of(source) for source in TEST_SOURCES})


def list_cases(executable: Path) -> list[str]:
    """The executable's cases, as FILE.CASE; none if it was not built or cannot list them."""
    if not executable.is_file():
        return []
    listing = run_with_deadline([str(executable), "--list"], LIST_DEADLINE_S)
    return listing.output.split() if listing.return_code == 0 and not listing.timed_out else []


def all_cases() -> list[tuple[Path, str]]:
    """Each file's cases; one that fails, and says why, for a file without any."""
    found: list[tuple[Path, str]] = []
    for executable in EXECUTABLES:
        names = list_cases(executable)
        for source in TEST_SOURCES:
            if executable_of(source) == executable:
                cases = [name for name in names if name.startswith(f"{source.stem}.")]
                found += [(executable, name) for name in cases or [f"{source.stem}.{NOT_LISTED}"]]
    return found


@pytest.mark.parametrize("executable", EXECUTABLES, ids=lambda executable: executable.name)
def test_every_executable_lists_cases(executable: Path) -> None:
    assert executable.is_file(), f"{executable} is not built; run: make test (or: make cpp-tests)"
    listing = run_with_deadline([str(executable), "--list"], LIST_DEADLINE_S)
    assert not listing.timed_out, f"--list took more than {LIST_DEADLINE_S:g} s:\n{listing.output}"
    assert listing.return_code == 0, f"--list exited with {listing.return_code}:\n{listing.output}"
    cases = listing.output.split()
    assert len(set(cases)) == len(cases), f"two cases of one name: {sorted(cases)}"
    files = {source.stem for source in TEST_SOURCES if executable_of(source) == executable}
    assert {case.split(".")[0] for case in cases} == files, f"{executable} is not linked from the files of its folder"


@pytest.mark.parametrize(("executable", "case"), [pytest.param(e, c, id=c) for e, c in all_cases()])
def test_case(executable: Path, case: str) -> None:
    assert not case.endswith(f".{NOT_LISTED}"), f"{executable} is not built or cannot list its cases; run: make test"
    outcome = run_with_deadline([str(executable), case], CASE_DEADLINE_S)
    if outcome.timed_out:
        pytest.fail(f"{case} was still running after {CASE_DEADLINE_S:g} s:\n{outcome.output}", pytrace=False)
    if outcome.return_code < 0:
        name = signal.Signals(-outcome.return_code).name
        pytest.fail(f"{case} was ended by {name}:\n{outcome.output}", pytrace=False)
    if outcome.return_code != 0:
        pytest.fail(f"{case} exited with {outcome.return_code}:\n{outcome.output}", pytrace=False)
    # A case that silently ran nothing must not pass.
    assert f"ok      {case}\n" in outcome.output, f"{case} did not say that it passed:\n{outcome.output}"


def test_there_are_cpp_tests() -> None:
    assert TEST_SOURCES, f"no */*_test.cc in {SOURCES}"
    assert not list(SOURCES.glob("*_test.cc")), "a test belongs in the folder of its executable"
    assert len({source.stem for source in ALL_SOURCES}) == len(ALL_SOURCES), "two files of one name"


def test_every_file_runs_under_a_sanitizer() -> None:
    chosen = sanitizers_of_files()
    assert set(chosen) == {str(source.relative_to(SOURCES)) for source in ALL_SOURCES}
    for file, sanitizers in chosen.items():
        assert sanitizers, f"{file} runs under no sanitizer"
        assert sanitizers <= {"address", "thread"}, f"sanitizers.txt: {file}"


class TestRunner:
    """The runner's own promises: a hung or crashed case is a failure, and leaves no process behind."""

    def test_ends_a_command_and_its_children_at_the_deadline(self, tmp_path: Path) -> None:
        pid_file = tmp_path / "child"
        told, deadline_s = "", 0.5
        while not told.endswith("\n"):  # a deadline may pass on a busy machine before the shell has its turn
            deadline_s *= 2
            outcome = run_with_deadline(["sh", "-c", f"sleep 600 & echo $! > {pid_file}; wait"], deadline_s)
            assert outcome.timed_out
            told = pid_file.read_text() if pid_file.exists() else ""
        child = int(told)
        # A signal is delivered when the process next runs, which may be after the runner has returned.
        wait_until(lambda: not is_alive(child), f"the end of child {child}", 10 * SLOWDOWN)

    def test_reports_the_signal_that_ended_a_command(self) -> None:
        outcome = run_with_deadline(["sh", "-c", "kill -ABRT $$"], CASE_DEADLINE_S)
        assert outcome.return_code == -signal.SIGABRT
        assert not outcome.timed_out
