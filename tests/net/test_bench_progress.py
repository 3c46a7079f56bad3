"""Progress: one redrawn line on a terminal, few plain lines elsewhere, nothing when quiet."""

from __future__ import annotations

import io

import pytest

from bagua.net.bench import progress as progress_module
from bagua.net.bench.progress import Progress


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class _Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(progress_module.time, "monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> _Clock:
    return _Clock(monkeypatch)


def test_a_file_gets_plain_lines_ten_seconds_apart(clock: _Clock) -> None:
    stream = io.StringIO()
    progress = Progress(100, stream=stream)
    for step in range(30):
        clock.now = 100.0 + step
        progress.advance(f"step {step}")
    assert stream.getvalue().splitlines() == [
        "  1% step 0, 0 s",
        " 11% step 10, 10 s, 81 s left",
        " 21% step 20, 20 s, 75 s left",
    ]


def test_a_terminal_gets_one_line_that_is_redrawn_and_cleared(clock: _Clock) -> None:
    stream = _Terminal()
    with Progress(4, stream=stream) as progress:
        progress.advance("first")
        clock.now += 0.01
        progress.advance("too soon to draw")
        clock.now += 1
        progress.advance("third")
    text = stream.getvalue()
    assert "\n" not in text
    assert "too soon" not in text
    assert "75% third" in text
    assert text.endswith("\r\x1b[2K")


def test_messages_stay_and_come_on_lines_of_their_own() -> None:
    stream = _Terminal()
    progress = Progress(2, stream=stream)
    progress.advance("half")
    progress.message("left out: gloo")
    assert stream.getvalue().endswith("\r\x1b[2Kleft out: gloo\n")


def test_a_long_line_never_wraps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    stream = _Terminal()
    Progress(2, stream=stream).advance("x" * 200)
    assert len(stream.getvalue().removeprefix("\r\x1b[2K")) == 39


def test_quiet_is_silent() -> None:
    stream = io.StringIO()
    with Progress(2, stream=stream, quiet=True) as progress:
        progress.advance("half")
        progress.message("said")
    assert stream.getvalue() == ""
