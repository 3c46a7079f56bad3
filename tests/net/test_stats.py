"""`bagua-net stats` and what it reads: real pages of load drivers, and pages that nobody should be hurt by."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from support.fresh_process import TIMEOUT_S, Completed, RunNet
from support.labs import missing_privilege
from support.load_driver import LoadDriver, StartDriver, ask, connect_ring, plugin_library, quit_all
from support.stats_page import Comm, Stream, page_bytes, page_of_this_process

from bagua.cli.stats_table import rendered
from bagua.cli.terminal import Terminal
from bagua.net import native
from bagua.net.stats import HostReport, ProcessReport, Snapshot, StatsError, layout, report, snapshot
from bagua.net.stats.peers import peer_names, traffic_by_peer
from bagua.net.stats.quantities import bytes_text, rate_text, seconds_text
from bagua.net.stats.report_json import report_from_json
from bagua.net.stats.snapshots import find_pages

RunStats = Callable[..., Completed]

_CANNOT_MOUNT = missing_privilege()
# What a user that owns nothing is told of a process of root, of all, and of a process that does not exist.
_AS_NOBODY = """
import json, os, sys
sys.path[:] = {path!r}
from pathlib import Path
from bagua.net.stats import StatsError, snapshot
from bagua.net.stats.snapshots import find_pages
os.setgroups([])
os.setgid(65534)
os.setuid(65534)

def told(pid):
    try:
        snapshot(pid)
    except StatsError as error:
        return str(error)

search = find_pages()
absent = int(Path("/proc/sys/kernel/pid_max").read_text()) + 1
print(json.dumps([told({pid}), [str(pid) for pid in search.pages], search.denied, told(absent)]))
"""

BYTES = 1 << 20
PLAIN = Terminal(80, False)


def start_ring(start: StartDriver, **variables: str) -> list[LoadDriver]:
    options = ["ring", "--nranks", 2, "--transport", "plugin", "--library", plugin_library()]
    ranks = [start(*options, "--rank", rank, RANK=str(rank), WORLD_SIZE="2", **variables) for rank in range(2)]
    connect_ring(ranks)
    return ranks


def verify(ranks: list[LoadDriver]) -> None:
    ask(ranks, f"verify {BYTES}", "verified")


def only(found: Snapshot) -> ProcessReport:
    reported = report(None, found)
    assert len(reported.processes) == 1, (reported.processes, found.problems)
    return reported.processes[0]


def own() -> Snapshot:
    return snapshot(os.getpid())


@pytest.fixture
def stats(net: RunNet) -> RunStats:
    return partial(net, "stats")


class TestOfRealProcesses:
    def test_both_ends_count_the_same(self, start_driver: StartDriver) -> None:
        ranks = start_ring(start_driver, BAGUA_NET_NWORKERS="2", BAGUA_NET_INLINE_BYTES="0")
        earlier = [snapshot(rank.process.pid) for rank in ranks]
        verify(ranks)
        found = [report(before, snapshot(rank.process.pid)) for before, rank in zip(earlier, ranks, strict=True)]
        processes = [one.processes[0] for one in found]
        first, second = processes
        assert [one.rank for one in processes] == [0, 1]
        assert [one.world_size for one in processes] == [2, 2]
        assert first.workers == 2
        assert first.sent_bytes == second.received_bytes > BYTES // 2
        assert second.sent_bytes == first.received_bytes
        assert first.sent_messages == second.received_messages == sum(first.message_sizes) - first.received_messages
        assert first.striped_bytes > 0
        assert first.inline_bytes + first.striped_bytes == first.sent_bytes
        assert first.outstanding == 0
        assert first.comms_failed == 0
        assert {row.direction for row in traffic_by_peer(first)} == {"send", "receive"}
        sending = [comm for comm in first.comms if comm.direction == "send"]
        assert all(comm.interface.startswith("lo") for comm in sending)
        assert {peer_names(comm.peer)[0] for comm in first.comms} == {
            f"{first.host} ({second.pid})",
            f"127.0.0.1 ({second.pid})",  # the end that connects does not know the other's host
        }
        assert sum(comm.handed_to_awake + comm.handed_to_asleep for comm in sending) == sum(
            comm.striped_messages for comm in sending
        )
        # Streams count headers too, on both sides the same.
        of_streams = [
            sum(stream.bytes for comm in one.comms if comm.direction == direction for stream in comm.streams)
            for one, direction in ((first, "send"), (second, "receive"))
        ]
        assert of_streams[0] == of_streams[1] > first.sent_bytes
        assert first.sent_bytes_per_s is not None
        assert first.sent_bytes_per_s > 0
        assert report_from_json(json.dumps(found[0].as_json()), "node1") == found[0]
        quit_all(ranks)

    def test_the_command_shows_a_process_until_it_is_killed(self, start_driver: StartDriver, stats: RunStats) -> None:
        ranks = start_ring(start_driver)
        verify(ranks)
        pid = ranks[0].process.pid
        shown = stats("--pid", pid, "--interval", 0.1, "--json")
        assert shown.returncode == 0, shown.stderr
        assert report_from_json(shown.stdout, "here").processes[0].pid == pid
        text = stats("--pid", pid, "--interval", 0.1, "--streams")
        assert text.returncode == 0, text.stderr
        assert f"rank 0, pid {pid}" in text.stdout
        assert "\x1b" not in text.stdout
        assert text.stdout.count("live") == 4
        ranks[0].process.send_signal(signal.SIGKILL)
        ranks[0].process.wait()
        # Nothing is left of it; the other end tells of the lost peer.
        with pytest.raises(StatsError, match=f"Process {pid} does not exist"):
            snapshot(pid)
        ranks[1].say(f"verify {BYTES}")
        ranks[1].expect("error")
        for rank in ranks:
            rank.end()

    def test_a_process_can_refuse(self, start_driver: StartDriver, stats: RunStats) -> None:
        ranks = start_ring(start_driver, BAGUA_NET_STATS="0")
        verify(ranks)
        shown = stats("--pid", ranks[0].process.pid)
        assert shown.returncode == 1
        assert "shows no Bagua-Net statistics" in shown.stderr
        assert "BAGUA_NET_STATS=0" in shown.stderr
        assert shown.stdout == ""
        quit_all(ranks)


class TestOfBadPages:
    def test_another_version_is_named(self) -> None:
        with page_of_this_process(page_bytes(version=7)):
            found = own()
        assert found.processes == []
        assert "version 7; this bagua-net reads version 4" in found.problems[0]
        assert "Bagua-Net 9.9" in found.problems[0]

    @pytest.mark.parametrize("content", [b"", b"BAGUANET", os.urandom(100_000)], ids=["empty", "short", "random"])
    def test_what_is_no_page_is_a_problem_and_not_an_exception(self, content: bytes) -> None:
        with page_of_this_process(content):
            assert "no complete statistics page" in own().problems[0]

    def test_the_library_that_knows_the_layout_may_be_missing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        content = page_bytes([Comm()])
        monkeypatch.setitem(sys.modules, "bagua.net._core", None)  # any import of it fails
        native.page_layout.cache_clear()
        with page_of_this_process(content):
            assert "install the package with `pip install .`" in own().problems[0]

    def test_any_bytes_behind_a_good_header_can_be_shown(self) -> None:
        good = page_bytes([Comm()] * 20)
        with page_of_this_process(good[: layout.page_layout().places["header_bytes"]] + os.urandom(1_500_000)):
            shown = rendered(report(own(), own()), PLAIN, 80, streams=True)
        assert shown.isprintable() or all(line.isprintable() for line in shown.splitlines())

    def test_a_page_that_is_being_changed_is_not_taken(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("bagua.net.stats.snapshots._PAUSE_S", 0.0)
        with page_of_this_process(page_bytes(generation=3)):
            assert "is being changed" in own().problems[0]

    def test_a_forked_child_is_not_taken_for_its_parent(self) -> None:
        with page_of_this_process(page_bytes(pid=os.getpid() + 1)):
            found = own()
        assert (found.processes, found.problems) == ([], [])

    def test_a_pipe_of_that_name_keeps_nobody_waiting(self, tmp_path: Path) -> None:
        folder = tmp_path / "1" / "fd"
        folder.mkdir(parents=True)
        (folder / "3").symlink_to("/memfd:bagua-net-stats (deleted)")
        assert find_pages(tmp_path).pages == {1: [str(folder / "3")]}
        assert snapshot(proc=tmp_path).processes == []  # what it points to does not exist

    def test_text_cannot_command_the_terminal(self) -> None:
        content = page_bytes(
            [Comm(peer="\x1b[2Jevil\x07:1 (process 2)")], host="\x1b]0;x\x07", failed=1, last_failure="\x9b"
        )
        with page_of_this_process(content):
            shown = rendered(report(None, own()), PLAIN, None, streams=True)
        assert "evil" in shown
        assert not {"\x1b", "\x07", "\x9b"} & set(shown)

    @pytest.mark.skipif(_CANNOT_MOUNT is not None, reason=str(_CANNOT_MOUNT))
    @pytest.mark.parametrize("hides", ["off", "noaccess", "invisible"])
    def test_other_users_are_counted_and_not_shown(self, hides: str) -> None:
        """With each way of procfs to keep users apart, whichever the machine itself has."""
        script = _AS_NOBODY.format(path=sys.path, pid=os.getpid())
        mounted = f'mount -t proc -o hidepid={hides} proc /proc && exec "$@"'
        # With the modules imported before the user changes, who may not be able to read .venv.
        command = ["unshare", "--mount", "sh", "-c", mounted, "-", sys.executable, "-c", script]
        with page_of_this_process(page_bytes()):
            looked = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
        assert looked.returncode == 0, looked.stderr
        alone, pages, denied, absent = json.loads(looked.stdout)
        assert alone.startswith(f"Process {os.getpid()} belongs to another user or is protected.\n")
        assert str(os.getpid()) not in pages
        # Where others are not even listed, it is known of the first one only.
        assert denied == 1 if hides == "invisible" else denied >= 2
        assert "does not exist" in absent

    def test_a_process_that_may_not_be_looked_at(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def denied(_: object) -> object:
            raise PermissionError

        monkeypatch.setattr("bagua.net.stats.snapshots.os.scandir", denied)
        with pytest.raises(StatsError, match="belongs to another user"):
            snapshot(os.getpid())


class TestOfRates:
    def two(self, before: list[Comm], after: list[Comm]) -> HostReport:
        with page_of_this_process(page_bytes(before, started_ms=5)) as page:
            earlier = own()
            os.pwrite(page, page_bytes(after, started_ms=5), 0)
            later = own()
        object.__setattr__(later.processes[0], "taken_s", earlier.processes[0].taken_s + 2)
        return report(earlier, later)

    def test_rates_are_of_the_time_between(self) -> None:
        before = Comm(counters={"inline_bytes": 100, "inline_messages": 1, "message_sizes_0": 1})
        after = Comm(counters={"inline_bytes": 300, "inline_messages": 2, "message_sizes_0": 2})
        process = self.two([before], [after]).processes[0]
        assert process.comms[0].bytes_per_s == process.sent_bytes_per_s == 100
        assert process.comms[0].messages_per_s == 0.5

    def test_another_comm_in_the_same_slot_is_not_compared(self) -> None:
        before = Comm(counters={"inline_bytes": 1000}, opened_ms=1)
        after = Comm(counters={"inline_bytes": 10}, opened_ms=2)
        process = self.two([before], [after]).processes[0]
        assert process.comms[0].bytes_per_s is None
        assert process.sent_bytes_per_s == 0

    def test_stalls_are_shares_of_what_the_kernel_measured(self) -> None:
        def sending(busy_us: int, peer_us: int, sampled_ms: int) -> Comm:
            counters = {"busy_us": busy_us, "peer_not_reading_us": peer_us}
            return Comm(streams=[Stream(counters=counters, sample=(sampled_ms, 100, 90, 0))])

        stalls = self.two([sending(0, 0, 1000)], [sending(900_000, 800_000, 2000)]).processes[0].comms[0].stalls
        assert stalls.peer_not_reading == pytest.approx(0.8)
        assert stalls.network == pytest.approx(0.1)

    def test_a_stream_that_stays_parked_counts_as_stalled(self) -> None:
        parked = Comm(direction=1, streams=[Stream(state=2, counters={"parked": 1})])
        assert self.two([parked], [parked]).processes[0].comms[0].stalls.receive_not_posted == 1
        # One that was not all the time, and is again, has waited for what is counted.
        again = Comm(direction=1, streams=[Stream(state=2, counters={"parked": 2, "parked_ns": 500_000_000})])
        assert self.two([parked], [again]).processes[0].comms[0].stalls.receive_not_posted == pytest.approx(0.25)

    def test_ages_of_requests_survive_the_wrap_of_their_clock(self) -> None:
        with page_of_this_process(page_bytes([Comm(posted_ms=[(1 << 32) - 500, 510])])):
            found = own()
        object.__setattr__(found.processes[0], "taken_s", ((1 << 32) + 500) / 1000)
        comm = only(found).comms[0]
        assert comm.outstanding == 2
        assert comm.oldest_request_s == 1


class TestOfTheTable:
    def shown(self, width: int | None, comms: list[Comm] | None = None) -> str:
        with page_of_this_process(page_bytes([Comm(), Comm(direction=1)] if comms is None else comms, rank=3)):
            return rendered(report(None, own()), PLAIN, width, streams=True)

    @pytest.mark.parametrize("width", [40, 60, 80, 200])
    def test_fits_the_terminal(self, width: int) -> None:
        shown = self.shown(width)
        assert max(map(len, shown.splitlines())) <= width
        assert "node2 (4242)" in shown
        assert ("do not fit" in " ".join(shown.split())) == (width < 200)

    def test_comms_to_the_same_peer_are_one_row(self) -> None:
        comms = [Comm(counters={"inline_bytes": 1000, "inline_messages": 1}) for _ in range(5)]
        with page_of_this_process(page_bytes(comms)):
            rows = traffic_by_peer(only(own()))
        assert [(row.comms, row.bytes, row.streams_live) for row in rows] == [(5, 5000, 5)]

    def test_says_what_went_wrong(self) -> None:
        with page_of_this_process(page_bytes(failed=2, last_failure="connection to node2: reset")):
            shown = rendered(report(None, own()), PLAIN, None, streams=False)
        assert "2 comms failed" in shown
        assert "connection to node2: reset" in shown
        assert "no connection is open" in shown


@pytest.mark.parametrize(
    ("peer", "expected"),
    [
        ("10.0.0.2:4711 (host node2, process 42)", ("node2 (42)", "10.0.0.2")),
        ("[fe80::1]:4711 (process 42)", ("[fe80::1] (42)", "[fe80::1]")),
        ("nothing of the kind", ("nothing of the kind", "nothing of the kind")),
        ("", ("?", "?")),
    ],
)
def test_names_of_peers(peer: str, expected: tuple[str, str]) -> None:
    assert peer_names(peer) == expected


def test_quantities() -> None:
    assert [bytes_text(one) for one in (None, 0, 999, 999.6, 1234, 98_765_432, 2e21)] == [
        "-", "0 B", "999 B", "1.00 kB", "1.23 kB", "98.8 MB", "2000 EB",
    ]  # fmt: skip
    assert rate_text(1.5e9) == "1.50 GB/s"
    assert [seconds_text(one) for one in (None, 31e-6, 0.0123, 2.5, 61, 4000, 90_000)] == [
        "-", "31 us", "12.3 ms", "2.50 s", "1 min 1 s", "1 h 6 min", "1 d 1 h",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("sent", "complaint"),
    [
        ("Welcome to node2!", "not a report"),
        ("[1]", "not a report"),
        ('{"schema": 99}', "version 99; this bagua-net reads version 3"),
        ('{"schema": 3}', "'host'"),
        ('{"schema": 3, "host": 5}', "host is 5"),
        ("[" * 100_000, "not a report"),
    ],
)
def test_what_another_host_sends_is_checked(sent: str, complaint: str) -> None:
    with pytest.raises(StatsError) as error:
        report_from_json(sent, "node2")
    assert complaint in str(error.value)
    assert "node2" in str(error.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("oldest_request_s", "1e999"),
        ("age_s", "NaN"),
        ("age_s", "1" + "0" * 400),
        ("sent_bytes", "1" + "0" * 400),
        ("message_sizes", "[1, 2]"),
    ],
)
def test_numbers_of_another_host_can_be_shown(field: str, value: str) -> None:
    with page_of_this_process(page_bytes([])):
        good = json.dumps(report(None, snapshot(os.getpid())).as_json())
    sent = re.sub(rf'"{field}": (\[[^]]*\]|[^,]+)', f'"{field}": {value}', good, count=1)
    assert sent != good
    with pytest.raises(StatsError, match=field):
        report_from_json(sent, "node2")


def test_a_process_without_the_plugin_is_an_error_with_a_remedy(stats: RunStats) -> None:
    shown = stats("--pid", os.getpid(), "--json")
    assert shown.returncode == 1
    assert json.loads(shown.stdout)["processes"] == []
    assert f"Process {os.getpid()} shows no Bagua-Net statistics" in shown.stderr
    assert "bagua-net doctor" in shown.stderr


def test_watching_ends_with_an_interrupt(environment: dict[str, str]) -> None:
    words = [sys.executable, "-m", "bagua.cli.net", "stats", "--watch", "--json", "--interval", "0.1"]
    words += ["--pid", str(os.getpid())]
    with (
        page_of_this_process(page_bytes([Comm()])),
        subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process,
    ):
        assert process.stdout is not None
        assert process.stderr is not None
        lines = [process.stdout.readline() for _ in range(2)]
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert [report_from_json(line, "here").processes[0].pid for line in lines] == [os.getpid()] * 2
    assert (process.returncode, errors) == (130, b"")
