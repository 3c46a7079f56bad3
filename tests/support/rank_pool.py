"""Ranks that stay, and make one call after the other for the test process.

For hypothesis, which decides by the outcome of one example what the next is: the test process draws and judges, so that
the ranks cannot draw different examples, and an example costs no processes. One pool at a time, and no `run_ranks`
beside it: both talk to the server from which ranks are forked.
"""

from __future__ import annotations

import concurrent.futures
import datetime
import os
import socket
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from support.examples import is_default_run
from support.rank_server import receive_message, send_message
from support.ranks import SERVER_START_S, device_for, run_ranks

LIFE_S = 280.0 if is_default_run() else 3500.0  # of all examples of a test
START_S = SERVER_START_S  # of the processes, and of the server from which they are forked
COLLECTIVE_S = 20.0
CALL_S = 2 * COLLECTIVE_S
LOOK_S = 0.2


class RanksFailedError(BaseException):
    """Not an Exception, of which hypothesis would look for a smaller example: each would take seconds."""


class RankPool:
    """
    Processes of a job of `size` ranks, started when they are needed. A context, which ends them. A call that fails ends
    them, too, for they may be out of step; the next one starts others.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._threads = concurrent.futures.ThreadPoolExecutor(1)
        self._run: concurrent.futures.Future[list[Any]] | None = None
        self._connections: list[socket.socket] = []

    def __enter__(self) -> RankPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        self._threads.shutdown()

    def call(self, function: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """
        Calls `function(*arguments[rank])` in every rank at once. The function is of a module that ranks can import.

        Returns:
            the results by rank.

        Raises:
            RanksFailedError: a rank raised, died or did not answer in time; holds what every rank has to say.
        """
        if not self._connections:
            self._start()
        try:
            for connection, given in zip(self._connections, arguments, strict=True):
                send_message(connection, (function, given))
            return [receive_message(connection) for connection in self._connections]
        except (OSError, EOFError) as error:
            story = self.stop() or f"no answer from a rank: {error!r}"
            calls = [f"rank {rank}: {function.__name__}{given}" for rank, given in enumerate(arguments)]
            raise RanksFailedError("\n".join([*calls, story])) from None

    def play(self, make: Callable[[], Any], program: Sequence[tuple[Any, ...]]) -> str:
        """
        Args:
            make: called in every rank.
            program: names of methods of what it returns, with their arguments. Then comes `finish`.

        Returns:
            what went wrong, on which rank and at which call; nothing if nothing did.
        """
        told = self.call(_play, [(make, program)] * self.size)
        if any(told):
            self.stop()  # they may be out of step
        return "\n".join(f"rank {rank}: {one}" for rank, one in enumerate(told)) if any(told) else ""

    def _start(self) -> None:
        with tempfile.TemporaryDirectory(prefix="bagua-pool-") as folder, socket.socket(socket.AF_UNIX) as listener:
            path = str(Path(folder, "calls"))
            listener.bind(path)
            listener.listen(self.size)
            listener.settimeout(LOOK_S)
            self._run = self._threads.submit(run_ranks, self.size, serve, path, timeout=LIFE_S)
            deadline = time.monotonic() + START_S
            ranks: list[int] = []
            while len(ranks) < self.size:
                try:
                    connection, _ = listener.accept()
                except TimeoutError:
                    if self._run.done():
                        self._run.result()  # why they could not start, or a skip
                    assert time.monotonic() < deadline, f"{len(ranks)} of {self.size} ranks within {START_S:g} s"
                    continue
                connection.settimeout(CALL_S)
                self._connections.append(connection)
                ranks.append(receive_message(connection))
            self._connections = [self._connections[ranks.index(rank)] for rank in range(self.size)]

    def stop(self) -> str:
        """End the ranks; the next call starts others. Returns what the ranks have to say if one of them has failed."""
        for connection in self._connections:
            connection.close()
        self._connections = []
        run, self._run = self._run, None
        failure = run.exception(LIFE_S) if run else None
        return str(failure or "")


def _play(make: Callable[[], Any], program: Sequence[tuple[Any, ...]]) -> str:
    number = -1
    try:
        with warnings.catch_warnings():
            player = make()
            for number, (name, *arguments) in enumerate([*program, ("finish",)]):  # noqa: B007
                getattr(player, name)(*arguments)
    except Exception:
        return f"call {number}\n{traceback.format_exc()}"
    return ""


def serve(path: str) -> None:
    """In a rank: makes the calls that come, until the test process has enough."""
    import torch.distributed as dist

    import bagua.torch_api as bagua

    rank = int(os.environ["RANK"])
    device_for(rank)
    dist.init_process_group(timeout=datetime.timedelta(seconds=COLLECTIVE_S))
    bagua.init_process_group()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        send_message(connection, rank)
        while True:
            try:
                function, arguments = receive_message(connection)
            except EOFError:
                return
            send_message(connection, function(*arguments))
