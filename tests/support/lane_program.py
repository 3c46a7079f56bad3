"""One lane of `support.lanes`: pytest on the tests that come on standard input, as JSON.

The process is a session of its own with a rank server of its own, and ends with the process that started it. What
happens is appended to a file, a line of JSON per event, so that it can be read wherever the lane stopped.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import IO

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.rank_server import die_with_parent


class Recorder:
    def __init__(self, events: IO[str]) -> None:
        self.events = events

    def _write(self, test: str, kind: str, text: str = "", seconds: float = 0.0) -> None:
        event = {"test": test, "kind": kind, "text": text, "seconds": seconds}
        self.events.write(json.dumps(event) + "\n")
        self.events.flush()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._write(nodeid, "begun")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        text = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
        if report.failed:
            text = "\n".join([text, *(f"--- {title}\n{content}" for title, content in report.sections)])
        self._write(report.nodeid, report.outcome, text, report.duration)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._write(nodeid, "ended")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._write(report.nodeid, "failed", report.longreprtext)
            self._write(report.nodeid, "ended")


def main() -> int:
    plan = json.load(sys.stdin)
    die_with_parent(plan["parent"])
    with Path(plan["events"]).open("a") as events:
        return int(pytest.main([*plan["options"], *plan["tests"]], plugins=[Recorder(events)]))


if __name__ == "__main__":
    sys.exit(main())
