"""The process from which tests fork their ranks. It has imported torch, so that a rank starts in milliseconds.

Owned by `support.ranks`, which talks to it over a Unix socket; one thread. It collects its dead only when it is told
to, so that a pid that the test process knows stays valid until then and a signal can never hit a stranger.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import importlib
import importlib.util
import os
import pickle
import signal
import socket
import struct
import sys
import traceback
import types
import warnings
from pathlib import Path
from typing import Any, NoReturn

LENGTH = struct.Struct("!Q")
PRELOADED = (
    "torch",
    "torch.distributed",
    "torch._dynamo",
    "torch.profiler._cupti_monitor",  # by every optimizer's first step
    "torch.utils.serialization",
    "numpy",
    "numpy.typing",
    "pytest",
    "hypothesis",
    "bagua.torch_api",
    "bagua.kernels.minmax_uint8_native",
    "support.training",
    "support.algorithm_cases",
)
PR_SET_PDEATHSIG = 1
MAX_FILE_DESCRIPTORS = 64


def send_message(connection: socket.socket, message: Any) -> None:
    data = pickle.dumps(message)
    connection.sendall(LENGTH.pack(len(data)) + data)


def receive_message(connection: socket.socket) -> Any:
    """Raises EOFError if the peer has gone."""

    def receive(size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            piece = connection.recv(min(size - len(data), 1 << 20))
            if not piece:
                raise EOFError
            data += piece
        return bytes(data)

    return pickle.loads(receive(LENGTH.unpack(receive(LENGTH.size))[0]))


def die_with_parent(parent: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before we asked
        os._exit(1)


def load_module(name: str, path: str) -> Any:
    """The module as the test process knows it: pickles name it so. Test files are no packages and not on sys.path."""
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    # Unpickling imports the packages above a module as well, which pytest made up.
    package = name.rpartition(".")[0]
    while package:
        sys.modules.setdefault(package, types.ModuleType(package))
        package = package.rpartition(".")[0]
    spec.loader.exec_module(module)
    return module


def run_function(task: dict[str, Any]) -> Any:
    os.environ.clear()
    os.environ.update(task["environment"])
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("error")  # as in the test process
    # Ranks that start together make torch's cache of CUDA kernels at the same moment; one of them finds it made.
    warnings.filterwarnings("ignore", "Specified kernel cache directory could not be created")
    function: Any = load_module(task["module"], task["path"])
    for part in task["function"].split("."):
        function = getattr(function, part)
    return function(*pickle.loads(task["arguments"]))


def live_as_rank(task: dict[str, Any], connection: socket.socket) -> NoReturn:
    """Runs the function, reports, and stays: rank 0 serves the store of the others, and another task may come."""
    while True:
        output = os.open(task["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(output)
        faulthandler.enable(file=2)
        faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
        try:
            report = ("result", pickle.dumps(run_function(task)))
        except BaseException:
            report = ("failure", traceback.format_exc())
        sys.stdout.flush()
        sys.stderr.flush()
        try:
            send_message(connection, report)
            task = receive_message(connection)
        except (OSError, EOFError):
            # The test is done with us, or has given up. Not sys.exit: gloo's and torch's threads can deadlock in the
            # interpreter's finalisation.
            os._exit(0)
        gc.collect()  # models that the last function has left


def serve(control: socket.socket) -> None:
    children: list[int] = []
    while True:
        head, descriptors, _, _ = socket.recv_fds(control, LENGTH.size, MAX_FILE_DESCRIPTORS)
        if not head:
            return  # the test process has ended; what still lives dies with us
        while len(head) < LENGTH.size:
            head += control.recv(LENGTH.size - len(head))
        body = bytearray()
        while len(body) < LENGTH.unpack(head)[0]:
            body += control.recv(LENGTH.unpack(head)[0] - len(body))
        command, tasks = pickle.loads(bytes(body))
        if command == "collect":
            send_message(control, [os.waitpid(pid, 0)[1] for pid in children])
            children = []
            continue
        parent = os.getpid()
        for task, descriptor in zip(tasks, descriptors, strict=True):
            pid = os.fork()
            if pid == 0:
                die_with_parent(parent)
                control.close()
                for other in descriptors:
                    if other != descriptor:
                        os.close(other)
                live_as_rank(task, socket.socket(fileno=descriptor))
            children.append(pid)
        for descriptor in descriptors:
            os.close(descriptor)
        send_message(control, children)


def main() -> None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    for name in PRELOADED:
        try:
            importlib.import_module(name)
        except Exception:
            pass  # a rank that needs it reports why
    gc.collect()
    gc.freeze()  # a collection in a rank would copy every page that has an object of ours
    control = socket.socket(fileno=int(sys.argv[1]))
    send_message(control, "ready")
    serve(control)
    os._exit(0)


if __name__ == "__main__":
    main()
