"""`bagua-net top`: its rows, hosts over a pretended ssh, the screen, and the command in a real terminal."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.fresh_process import RunNet
from support.processes import wait_until
from support.stats_page import Comm, Nic, Stream, page_bytes, page_of_this_process

from bagua.net.stats import HostReport, report, snapshot
from bagua.net.stats.sources import HostState, SshSource, checked_hosts
from bagua.net.top.rows import COLUMNS, details, host_lines, rows_of, sorted_rows

ANSWER_S = 60.0


def own() -> HostReport:
    return report(None, snapshot(os.getpid()))


def reported(*comms: Comm, **page: object) -> HostReport:
    with page_of_this_process(page_bytes(comms, **page)):  # type: ignore[arg-type]
        return own()


def state_of(found: HostReport | None, problem: str | None = None, received_s: float = 100.0) -> HostState:
    return HostState("node1", found, received_s, problem)


BUSY = Comm(
    "10.0.0.2:1 (process 2)",
    streams=[Stream(counters={"retransmits": 9}, sample=(1000, 100, 90, 0))],
    counters={"inline_bytes": 5000},
)
QUIET = Comm("10.0.0.1:1 (process 1)", counters={"inline_bytes": 10, "inline_messages": 1, "message_sizes_0": 1})


class TestRows:
    @pytest.mark.parametrize(
        ("title", "first"),
        [
            ("average", "10.0.0.2 (2)"),
            ("retransmits", "10.0.0.2 (2)"),
            ("round trip", "10.0.0.2 (2)"),  # the other's is not known
            ("peer", "10.0.0.1 (1)"),
        ],
    )
    def test_are_sorted_by_a_column(self, title: str, first: str) -> None:
        column = next(one for one in COLUMNS if one.title == title)
        rows = rows_of([state_of(reported(QUIET, BUSY))])
        assert sorted_rows(rows, column, reverse=False)[0].traffic.peer == first
        assert sorted_rows(rows, column, reverse=True)[-1].traffic.peer == first

    def test_details_name_sizes_and_decisions(self) -> None:
        [row] = rows_of([state_of(reported(QUIET))])
        assert "message sizes: to 256 B 100 %" in details(row)

    def test_details_are_of_the_peer_alone(self) -> None:
        other = Comm("10.0.0.9:1 (process 9)", counters={"handed_to_awake": 7})
        row = next(one for one in rows_of([state_of(reported(QUIET, other))]) if one.traffic.peer == "10.0.0.1 (1)")
        assert "handed to I/O threads: 0 awake, 0 asleep; sent inline meanwhile 0; woken ahead 0" in details(row)

    def test_a_silent_host_is_named(self) -> None:
        lines = host_lines(
            [state_of(None, "ssh: no route\nmore"), state_of(reported(QUIET)), state_of(reported(QUIET), "it ended")],
            now_s=160.0,
            interval_s=1.0,
        )
        assert lines[0] == "node1: ssh: no route"
        assert "no news for 1 min" in lines[1]
        assert lines[2].endswith("it ended")

    def test_the_nics_of_a_host_have_a_line_if_there_are_several(self) -> None:
        found = [reported(QUIET, nics=[Nic()]), reported(QUIET, nics=[Nic(), Nic("eth1", state=4)])]
        lines = host_lines([state_of(one) for one in found], now_s=100.0, interval_s=1.0)
        assert len(lines) == 3
        assert lines[2].endswith(": eth0 -, -; eth1 -, -, no carrier")


def test_hosts() -> None:
    assert checked_hosts("node1, user@node2,node1") == ["node1", "user@node2"]
    for hosts in ("", "-oProxyCommand=x", "node1,-v", "node1;reboot", "a b"):  # ssh would misunderstand them
        with pytest.raises(ValueError, match="not a host name"):
            checked_hosts(hosts)


@pytest.mark.parametrize(
    ("script", "problem"),
    [
        (
            "print('bad:', *sys.argv[1:], file=sys.stderr); sys.exit(255)",
            "bad: -- node2 exec /opt/bagua-net stats --json --watch --interval 0.5 (exit code 255)",
        ),
        (r"print('\x1b]0;x\x07denied', file=sys.stderr); sys.exit(255)", "?]0;x?denied (exit code 255)"),
        ("print('Welcome!', flush=True); time.sleep(600)", "not a report"),
        ("print(REPORT, flush=True); sys.stdin.read()", ""),
    ],
)
def test_what_ssh_brings(script: str, problem: str, tmp_path: Path) -> None:
    """The last report, or why there is none, in words that cannot command the terminal."""
    expected = reported(QUIET)
    file = tmp_path / "ssh.py"
    file.write_text(f"import sys, time\nREPORT = {json.dumps(expected.as_json())!r}\n{script}\ntime.sleep(600)")
    source = SshSource("node2", 0.5, "/opt/bagua-net", ssh=[sys.executable, str(file)])
    try:
        wait_until(lambda: source.state().problem is not None or source.state().report is not None, "news")
        assert problem in (source.state().problem or "")
        assert (source.state().report == expected) == (problem == "")
    finally:
        source.close()


class FixedSource:
    def __init__(self, found: HostReport, name: str = "node1") -> None:
        self.found = found
        self.name = name

    def state(self) -> HostState:
        return HostState(self.name, self.found, 100.0, None)

    def close(self) -> None: ...


def test_one_host_under_two_names_is_shown_twice() -> None:
    """Its rows have the same host and process."""
    from textual.widgets import DataTable

    from bagua.net.top.app import TopApp

    found = reported(QUIET, BUSY)

    async def shown() -> int:
        app = TopApp([FixedSource(found), FixedSource(found, "node1.local")], 1.0)
        async with app.run_test(size=(120, 20)):
            return app.query_one("#table", DataTable).row_count

    assert asyncio.run(shown()) == 4


def test_what_comes_while_the_screen_is_taken_down_changes_nothing() -> None:
    from bagua.net.top.app import TopApp

    async def emptied() -> None:
        app = TopApp([FixedSource(reported(QUIET, BUSY))], 3600.0)
        async with app.run_test(size=(120, 20)) as pilot:
            await app.screen.query("*").remove()
            app.call_after_refresh(app._show_hint)
            app.call_later(app._refresh)
            app.call_later(app.on_data_table_row_highlighted)
            await pilot.pause()

    asyncio.run(emptied())


def test_the_screen_sorts_pauses_and_keeps_its_row() -> None:
    from textual.widgets import DataTable, Static

    from bagua.net.top.app import TopApp

    source = FixedSource(reported(QUIET, BUSY))
    app = TopApp([source], 3600.0)

    def peers() -> list[str]:
        table = app.query_one(DataTable)
        return [str(table.get_row_at(number)[2]) for number in range(table.row_count)]

    async def drive() -> None:
        async with app.run_test(size=(120, 20)) as pilot:
            assert sorted(peers()) == ["10.0.0.1 (1)", "10.0.0.2 (2)"]
            await pilot.press("t")
            assert peers()[0] == "10.0.0.2 (2)"
            # The cursor stays on its row.
            assert app.query_one(DataTable).cursor_row == 1
            assert "send 10.0.0.1 (1)" in str(app.query_one("#details", Static).render())
            await pilot.press("v")
            assert peers()[0] == "10.0.0.1 (1)"
            assert app.query_one(DataTable).cursor_row == 0
            await pilot.press("space")
            source.found = reported(QUIET)
            app._refresh()
            assert len(peers()) == 2
            await pilot.press("space")
            app._refresh()
            assert peers() == ["10.0.0.1 (1)"]
            await pilot.press("q")

    asyncio.run(drive())


def in_terminal(
    words: Sequence[str], environment: dict[str, str], columns: int, keys: Sequence[tuple[str, bytes]]
) -> int:
    """Runs a command on a terminal of its own; presses each key once its text is on the screen. The exit code."""
    control, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 20, columns, 0, 0))
    process = subprocess.Popen(
        words,
        env={**environment, "TERM": "xterm-256color"},
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        start_new_session=True,
    )
    os.close(terminal)
    shown = ""
    waiting = list(keys)
    deadline = time.monotonic() + ANSWER_S
    try:
        while process.poll() is None:
            left = deadline - time.monotonic()
            assert left > 0, f"waited in vain for {waiting[:1]}; on the screen: {shown[-3000:]!r}"
            if not select.select([control], [], [], min(left, 0.2))[0]:
                continue
            try:
                shown += re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", os.read(control, 65536).decode(errors="replace"))
            except OSError:
                break  # the other side has closed it
            while waiting and waiting[0][0] in shown:
                os.write(control, waiting.pop(0)[1])
        assert waiting == [], shown[-3000:]
        return process.wait(ANSWER_S)
    finally:
        process.kill()
        process.wait()
        os.close(control)


@pytest.mark.parametrize(("columns", "end"), [(40, b"q"), (150, b"\x03")])
def test_in_a_real_terminal(environment: dict[str, str], columns: int, end: bytes) -> None:
    words = [sys.executable, "-m", "bagua.cli.net", "top", "--interval", "0.2"]
    with page_of_this_process(page_bytes([BUSY], rank=7)):
        before = [("More columns", b"\x1b[C")] if columns == 40 else []
        code = in_terminal(words, environment, columns, [*before, ("10.0.0.2", b" "), ("PAUSED", end)])
    assert code == 0


def test_without_a_terminal_it_says_what_to_use(net: RunNet) -> None:
    done = net("top")
    assert done.returncode == 2
    assert "bagua-net stats --watch" in done.stderr
    with page_of_this_process(page_bytes([BUSY])):
        done = net("top", "--json", "--interval", "0.1")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["interval_s"] is not None
    assert os.getpid() in [one["pid"] for one in found["processes"]]


def test_without_textual_the_error_names_the_extra(environment: dict[str, str]) -> None:
    script = "import sys; sys.modules['textual'] = None; from bagua.cli.net import main; sys.exit(main(['top']))"
    assert in_terminal([sys.executable, "-c", script], environment, 80, [("pip install textual", b"")]) == 1
