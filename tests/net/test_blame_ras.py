"""What `bagua-net blame` takes from NCCL's RAS service."""

from __future__ import annotations

import os
import time

import pytest
from support.fresh_process import RunNet
from support.ras_service import OLD, ras_service, report
from support.stats_page import Comm, page_bytes, page_of_this_process

from bagua.net.blame.ras import findings

RECEIVE = 1


def test_ranks_that_have_launched_less_than_others() -> None:
    with ras_service(report({7: 42, 8: 41, 9: 42})) as address:
        assert findings({9}, address) == [
            "rank 1 (10.0.0.1, pid 8) has launched 41 AllReduce, others up to 42 (communicator 0xabc of 3 ranks)"
        ]
        assert findings({10}, address) == []
    with ras_service(report({7: 0, 8: 0, 9: 42, 10: 41})) as address:
        assert findings({9}, address) == [
            "each of ranks 0 and 1 has launched 0 AllReduce, others up to 42 (communicator 0xabc of 4 ranks)"
        ]
    with ras_service(report({7: 42, 8: 42})) as address:
        assert findings({7}, address) == []
    with ras_service(report({7: 42, -1: 41})) as address:  # a process that NCCL does not know, nor do we
        assert findings({-1}, address) == []


@pytest.mark.parametrize("dead", [False, True])
def test_ranks_that_do_not_answer(dead: bool) -> None:
    with ras_service(report({7: 42}, {8: 1}, dead=dead)) as address:
        [line] = findings({8}, address)
    state = ", which takes it for dead" if dead else ""
    assert line == f"rank 1 (10.0.0.2, pid 8) does not answer NCCL{state} (communicator 0xabc of 2 ranks)"


def test_the_address_is_that_of_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    with ras_service(report({7: 1, 8: 2})) as address:
        monkeypatch.setenv("NCCL_RAS_ADDR", address)
        assert len(findings({7})) == 1


@pytest.mark.parametrize(
    "status", ["", "{", "[]", '{"communicators": 1}', '{"communicators": [{"hash": 1}]}', "[" * 100000]
)
def test_answers_that_are_no_report(status: str) -> None:
    with ras_service(status) as address, pytest.raises(ValueError, match=r"Expecting|not a report"):
        findings({1}, address)


def test_a_service_that_is_older_is_named() -> None:
    with ras_service("", OLD) as address, pytest.raises(ValueError, match="Unknown command"):
        findings({1}, address)


def test_names_of_another_user_s_service_cannot_move_the_cursor() -> None:
    with ras_service(report({7: 1, 8: 2}).replace("AllReduce", r"\u001b[2J")) as address:
        [line] = findings({7}, address)
    assert line.isprintable()


@pytest.mark.parametrize("address", ["x", ":1", "localhost", "localhost:0", "localhost:65536", "localhost:-1"])
def test_an_address_that_is_none(address: str) -> None:
    with pytest.raises(ValueError, match=r"is not a host|names no port|has port"):
        findings({1}, address)


def test_the_command_shows_it(net: RunNet) -> None:
    posted = [int(time.monotonic() * 1000) - 3_000_000]
    comm = Comm("10.0.0.9:1 (host nowhere, process 4242)", direction=RECEIVE, posted_ms=posted)
    with page_of_this_process(page_bytes([comm], rank=5)):
        with ras_service(report({os.getpid(): 42, 4242: 41})) as address:
            shown = net("blame", "--after", 2000, "--ras", address)
        assert "\nNCCL's RAS service:\nrank 1 (10.0.0.1, pid 4242) has launched 41 AllReduce, others" in shown.stdout
        failed = net("blame", "--after", 2000, "--ras", address)
    assert failed.returncode == 1
    assert f"bagua-net blame: NCCL's RAS service: {address}: " in failed.stderr
    assert "NCCL" not in failed.stdout
