"""One rank's process: it joins the group and then does what it is asked, in its main thread.

Speaks the driver's protocol (see bagua.net.bench.processes): a JSON object a line, from the parent and to it. Anything
that a library prints goes to stderr. It never outlives its parent. torch is imported when it joins, so that one that is
missing is an error event like any other.

    <- {"event": "store", "port": 40123}                rank 0 only: the port of the group's TCPStore
    -> {"op": "join", "host": "127.0.0.1", "port": 40123, ...}
    <- {"event": "ready", "torch": "2.13.0", "nccl": null, "device": "cpu", "threads": 1, "pid": 4711, ...}
    -> {"op": NAME, ...}                                NAME and all further fields are the program's
    <- {"event": NAME, ...}
    -> {"op": "quit"}
    <- {"event": "bye"}
    <- {"event": "error", "message": "..."}             instead of any reply; the process then exits with 1
"""

from __future__ import annotations

import argparse
import datetime
import faulthandler
import importlib
import json
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bagua.command_exit import die_with_parent
from bagua.net.bench.nccl_log import read_proof_file

Operation = Callable[[Any, Mapping[str, Any]], Mapping[str, Any]]
"""Called with this rank's torch.device and the command's fields; what it returns are the fields of the reply."""
Formed = Callable[[Any, Mapping[str, Any]], Mapping[str, Any]]
"""Called with the device and the fields of `join` when torch's default group exists; what it returns are further fields
of `ready`."""
Joining = Callable[[argparse.Namespace, Mapping[str, Any]], None]
"""Called with the command line and the fields of `join` before the group is formed."""


def _serve(
    arguments: argparse.Namespace,
    operations: Mapping[str, Operation],
    formed: Formed,
    joining: Joining,
    reply: Callable[..., None],
) -> int:
    """The exit code."""
    try:
        device = _join(arguments, formed, joining, reply)
        for line in sys.stdin:
            if not line.startswith("{"):  # how an endpoint is closed that was not asked to leave in order
                return 0
            command = json.loads(line)
            name = command.pop("op")
            if name == "quit":
                importlib.import_module("torch.distributed").destroy_process_group()
                reply("bye")
                return 0
            if name not in operations:
                raise ValueError(f"unknown operation {name!r}; there are {', '.join(operations)}")
            reply(name, **operations[name](device, command))
    except Exception as error:  # the boundary of the process: the parent has to be told, whatever it was
        traceback.print_exc()
        # NCCL's own warnings say more than torch's exception does.
        warnings = read_proof_file(Path(os.environ.get("NCCL_DEBUG_FILE", ""))).warnings
        reply("error", message="; NCCL warned: ".join([f"{type(error).__name__}: {error}", *warnings]))
        return 1
    return 0


def _join(arguments: argparse.Namespace, formed: Formed, joining: Joining, reply: Callable[..., None]) -> Any:
    """This rank's device, when it is in the group."""
    torch: Any = importlib.import_module("torch")
    dist: Any = importlib.import_module("torch.distributed")
    rank, ranks, is_cuda = arguments.rank, arguments.ranks, arguments.device == "cuda"
    timeout = datetime.timedelta(seconds=arguments.timeout_s)
    store = None
    if rank == 0:
        # Port 0 lets the kernel choose: no other program can take the port in between.
        store = dist.TCPStore(arguments.bind, 0, ranks, True, timeout=timeout, wait_for_workers=False)
        reply("store", port=store.port)
    line = sys.stdin.readline()
    if not line.startswith("{"):
        raise RuntimeError("the parent ended the run before the group was formed")
    join = json.loads(line)
    if store is None:
        store = dist.TCPStore(join["host"], join["port"], ranks, False, timeout=timeout)
    # A launcher may show each process its own GPU only, and ranks may share GPUs.
    number = arguments.local_rank % torch.cuda.device_count() if is_cuda else 0
    device = torch.device("cuda", number) if is_cuda else torch.device("cpu")
    if is_cuda:
        torch.cuda.set_device(device)
    # Ranks share the host's cores; each with a pool for all of them would only get in each other's way.
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // ranks))
    joining(arguments, join)
    # With a device, NCCL's communicator is made here, and not at the first collective.
    options = {"device_id": device} if arguments.backend == "nccl" else {}
    dist.init_process_group(arguments.backend, store=store, rank=rank, world_size=ranks, timeout=timeout, **options)
    reply(
        "ready",
        **formed(device, join),
        torch=torch.__version__,
        python=sys.version.split()[0],
        nccl=".".join(map(str, torch.cuda.nccl.version())) if is_cuda else None,
        device=torch.cuda.get_device_name(device) if is_cuda else "cpu",
        threads=torch.get_num_threads(),
        pid=os.getpid(),
    )
    return device


def rank_command(
    module: str, rank: int, ranks: int, *, local_rank: int, device: str, backend: str, timeout_s: float, bind: str
) -> list[str]:
    """What starts `python -m MODULE`, whose program is `run_rank`, as a child of this process."""
    return [
        *(sys.executable, "-m", module, f"--rank={rank}", f"--ranks={ranks}", f"--local-rank={local_rank}"),
        *(f"--device={device}", f"--backend={backend}", f"--timeout-s={timeout_s}", f"--bind={bind}"),
        f"--parent-pid={os.getpid()}",
    ]


def run_rank(
    operations: Mapping[str, Operation], formed: Formed, joining: Joining = lambda _arguments, _join: None
) -> None:
    """The whole of a rank's program; does not return."""
    parser = argparse.ArgumentParser()
    for name in ("--rank", "--ranks", "--local-rank", "--parent-pid"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--device", choices=("cuda", "cpu"), required=True)
    parser.add_argument("--backend", required=True)
    parser.add_argument("--timeout-s", type=float, required=True)
    parser.add_argument("--bind", required=True)
    arguments = parser.parse_args()
    die_with_parent(arguments.parent_pid)
    faulthandler.enable()  # a crash in compiled code says where; the parent shows the end of it
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    # Whatever a library prints must not be taken for a reply.
    os.dup2(2, 1)

    def reply(event: str, **fields: object) -> None:
        print(json.dumps({"event": event, **fields}), file=replies, flush=True)

    code = _serve(arguments, operations, formed, joining, reply)
    sys.stderr.flush()
    # Not sys.exit: after an error the other ranks are gone, and NCCL's destructors would wait for them; and gloo's can
    # wait for a thread that waits for Python's lock.
    os._exit(code)
