"""`bagua-net doctor --peer`: what it concludes, and what it does with peers that are not what they should be. Real runs
between two hosts are in test_doctor_peer_hosts.py."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.ports import free_port

from bagua.cli.net import main
from bagua.net.bench import ranks
from bagua.net.bench.errors import BenchError, ConnectionLostError
from bagua.net.bench.rendezvous import LineConnection
from bagua.net.doctor.finding import Finding, Report, Section, Status
from bagua.net.doctor.peer import bandwidth, examination, serving
from bagua.net.doctor.peer.bandwidth import RECEIVED, SENT
from bagua.net.doctor.peer.examination import examine_peer
from bagua.net.doctor.peer.facts import HostFacts, InterfaceFacts, parse_facts
from bagua.net.doctor.peer.handshake import admit
from bagua.net.doctor.peer.serving import serve_one_peer
from bagua.progress import Progress

TOKEN = "the-right-token!"  # as short as may be
THERE = HostFacts(
    "b", "1.0", "kernel-b", ("10.0.0.2",), interfaces=(InterfaceFacts("eth0", ("10.0.0.2",), 1500, 10_000, used=True),)
)

Answer = Callable[[LineConnection], None]


def examine(port: int, token: str = TOKEN) -> Report:
    return examine_peer(
        "127.0.0.1",
        port,
        token,
        wait_s=0.0,
        transfer_s=0.05,
        environment={},
        progress=lambda total: Progress(total, quiet=True),
    )


@contextmanager
def listening(serve: Callable[[socket.socket], None]) -> Iterator[int]:
    """The port of a peer that a thread plays."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(10)
        thread = threading.Thread(target=serve, args=(listener,))
        thread.start()
        try:
            yield int(listener.getsockname()[1])
        finally:
            thread.join()


def playing(answer: Answer) -> Callable[[socket.socket], None]:
    """A peer that knows the token."""

    def serve(listener: socket.socket) -> None:
        connection = LineConnection(listener.accept()[0], "the asking end", 10)
        try:
            if admit(connection, TOKEN):
                answer(connection)
        except ConnectionLostError:
            pass  # The asking end has had enough.
        finally:
            connection.close()

    return serve


def up_to_begin(connection: LineConnection, facts: HostFacts = THERE, largest: int = 1 << 30) -> None:
    """Answers messages of at most `largest` characters, as a network does that drops large packets."""
    connection.receive(10)
    connection.send({"facts": facts.as_json()})
    while (message := connection.receive(10)) is not None and "ping" in message:
        if len(message["pad"]) <= largest:
            connection.send({"pong": message["ping"], "pad": message["pad"]})


def only(section: Section) -> Finding:
    (finding,) = section.findings
    return finding


# --- peers that are not what they should be ---


def test_a_wrong_token_is_turned_away_and_the_right_one_still_served() -> None:
    said: list[str] = []
    ports: list[int] = []
    real = serving.listen_everywhere
    ready = threading.Event()

    def listen(port: int, backlog: int) -> socket.socket:
        listener = real(port, backlog)
        ports.append(listener.getsockname()[1])
        ready.set()
        return listener

    served: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(serving, "listen_everywhere", listen)
        thread = threading.Thread(target=lambda: served.append(serve_one_peer(0, TOKEN, 10, {}, said.append)))
        thread.start()
        assert ready.wait(60)
        with pytest.raises(BenchError, match=r"127.0.0.1 has another token\nGive both ends the same --token"):
            examine(ports[0], "wrong")
        report = examine(ports[0])
        thread.join()
    assert said == ["turned away 127.0.0.1, which does not know the token"]
    assert served == ["127.0.0.1"]
    sections = report.as_json()["sections"]
    assert list(sections) == ["names", "versions", "route", "secrets", "mtu", "ports", "bandwidth", "all_reduce"]
    rates = sections["bandwidth"]["facts"]["rates"]
    assert {(rate["direction"], rate["streams"]) for rate in rates} == {
        (direction, streams) for direction in (SENT, RECEIVED) for streams in (1, 4, 16)
    }
    assert all(rate["median"] > 0 for rate in rates)


def test_a_peer_that_answers_but_proves_nothing() -> None:
    def serve(listener: socket.socket) -> None:
        connection = LineConnection(listener.accept()[0], "the asking end", 10)
        connection.send({"magic": "bagua-net-doctor/1", "nonce": "1"})
        connection.receive(10)
        connection.send({"proof": "yes"})
        connection.close()

    with listening(serve) as port, pytest.raises(BenchError, match="another token"):
        examine(port)


def test_another_program_on_the_port() -> None:
    def serve(listener: socket.socket) -> None:
        with listener.accept()[0] as accepted:
            accepted.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")

    with listening(serve) as port, pytest.raises(BenchError, match="which is no message of this bench"):
        examine(port)


def test_nothing_listens_there() -> None:
    port = free_port()
    with pytest.raises(BenchError, match=rf"port {port}: Connection refused\nStart `bagua-net doctor --serve {port}`"):
        examine(port)


@pytest.mark.parametrize("name", ["no..host", "no-such-host.invalid"])
def test_a_name_that_is_unknown(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Told before what to start there."""
    assert main(["doctor", "--peer", name, "--wait", "0"]) == 1
    assert capsys.readouterr().err.startswith(f"bagua-net doctor: the name '{name}' cannot be resolved")


def test_a_peer_that_goes_away_in_the_middle() -> None:
    with (
        listening(playing(up_to_begin)) as port,
        pytest.raises(ConnectionLostError, match=r"the connection to 127\.0\.0\.1 is lost"),
    ):
        examine(port)


def test_a_network_that_drops_large_packets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examination, "_LARGE_S", 0.3)
    with listening(playing(lambda connection: up_to_begin(connection, largest=1000))) as port:
        report = examine(port)
    sections = {section.name: section for section in report.sections}
    assert not report.is_usable
    assert "small messages pass, large ones do not" in only(sections["mtu"]).text
    assert sections["bandwidth"].status is sections["all_reduce"].status is Status.SKIP


def test_a_peer_that_starts_no_drivers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its ports cannot be reached, for one reason or another."""
    monkeypatch.setattr(bandwidth, "_CONNECT_S", 0.3)

    def answer(connection: LineConnection) -> None:
        up_to_begin(connection)
        while (order := connection.receive(10)) is not None and "finish" not in order:
            if order.get("start", {}).get("role") == "server":
                address = {"event": "listening", "address": "127.0.0.1:1"}
                connection.send({"id": order["id"], "event": address})

    with listening(playing(answer)) as port:
        report = examine(port)
    sections = {section.name: section for section in report.sections}
    failed = [finding.text for finding in sections["ports"].findings if finding.status is Status.FAIL]
    assert ["Connection refused" in text or "no answer from" in text for text in failed] == [True, True]
    assert sections["bandwidth"].status is Status.SKIP


def test_what_a_peer_sends_is_made_harmless() -> None:
    facts = parse_facts(
        {
            "host": "b\x1b[2J",
            "version": "2" * 10_000,
            "cpus": "many",
            "tcp_wmem_max": 1 << 70,
            "interfaces": [{"name": 3, "addresses": "x", "mtu": True}, "eth0"] * 5000,
            "own_addresses": {"a": 1},
            "new": 1,
            "interfaces_error": "eth0 \x1b is down" + ", eth1" * 1000 + "\nBring it up.\nmore",
        }
    )
    what, remedy = facts.interfaces_error.split("\n")
    assert what.startswith("eth0 ? is down, eth1")
    assert (len(what), remedy) == (2000, "Bring it up.")
    assert facts.host == "b?[2J"
    assert len(facts.version) == 200
    assert (facts.cpus, facts.tcp_wmem_max, facts.own_addresses) == (1, 0, ())
    assert facts.interfaces == (InterfaceFacts("", ()),) * 1024
    for wrong in (None, [], {"host": "b"}, {"host": "", "version": "1"}):
        with pytest.raises(BenchError, match="did not describe its host"):
            parse_facts(wrong)


@pytest.mark.parametrize(
    "change",
    [
        {"backend": "plugin", "role": "ring", "memory_bytes": 0},
        {"memory_bytes": 1 << 40},
        {"streams": 10_000},
        {"streams": "1"},
        {"command": "rm"},
        {"listen": "--help"},
    ],
)
def test_the_serving_end_starts_nothing_else(change: dict[str, Any]) -> None:
    order = {"backend": "raw", "rank": 1, "ranks": 2, "role": "server", "streams": 1, "memory_bytes": 1 << 20}

    class NoPlace:
        def start(self, request: object) -> None:
            raise AssertionError(f"{request} was started")

    with pytest.raises(BenchError):
        serving._starter(NoPlace())({**order, **change})  # type: ignore[arg-type]


def test_orders_that_arrived_with_the_word_before_them_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def wait(*_: object) -> None:
        raise AssertionError("it waits, and an order is here")

    monkeypatch.setattr(ranks, "wait", wait)
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as theirs:
        connection = LineConnection(server.accept()[0], "the asking end", 10)
        theirs.sendall(b'{"begin": true}\n{"finish": false}\n')
        assert connection.receive(10) == {"begin": True}
        assert ranks.serve(connection, lambda _: pytest.fail("nothing was ordered")) is False
        connection.close()


# --- the command ---


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--peer", "-oProxyCommand=x"], "expected one argument"),
        (["--peer=-oProxyCommand=x"], "is not a host"),
        (["--peer", "node1:0"], "must be between 1 and 65535"),
        (["--peer", "node1", "--serve"], "not allowed with argument"),
        (["--serve", "0"], "outside 1..65535"),
        (["--serve", "--ssh"], "--ssh belongs to --peer"),
        (["--serve", "--json"], "--json belongs to the end that reports"),
        (
            ["--serve", "--wait", "0", "--token", TOKEN[1:]],
            "--token has 15 characters, and whoever guesses it can answer",
        ),
        (["--peer", "node1", "--token", "short"], "--token has 5 characters"),
        (["--token", "x"], "--token belongs to --peer HOST or --serve"),
        (["--peer", "node1", "--ssh=-oProxyCommand=x"], "is not a destination"),
    ],
)
def test_wrong_options(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main(["doctor", *words])
    except SystemExit as exit_:
        code = int(str(exit_.code))
    assert code == 2
    assert message in capsys.readouterr().err


def test_a_port_in_use(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        assert main(["doctor", "--serve", str(port), "--token", TOKEN]) == 1
    assert f"port {port} cannot be listened on (Address already in use" in capsys.readouterr().err


def test_ssh_that_fails_is_told_without_what_a_terminal_obeys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ssh = tmp_path / "ssh"
    ssh.write_text("#!/bin/sh\nprintf '\\033]0;x\\007denied\\n' >&2\nexit 255\n")
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert main(["doctor", "--peer", "127.0.0.1:1", "--ssh", "--wait", "60"]) == 1
    error = capsys.readouterr().err
    assert "on 127.0.0.1 ended with exit code 255\n  ?]0;x?denied\nCheck that `ssh` logs in" in error


def test_nobody_comes(capsys: pytest.CaptureFixture[str]) -> None:
    port = free_port()
    assert main(["doctor", "--serve", str(port), "--wait", "0"]) == 1
    errors = capsys.readouterr().err
    assert f"\n  bagua-net doctor --peer {socket.gethostname()}:{port} --token " in errors
    assert f"no peer came to port {port} within 0 s" in errors
