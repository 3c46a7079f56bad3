"""What holds for every test: which `bagua` is under test, which tests this machine cannot run, which are for
`make deep`, and how many examples hypothesis draws."""

from __future__ import annotations

import gc
import importlib.util
import os
import shlex
import signal
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from support import rank_server
from support.rank_server import SERVER_VARIABLE, RankServerProcess

REPOSITORY = Path(__file__).resolve().parents[1]

# Interpreters that tests start must not find the source tree, which has no compiled library, before the package.
os.environ["PYTHONSAFEPATH"] = "1"
# The workers share the CPUs: more threads of torch in each would wait for them, and spin meanwhile.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# How many examples hypothesis draws; `support.examples` makes other numbers of it for tests that ask for them. `make
# deep` says --hypothesis-profile=deep. An example is not wrong because the machine is busy.
settings.register_profile("default run", max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("deep", settings.get_profile("default run"), max_examples=1000)
settings.load_profile("default run")

# Started in the background or by nohup, we ignore these, and so would the programs whose answer to them is tested. A
# handler, unlike SIG_IGN, does not outlive exec: they begin with the default.
for _number in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, signal.default_int_handler)


def _package_origin() -> Path | None:
    spec = importlib.util.find_spec("bagua")
    return Path(spec.origin) if spec and spec.origin else None


def _cuda_devices() -> list[Path]:
    # The driver's device files, not torch: every worker asks, and importing torch takes seconds.
    return sorted(Path("/dev").glob("nvidia[0-9]*"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--installed",
        action="store_true",
        help="fail unless the bagua under test is the installed package: a stray copy on sys.path proves nothing",
    )


def _start_rank_server(config: pytest.Config) -> None:
    """One for all workers of pytest-xdist, in its main process. It forks them, too."""
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        return
    server = RankServerProcess()
    os.environ[SERVER_VARIABLE] = server.folder
    config.add_cleanup(server.close)
    interpreter = shlex.join([sys.executable, rank_server.__file__])
    config.option.tx = [f"popen//python={interpreter}" for _ in config.option.tx]


def pytest_configure(config: pytest.Config) -> None:
    _start_rank_server(config)
    if not config.getoption("--installed"):
        return
    origin = _package_origin()
    if origin is None:
        raise pytest.UsageError("the package bagua is not installed in this environment; run: make test")
    if origin.is_relative_to(REPOSITORY / "bagua"):
        raise pytest.UsageError(
            f"bagua would be imported from the source tree ({origin}), not as installed; unset PYTHONPATH"
        )


def pytest_report_header() -> list[str]:
    lines = [f"bagua: {_package_origin() or 'not installed'}"]
    devices = _cuda_devices()
    if devices:
        lines.append(f"gpu tests: run, {len(devices)} CUDA device(s) here")
    else:
        lines.append("gpu tests: deselected, this machine has no CUDA device (/dev/nvidia*)")
    return lines


LEFT_OUT = pytest.StashKey[int]()  # how many tests for `make deep` were deselected, here or in this process's workers


def _deselect(config: pytest.Config, items: list[pytest.Item], marker: str) -> int:
    chosen = [item for item in items if item.get_closest_marker(marker)]
    if chosen:
        config.hook.pytest_deselected(items=chosen)
        items[:] = [item for item in items if not item.get_closest_marker(marker)]
    return len(chosen)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not _cuda_devices():
        _deselect(config, items, "gpu")
    if "deep" not in config.getoption("markexpr"):
        config.stash[LEFT_OUT] = _deselect(config, items, "deep")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is made until all tests are collected stays: every worker would look through it again and again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_out"] = session.config.stash.get(LEFT_OUT, 0)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Of pytest-xdist. Every worker collects all tests: their numbers are the same."""
    node.config.stash[LEFT_OUT] = getattr(node, "workeroutput", {}).get("left_out", 0)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if number := config.stash.get(LEFT_OUT, 0):
        terminalreporter.write_line(f"deep tests: {number} deselected; `make deep` runs them, or: pytest -m deep")


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the source tree, for tests about the tree itself. Tests of the package must not need it."""
    return REPOSITORY
