"""One rank's process: it joins the group and then does what it is asked, in its main thread.

Speaks the driver's protocol (see bagua.net.bench.endpoint): a JSON object a line, from the parent and to it.

    <- {"event": "store", "port": 40123}                rank 0 only: the port of the group's TCPStore
    -> {"op": "join", "host": "127.0.0.1", "port": 40123, ...}
    <- {"event": "ready", "torch": "2.13.0", "nccl": null, "device": "cpu", "threads": 1, ...}
    -> {"op": NAME, ...}                                NAME and all further fields are the tool's
    <- {"event": NAME, ...}
    -> {"op": "quit"}
    <- {"event": "bye"}
    <- {"event": "error", "message": "..."}             instead of any reply; the process then exits with 1
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import faulthandler
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import IO, Any

import torch
import torch.distributed as dist

_PR_SET_PDEATHSIG = 1

Operation = Callable[[torch.device, Mapping[str, Any]], Mapping[str, Any]]
"""Called with this rank's device and the command's fields; what it returns are the fields of the reply."""
Formed = Callable[[Mapping[str, Any]], Mapping[str, Any]]
"""Called with the fields of `join` when torch's default group exists; what it returns are further fields of `ready`."""


def join_bagua(_: Mapping[str, Any]) -> Mapping[str, Any]:
    """For ranks that train with Bagua, alike in each run."""
    import bagua.torch_api as bagua  # not above: another tool measures torch in processes that Bagua has not touched

    torch.backends.cudnn.deterministic = True
    bagua.init_process_group()
    return {}


class _RankProcess:
    def __init__(
        self,
        arguments: argparse.Namespace,
        operations: Mapping[str, Operation],
        formed: Formed,
        commands: IO[str],
        replies: IO[str],
    ) -> None:
        self._arguments = arguments
        self._operations = operations
        self._formed = formed
        self._commands = commands
        self._replies = replies
        self._local_rank = 0 if arguments.alone_on_node else arguments.rank
        is_cuda = arguments.device == "cuda"
        # Of GPUs there may be fewer than ranks, which then share them.
        number = self._local_rank % torch.cuda.device_count() if is_cuda else 0
        self._device = torch.device("cuda", number) if is_cuda else torch.device("cpu")

    def serve(self) -> int:
        try:
            self._join()
            for line in self._commands:
                command = json.loads(line) if line.startswith("{") else {"op": line.strip()}
                name = command.pop("op")
                if name == "quit":
                    dist.destroy_process_group()
                    self._reply("bye")
                    return 0
                if name not in self._operations:
                    raise ValueError(f"unknown operation {name!r}; there are {', '.join(self._operations)}")
                self._reply(name, **self._operations[name](self._device, command))
        except Exception as error:  # the boundary of the process: the parent has to be told, whatever it was
            traceback.print_exc()
            self._reply("error", message=f"{type(error).__name__}: {error}")
            return 1
        return 0

    def _reply(self, event: str, **fields: object) -> None:
        self._replies.write(json.dumps({"event": event, **fields}) + "\n")
        self._replies.flush()

    def _join(self) -> None:
        arguments = self._arguments
        rank, ranks = arguments.rank, arguments.ranks
        timeout = datetime.timedelta(seconds=arguments.timeout_s)
        store = None
        if rank == 0:
            # Port 0 lets the kernel choose: no other program can take the port in between.
            store = dist.TCPStore("127.0.0.1", 0, ranks, True, timeout=timeout, wait_for_workers=False)
            self._reply("store", port=store.port)
        line = self._commands.readline()
        if not line.startswith("{"):
            raise RuntimeError("the parent ended the run before the group was formed")
        join = json.loads(line)
        if store is None:
            store = dist.TCPStore(join["host"], join["port"], ranks, False, timeout=timeout)
        self._set_launch_environment(join["host"], join["port"])
        is_cuda = self._device.type == "cuda"
        if is_cuda:
            torch.cuda.set_device(self._device)
        # Ranks share the host's cores; each with a pool for all of them would only get in each other's way.
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // ranks))
        # Two trainings may not differ in what the search for the fastest kernel happened to find.
        torch.backends.cudnn.benchmark = False
        backend = "cpu:gloo,cuda:nccl" if is_cuda else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=timeout)
        # Opens the connections, which is done by the first collective.
        dist.all_reduce(torch.zeros(1, device=self._device))
        self._reply(
            "ready",
            torch=torch.__version__,
            python=sys.version.split()[0],
            nccl=".".join(map(str, torch.cuda.nccl.version())) if is_cuda else None,
            device=torch.cuda.get_device_name(self._device) if is_cuda else "cpu",
            threads=torch.get_num_threads(),
            **self._formed(join),
        )

    def _set_launch_environment(self, host: str, port: int) -> None:
        """What a launcher sets and Bagua reads."""
        rank, ranks, alone = self._arguments.rank, self._arguments.ranks, self._arguments.alone_on_node
        os.environ.update(MASTER_ADDR=host, MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(ranks))
        os.environ.update(LOCAL_RANK=str(self._local_rank), LOCAL_WORLD_SIZE=str(1 if alone else ranks))
        os.environ.update(GROUP_RANK=str(rank if alone else 0))


def _die_with_parent(parent_pid: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # The parent may have died before the call above.
    if os.getppid() != parent_pid:
        os._exit(1)


def run_rank(operations: Mapping[str, Operation], formed: Formed = join_bagua) -> None:
    """The whole of a rank's program; does not return."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--device", choices=("cuda", "cpu"), required=True)
    parser.add_argument("--alone-on-node", action="store_true")  # each rank is a node
    parser.add_argument("--timeout-s", type=float, required=True)
    parser.add_argument("--parent-pid", type=int, required=True)
    arguments = parser.parse_args()
    _die_with_parent(arguments.parent_pid)
    faulthandler.enable()  # a crash in compiled code says where; the parent shows the end of it
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    # Whatever a library prints must not be taken for a reply.
    os.dup2(2, 1)
    code = _RankProcess(arguments, operations, formed, sys.stdin, replies).serve()
    replies.flush()
    sys.stderr.flush()
    # Not sys.exit: after an error the other ranks are gone, and NCCL's destructors would wait for them; and gloo's can
    # wait for a thread that waits for Python's lock.
    os._exit(code)
