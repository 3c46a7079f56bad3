"""Traces (BAGUA_NET_TRACE): files of two real processes that exchange known messages, and `bagua-net trace merge`."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from support.load_driver import LoadDriver, StartDriver, ask, connect_ring, plugin_library, quit_all
from support.processes import wait_until

from bagua.cli.net import main

Event = dict[str, Any]
Pair = tuple[LoadDriver, LoadDriver]

# Of messages, and how many of each.
SIZES = {1: 4, 1000: 4, 300_000: 4, 1 << 20: 2}


def start_traced_pair(start: StartDriver, folder: Path, **variables: str) -> Pair:
    common = ["--transport", "plugin", "--library", plugin_library(), "--nranks", 2, "--channels", 1, "--depth", 4]
    environment = {"BAGUA_NET_TRACE": str(folder / "%r.%p.json"), "BAGUA_NET_NWORKERS": "2", **variables}
    first, second = (start("ring", "--rank", rank, *common, **environment, RANK=str(rank)) for rank in range(2))
    connect_ring((first, second))
    return first, second


def verify(pair: Pair, size: int, messages: int) -> None:
    """An all-reduce of two ranks sends each half of its bytes twice: a message in either direction, and one more."""
    assert messages % 2 == 0
    for _ in range(messages // 2):
        for event in ask(pair, f"verify {2 * size}", "verified"):
            assert event["wrong_elements"] == 0


def traces(folder: Path) -> list[list[Event]]:
    """By rank. Strict: what is not valid to the last byte fails."""
    paths = sorted(folder.glob("*.json"))
    assert [path.name.split(".")[0] for path in paths] == ["0", "1"]
    return [json.loads(path.read_bytes()) for path in paths]


def on_tracks(events: list[Event]) -> dict[int, list[Event]]:
    tracks = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            tracks[event["tid"]].append(event)
    return tracks


def messages_of(events: list[Event], name: str) -> dict[int, Event]:
    found: dict[int, Event] = {}
    for event in events:
        if event["name"] != name:
            continue
        number = event["args"]["message"]
        assert number not in found, f"message {number} is there twice"
        found[number] = event
    return found


def check_schema(events: list[Event]) -> None:
    (process,) = {event["pid"] for event in events}
    assert isinstance(process, int)
    named = {event["tid"] for event in events if (event["ph"], event["name"]) == ("M", "thread_name")}
    for event in events:
        assert event["ph"] in {"M", "X", "i"}
        assert event["tid"] in named, "every track has a name"
        assert isinstance(event["ts"], int | float)
        assert isinstance(event["args"], dict)
        assert (
            set(event)
            == {"ph", "pid", "tid", "ts", "name", "args"}
            | {
                "M": set(),
                "X": {"cat", "dur"},
                "i": {"cat", "s"},
            }[event["ph"]]
        )
    # Two at the same time on one track: viewers show one of them, or none.
    for track in on_tracks(events).values():
        for before, after in pairwise(track):
            assert after["ts"] >= before["ts"] + before["dur"] - 0.002, (before, after)


@pytest.mark.parametrize("recovery", ["0", "1"])
def test_every_message_is_there_once_with_its_chunks(start_driver: StartDriver, tmp_path: Path, recovery: str) -> None:
    pair = start_traced_pair(start_driver, tmp_path, BAGUA_NET_RECOVERY=recovery)
    for size, count in SIZES.items():
        verify(pair, size, count)
    quit_all(pair)
    expected = [size for size, count in SIZES.items() for _ in range(count)]
    for events in traces(tmp_path):
        check_schema(events)
        names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
        for name in ("isend", "irecv"):
            found = messages_of(events, name)
            assert [found[number]["args"]["bytes"] for number in range(len(found))] == expected
        sends = messages_of(events, "isend")
        assert {event["args"]["path"] for event in sends.values()} == {"inline", "striped"}
        assert all(event["args"]["path"] == "striped" for event in sends.values() if event["args"]["bytes"] >= 1 << 20)
        # A comm each way: chunks make up its messages, and none is moved before it is posted.
        for direction, found in (("send", sends), ("receive", messages_of(events, "irecv"))):
            moved: dict[int, int] = defaultdict(int)
            for event in events:
                if event["name"] == "chunk" and names[event["tid"]].startswith(direction):
                    number = event["args"]["message"]
                    moved[number] += event["args"]["bytes"]
                    assert event["ts"] >= found[number]["ts"] - 0.002
                    assert 0 <= event["args"]["offset"] <= found[number]["args"]["bytes"]
            assert [moved[number] for number in range(len(found))] == expected
        (end,) = (event["args"] for event in events if event["name"] == "bagua_net_trace_end")
        assert end == {"events": sum(event["ph"] != "M" for event in events), "dropped": 0}


def test_streams_that_are_lost_and_replaced_are_there(start_driver: StartDriver, tmp_path: Path) -> None:
    pair = start_traced_pair(
        start_driver, tmp_path, BAGUA_NET_RECOVERY="1", BAGUA_NET_FAULT="seed=7,cut=40/s", BAGUA_NET_NSTREAMS="4"
    )
    lost = False
    while not lost:  # pytest's limit ends it
        verify(pair, 1 << 20, 50)
        texts = [path.read_text() for path in tmp_path.glob("*.json")]
        lost = all('"name":"lost"' in text for text in texts)
    quit_all(pair)
    for events in traces(tmp_path):
        check_schema(events)
        losses = [event for event in events if event["name"] == "lost"]
        assert all(event["args"]["detail"] for event in losses), "the reason"
        assert sum(event["name"] == "connected" for event in events) > 8


def test_a_killed_process_leaves_a_trace_that_can_be_read(start_driver: StartDriver, tmp_path: Path) -> None:
    pair = start_traced_pair(start_driver, tmp_path)
    verify(pair, 1000, 50)
    paths = sorted(tmp_path.glob("*.json"))
    wait_until(lambda: all(path.read_text().count('"name":"isend"') == 50 for path in paths), "all messages are there")
    for rank in pair:
        rank.process.kill()
        rank.process.wait()
    assert paths[0].read_text().endswith(",\n"), "an array without its end, which viewers read"
    # One that was cut in the middle of a line, too.
    paths[1].write_bytes(paths[1].read_bytes()[:-30])
    assert main(["trace", "merge", *map(str, paths), "-o", str(tmp_path / "merged")]) == 0
    events = json.loads((tmp_path / "merged").read_text())["traceEvents"]
    # All but the one that was cut, if that was a message.
    assert sum(event["name"] == "isend" for event in events) >= 99


# --- merge -----------------------------------------------------------------------------------------------------------

BASE_S = 1_788_480_000


def ours(rank: int, host: str, pid: int, *times_us: float, base_s: int = BASE_S) -> list[Event]:
    facts = {"baseTimeNanoseconds": base_s * 10**9, "host": host, "rank": rank, "version": "1.0.0"}
    begin = {"ph": "M", "pid": pid, "tid": 9, "ts": 0, "name": "bagua_net_trace", "args": facts}
    name = {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": f"rank {rank} on {host}, process {pid}"}}
    slices = [{"ph": "X", "pid": pid, "tid": 1, "ts": ts, "dur": 1, "name": "isend", "args": {}} for ts in times_us]
    return [begin, name, *slices]


def torchs(rank: int, host: str, pid: int, *times_us: float, base_s: int = BASE_S) -> dict[str, Any]:
    """As torch 2.13's export_chrome_trace writes it."""
    slices = [{"ph": "X", "pid": pid, "tid": pid, "ts": ts, "dur": 1, "name": "aten::add"} for ts in times_us]
    gpu = {"ph": "X", "pid": 0, "tid": 7, "ts": times_us[0], "dur": 1, "name": "ncclDevKernel_AllReduce"}
    flow = {"ph": "s", "id": 5, "pid": pid, "tid": pid, "ts": times_us[0], "cat": "ac2g", "name": "ac2g"}
    name = {"ph": "M", "pid": pid, "tid": 0, "ts": 0, "name": "process_name", "args": {"name": "python3"}}
    return {
        "schemaVersion": 1,
        "host_name": host,
        "distributedInfo": {"backend": "nccl", "rank": rank, "world_size": 2},
        "baseTimeNanoseconds": base_s * 10**9,
        "traceEvents": [name, *slices, gpu, flow],
    }


def merged(folder: Path, *documents: object) -> list[Event]:
    paths = [folder / f"{number}.json" for number in range(len(documents))]
    for path, document in zip(paths, documents, strict=True):
        path.write_text(json.dumps(document))
    out = folder / "merged.json"
    assert main(["trace", "merge", *map(str, paths), "-o", str(out)]) == 0
    document = json.loads(out.read_text())
    assert document["baseTimeNanoseconds"] == BASE_S * 10**9
    events = document["traceEvents"]
    assert isinstance(events, list)
    return events


def test_times_are_put_on_one_clock(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    events = merged(tmp_path, ours(0, "a", 42, 5e6 + 0.125), torchs(0, "a", 42, 2e6, 4e6, base_s=BASE_S + 2))
    times = [(event["name"], event["ts"]) for event in events if event["ph"] == "X"]
    assert times == [
        *(("isend", 5e6 + 0.125), ("aten::add", 4e6), ("aten::add", 6e6)),
        ("ncclDevKernel_AllReduce", 4e6),
    ]
    assert {event["pid"] for event in events if event["name"] != "ncclDevKernel_AllReduce"} == {42}, "one process"
    assert "no time in common" not in capsys.readouterr().err


@pytest.mark.parametrize("hosts", ["ab", "aa"], ids=["hosts", "containers of one name"])
def test_processes_of_different_ranks_stay_apart(tmp_path: Path, hosts: str) -> None:
    """Though they have the same pid."""
    events = merged(
        tmp_path, *(make(rank, host, 42, 1.0, 3.0) for rank, host in enumerate(hosts) for make in (ours, torchs))
    )
    by_name: dict[str, set[int]] = defaultdict(set)
    for event in events:
        by_name[event["name"]].add(event["pid"])
    assert len(by_name["isend"]) == len(by_name["ncclDevKernel_AllReduce"]) == 2
    assert by_name["isend"] == by_name["aten::add"], "torch's tracks of a rank are beside ours"
    arrows = {event["id"] for event in events if event["ph"] == "s"}
    assert len(arrows) == 2, "arrows within a file"
    assert all(isinstance(one, int) for one in arrows), "Perfetto takes no other ids"


@pytest.mark.parametrize("order", [1, -1])
def test_a_process_has_the_name_that_says_its_rank(tmp_path: Path, order: int) -> None:
    events = merged(tmp_path, *(ours(1, "a", 42, 1.0), torchs(1, "a", 42, 2.0))[::order])
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert names == ["rank 1 on a, process 42"], "Perfetto shows the first of several"


def test_files_of_different_times_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    merged(tmp_path, ours(0, "a", 42, 1.0, 2.0), ours(1, "a", 43, 5.0))
    error = capsys.readouterr().err
    assert "0.json" in error
    assert "1.json have no time in common" in error


def test_compressed_files_are_read_and_written(tmp_path: Path) -> None:
    source, out = tmp_path / "in.json.gz", tmp_path / "out.json.gz"
    source.write_bytes(gzip.compress(json.dumps(torchs(0, "a", 42, 1.0)).encode()))
    assert main(["trace", "merge", str(source), "-o", str(out)]) == 0
    assert len(json.loads(gzip.decompress(out.read_bytes()))["traceEvents"]) == 4


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "cannot be read: [Errno 2] No such file"),
        (b"", "is not JSON"),
        (b"[1, 2", "is not JSON"),
        (b'{"a": 1}', "has no list of events"),
        (b'[{"ph": "X", "name": "other", "pid": 1, "tid": 1, "ts": 1}]', "does not say when it was recorded"),
        (b'{"traceEvents": [], "baseTimeNanoseconds": "now"}', "baseTimeNanoseconds is 'now'"),
        (b"\x1f\x8bnot gzip", "cannot be read"),
    ],
)
def test_what_is_no_trace_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes | None, reason: str
) -> None:
    path = tmp_path / "a.json"
    if content is not None:
        path.write_bytes(content)
    assert main(["trace", "merge", str(path), "-o", str(tmp_path / "out")]) == 1
    error = capsys.readouterr().err
    assert reason in error
    assert str(path) in error
    assert not (tmp_path / "out").exists()


def test_a_file_is_not_written_over_what_it_is_made_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps(ours(0, "a", 42, 1.0)))
    assert main(["trace", "merge", str(path), "-o", str(path)]) == 1
    assert "is one of the files to be merged" in capsys.readouterr().err
    assert main(["trace", "merge", str(path), "-o", str(tmp_path / "none" / "out")]) == 1
    assert "cannot be written: No such file or directory" in capsys.readouterr().err
