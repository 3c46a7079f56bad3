"""Runs one function in several processes, one per rank, as a launcher would start them.

    def sum_of_ranks(factor: int) -> float:
        bagua.init_process_group()
        ...

    results = run_ranks(3, sum_of_ranks, 10)

The ranks are forked from a server (support.rank_server), which has imported torch.
"""

from __future__ import annotations

import atexit
import functools
import os
import pickle
import select
import selectors
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.ports import free_port
from support.processes import wait_until
from support.rank_server import LENGTH, SERVER_VARIABLE, SOCKETS, RankServerProcess, receive_message, send_message

from bagua.net.bench.gpu_sharing import sharing_of

DEVICE_VARIABLE = "BAGUA_TEST_DEVICE"
SHARING_VARIABLE = "BAGUA_TEST_SHARE_GPUS"  # 1: several ranks on a GPU where there are too few
# torch looks up the name of every peer's address; where no name server answers, that takes seconds.
RESOLVER = "timeout:1 attempts:1"
SERVER_START_S = 240  # importing torch takes minutes on a machine where everything else is being built
GRACE_S = 1.0  # after one rank failed: the others notice lost connections by themselves, and say more than a stack
DUMP_S = 3.0
# Of a launcher that the test process itself may run under. What a rank sees is only what the test says.
LAUNCHER_VARIABLES = (
    *("GROUP_RANK", "NODE_RANK", "ROLE_RANK", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE"),
    "PYTEST_CURRENT_TEST",
    SERVER_VARIABLE,
)

Environment = Mapping[str, str]


def device_for(rank: int) -> Any:
    """The torch.device of this rank, made current: the CPU, or with BAGUA_TEST_DEVICE=cuda a GPU of its own, or one
    that ranks share."""
    import torch

    if os.environ.get(DEVICE_VARIABLE, "cpu") == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def run_ranks(
    world_size: int,
    function: Callable[..., Any],
    *arguments: Any,
    timeout: float = 120,
    env: Environment | Sequence[Environment] | None = None,
    expect_death: Collection[int] = (),
    reuse: bool = False,
    lightning: bool = False,
) -> list[Any]:
    """
    Calls `function(*arguments)` in `world_size` processes at once.

    Args:
        function: of the top level of a test file; arguments and results are pickled.
        timeout: seconds for all of it.
        env: added to the environment of every rank, or one mapping per rank.
        expect_death: ranks that may end without a result; theirs is None then. An exception is a failure even there.
        reuse: in the ranks that an earlier call with `reuse` has left, if it was as many in the same environment, and
            one of the last. The function begins with `support.training.begin`, and leaves no setting, group or
            algorithm changed.
        lightning: in ranks that have imported Lightning.

    Returns:
        the results by rank.

    Raises:
        AssertionError: a rank raised, died or was not done in time; holds what every rank has to say.
    """
    sharing = None
    if os.environ.get(DEVICE_VARIABLE, "cpu") != "cpu":
        gpus = len(visible_gpus())
        if gpus < world_size and os.environ.get(SHARING_VARIABLE) != "1":
            pytest.skip(f"needs {world_size} GPUs, one per rank; here are {gpus}")
        sharing = sharing_of(world_size, gpus)
    environments = [dict(env or {})] * world_size if env is None or isinstance(env, Mapping) else list(env)
    if len(environments) != world_size:
        raise ValueError(f"env has {len(environments)} mappings for {world_size} ranks")
    module = sys.modules[function.__module__]
    if "<" in function.__qualname__ or not module.__file__:
        raise ValueError(f"{function.__qualname__} must be a function of the top level of a file")

    inherited = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
    for rank, extra in enumerate(environments):
        environments[rank] = {
            "OMP_NUM_THREADS": "1",
            **inherited,
            "RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "RES_OPTIONS": RESOLVER,
            **({} if sharing is None else {"NCCL_SOCKET_IFNAME": "lo", **sharing.environment(rank)}),
            **extra,
        }
    with tempfile.TemporaryDirectory(prefix="bagua-ranks-") as folder:
        tasks = [
            {
                "environment": environment,
                "module": function.__module__,
                "path": module.__file__,
                "function": function.__qualname__,
                "arguments": pickle.dumps(arguments),
                "output": str(Path(folder, f"{rank}.out")),
                "stays": reuse,
            }
            for rank, environment in enumerate(environments)
        ]
        kept = _take_kept((environments, lightning)) if reuse else None
        if os.environ.get(DEVICE_VARIABLE, "cpu") != "cpu":
            _end_kept(0)  # they hold memory of the GPUs
        run = kept or _Run(_server(SOCKETS[lightning]), tasks)
        try:
            if kept:
                kept.begin_again(tasks)
            run.wait(timeout, set(expect_death))
            results = run.results(timeout, set(expect_death))
        except BaseException:
            run.end()
            raise
        if reuse:
            _keep(run, (environments, lightning))
        else:
            run.end()
        return results


def visible_gpus() -> list[str]:
    """As CUDA_VISIBLE_DEVICES names them. Without CUDA, which a process that forks must not start."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [name for name in chosen.split(",") if name]
    return [str(number) for number, _ in enumerate(Path("/dev").glob("nvidia[0-9]*"))]


@dataclass
class _Rank:
    pid: int
    connection: socket.socket
    output: Path
    buffer: bytearray
    report: tuple[str, Any] | None = None  # ("result", pickle) or ("failure", traceback)
    ended: bool = False  # it closed the connection
    stacks: str = ""

    def read(self) -> None:
        piece = self.connection.recv(1 << 20)
        if not piece:
            self.ended = True
            return
        self.buffer += piece
        if len(self.buffer) >= LENGTH.size and len(self.buffer) - LENGTH.size >= LENGTH.unpack_from(self.buffer)[0]:
            self.report = pickle.loads(bytes(self.buffer[LENGTH.size :]))

    @property
    def is_settled(self) -> bool:
        return self.ended or self.report is not None

    def failed(self, may_die: bool) -> bool:
        if self.report is not None:
            return self.report[0] == "failure"
        return self.ended and not may_die


class _Run:
    """The processes of one call, or with `reuse` of several, until `end`."""

    def __init__(self, server: _Server, tasks: list[dict[str, Any]]) -> None:
        self.server = server
        self.port = str(free_port())
        for task in tasks:
            task["environment"] = {"MASTER_PORT": self.port, **task["environment"]}
        pairs = [socket.socketpair() for _ in tasks]
        try:
            pids = server.start(tasks, [theirs.fileno() for _, theirs in pairs])
        finally:
            for _, theirs in pairs:
                theirs.close()
        self.ranks = [
            _Rank(pid, ours, Path(task["output"]), bytearray())
            for pid, (ours, _), task in zip(pids, pairs, tasks, strict=True)
        ]

    def begin_again(self, tasks: list[dict[str, Any]]) -> None:
        for rank, task in zip(self.ranks, tasks, strict=True):
            rank.output, rank.buffer, rank.report, rank.stacks = Path(task["output"]), bytearray(), None, ""
            send_message(rank.connection, {**task, "environment": {"MASTER_PORT": self.port, **task["environment"]}})

    def end(self) -> None:
        for rank in self.ranks:
            rank.connection.close()  # those that have reported leave
            if rank.report is None and not rank.ended:
                os.kill(rank.pid, signal.SIGKILL)
        self.server.collect([rank.pid for rank in self.ranks])

    def wait(self, timeout: float, may_die: set[int]) -> None:
        """Until every rank has reported or died, or time is up. After a failure the others get a short while."""
        deadline = time.monotonic() + timeout
        failed = False
        with selectors.DefaultSelector() as selector:
            for rank in self.ranks:
                selector.register(rank.connection, selectors.EVENT_READ, rank)
            while not all(rank.is_settled for rank in self.ranks):
                for key, _ in selector.select(max(0.0, deadline - time.monotonic())):
                    key.data.read()
                    if key.data.is_settled:
                        selector.unregister(key.fileobj)
                if not failed and any(rank.failed(number in may_die) for number, rank in enumerate(self.ranks)):
                    failed = True
                    deadline = min(deadline, time.monotonic() + GRACE_S)
                if time.monotonic() >= deadline:
                    break
        for rank in self.ranks:
            if not rank.is_settled:
                self._dump_stacks(rank)

    def _dump_stacks(self, rank: _Rank) -> None:
        size = rank.output.stat().st_size if rank.output.exists() else 0
        os.kill(rank.pid, signal.SIGUSR1)

        def is_written() -> bool:
            text = rank.output.read_bytes()[size:] if rank.output.exists() else b""
            changed = text != rank.stacks.encode(errors="replace")
            rank.stacks = text.decode(errors="replace")
            return b"most recent call first" in text and not changed

        try:
            wait_until(is_written, "stacks of a rank", DUMP_S)
        except AssertionError:
            rank.stacks += "\n(no stack within the time: the process is stopped or in uninterruptible sleep)"

    def results(self, timeout: float, may_die: set[int]) -> list[Any]:
        if any(not rank.is_settled or rank.failed(number in may_die) for number, rank in enumerate(self.ranks)):
            raise AssertionError(
                "\n".join(
                    self._story(number, rank, timeout, number in may_die) for number, rank in enumerate(self.ranks)
                )
            )
        return [pickle.loads(rank.report[1]) if rank.report else None for rank in self.ranks]

    def _story(self, number: int, rank: _Rank, timeout: float, may_die: bool) -> str:
        output = rank.output.read_text(errors="replace").strip() if rank.output.exists() else ""
        if rank.report is not None:
            how = "returned" if rank.report[0] == "result" else f"raised\n{rank.report[1]}"
        elif rank.ended:
            how = "died, as it may" if may_die else "died without a result"
        else:
            how = f"was stopped: another rank failed, or it was not done within {timeout:g} s\n{rank.stacks.strip()}"
            output = output.replace(rank.stacks.strip(), "").strip()
        return f"--- rank {number} {how}" + (f"\n    output:\n{output}" if output else "")


class _Server:
    def __init__(self, path: str) -> None:
        self.control = socket.socket(socket.AF_UNIX)
        self.control.settimeout(SERVER_START_S)
        self.control.connect(path)
        receive_message(self.control)

    def start(self, tasks: list[dict[str, Any]], descriptors: list[int]) -> list[int]:
        message = pickle.dumps(("start", tasks))
        socket.send_fds(self.control, [LENGTH.pack(len(message))], descriptors)
        self.control.sendall(message)
        pids: list[int] = receive_message(self.control)
        return pids

    def collect(self, pids: list[int]) -> None:
        send_message(self.control, ("collect", pids))
        receive_message(self.control)

    @property
    def is_alive(self) -> bool:
        """Between calls it sends nothing: what can be read is the end."""
        return not select.select([self.control], [], [], 0)[0]


_servers: dict[str, _Server] = {}


@functools.cache
def _own_process() -> RankServerProcess:
    """Of a test process that was not given one by pytest's main process (tests/conftest.py)."""
    process = RankServerProcess()
    atexit.register(process.close)
    return process


def _server(name: str) -> _Server:
    if name not in _servers or not _servers[name].is_alive:
        folder = os.environ.get(SERVER_VARIABLE) or _own_process().folder
        _servers[name] = _Server(str(Path(folder, name)))
    return _servers[name]


_Kind = tuple[list[dict[str, str]], bool]  # environments, and whether they have imported Lightning

# Ranks that wait for another call, those that were used last at the end. Tests of a file ask for some kinds by turns.
_kept: list[tuple[_Run, _Kind]] = []
MAX_KEPT = 3


def _keep(run: _Run, kind: _Kind) -> None:
    _kept.append((run, kind))
    _end_kept(MAX_KEPT)


def _take_kept(kind: _Kind) -> _Run | None:
    """The ranks that were kept if there are some of this kind."""
    _kept[:] = [kept for kept in _kept if kept[0].server.is_alive]
    for kept in _kept:
        if kept[1] == kind:
            _kept.remove(kept)
            return kept[0]
    return None


def _end_kept(but: int) -> None:
    """Ends all but the last of them."""
    while len(_kept) > but:
        _kept.pop(0)[0].end()
