"""The state of a job comes whole, from whoever gives it."""

from __future__ import annotations

import itertools
import socket
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from bagua.regroup import transfer
from bagua.regroup.transfer import Fetch, Offer, StateDoor, StateServer, receive_message, send_message


def _tensors(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(300, 7), (), (0,), (5000,), (33,)]
    made = [torch.randn(shape, generator=generator) for shape in shapes]
    return [*made, made[3].bfloat16()[1:], torch.arange(40)]


def _no_guests(_: dict[str, Any]) -> Any:
    raise AssertionError("nobody joins")


def _nobody_follows(_: dict[str, Any], __: socket.socket) -> None:
    raise AssertionError("nobody follows")


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[StateServer]]:
    monkeypatch.setattr(transfer, "PIECE_BYTES", 1000)
    made = [StateServer(_no_guests, _nobody_follows) for _ in range(3)]
    for one in made:
        one.offer(Offer(5, b"description", "layout", _tensors(1)))
    yield made
    for one in made:
        one.stop()


def _fetch(doors: Sequence[StateDoor], compares: bool = False, seed: int = 2) -> tuple[Fetch, bool]:
    mine = _tensors(seed)
    described = []

    def prepare(description: bytes) -> list[torch.Tensor]:
        described.append(description)
        return mine

    fetch = Fetch(5, doors, prepare, compares)
    is_whole = fetch.run(lambda _: None, 0.01)
    if is_whole:
        assert described == [b"description"]
        assert all(torch.equal(one, other) for one, other in zip(mine, _tensors(1), strict=True))
    return fetch, is_whole


def test_all_pieces_come_from_several(servers: list[StateServer]) -> None:
    fetch, is_whole = _fetch([one.door for one in servers])
    assert is_whole
    assert fetch.received == sum(one.nbytes for one in _tensors(1))
    assert fetch.problems == []


def test_only_what_differs_is_taken(servers: list[StateServer]) -> None:
    doors = [one.door for one in servers]
    fetch, is_whole = _fetch(doors, compares=True, seed=1)
    assert (is_whole, fetch.differing, fetch.received) == (True, 0, 0)
    swapped = _tensors(1)
    swapped[0][[0, 5]] = swapped[0][[5, 0]]  # the same values in other places
    for one in servers:
        one.offer(Offer(5, b"", "layout", swapped))
    mine = _tensors(1)
    fetch = Fetch(5, doors, lambda _: mine, compares=True)
    assert fetch.run(lambda _: None, 0.01)
    assert (fetch.differing, fetch.received) == (1, mine[0].nbytes)
    assert torch.equal(mine[0], swapped[0])


def test_what_is_lost_or_damaged_on_the_way_comes_from_another(
    servers: list[StateServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    original, given, taken = transfer.zlib.crc32, itertools.count(), itertools.count()

    class Damaging:
        @staticmethod
        def crc32(*arguments: Any) -> int:
            if threading.current_thread().name == "bagua-state":  # a server's
                if next(given) == 10:
                    servers[0].stop()
                return original(*arguments)
            return original(*arguments) + (next(taken) in (1, 4))

    monkeypatch.setattr(transfer, "zlib", Damaging)
    fetch, is_whole = _fetch([one.door for one in servers])
    assert is_whole
    assert any("checksum" in one for one in fetch.problems), fetch.problems


def test_nobody_is_left_that_gives_it(servers: list[StateServer]) -> None:
    for one in servers:
        one.stop()
    _, is_whole = _fetch([one.door for one in servers])
    assert not is_whole


def test_nothing_is_given_without_the_secret(servers: list[StateServer]) -> None:
    for request in ({"state": 5}, {"state": 5, "secret": "x"}, {"join": {}, "secret": ""}, {"follow": {}}):
        with socket.create_connection(("127.0.0.1", servers[0].door.port), 10) as connection:
            send_message(connection, request)
            with pytest.raises(ConnectionError):  # closed or reset
                receive_message(connection)
    with socket.create_connection(("127.0.0.1", servers[0].door.port), 10) as connection:
        connection.sendall(b"\xff" * 8)  # a message of 4 GiB
        with pytest.raises(ConnectionError):
            receive_message(connection)
