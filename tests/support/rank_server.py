"""The processes from which tests fork their ranks, and pytest-xdist its workers. They have imported torch, so that a
rank starts in milliseconds.

The first one imports when a test process connects, once for all of them, and forks a server for each. So does another,
forked from it, that has imported Lightning as well. The workers of pytest-xdist, which all need torch to collect the
tests, are forked from a third one, which has imported nothing of ours. They end with the process that has started them.

A server talks to its test process (`support.ranks`) over that connection; one thread. It collects its dead only when it
is told to, so that a pid that the test process knows stays valid until then and a signal can never hit a stranger.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import importlib
import importlib.util
import os
import pickle
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import traceback
import types
import warnings
from pathlib import Path
from typing import Any, NoReturn

LENGTH = struct.Struct("!Q")
# For the workers of pytest. Not ours, and nothing that pytest rewrites: there, warnings of an import are errors.
PRELOADED_WORKER = ("torch", "torch._dynamo", "torch.distributed.fsdp")
PRELOADED = (
    "torch",
    "torch.distributed",
    "torch._dynamo",
    "torch.profiler._cupti_monitor",  # by every optimizer's first step
    # By the first call of what torch.compile makes: seconds, in every rank.
    "torch._dynamo.convert_frame",
    "torch._functorch.aot_autograd",
    "torch._inductor.compile_fx",
    "torch.utils.serialization",
    "numpy",
    "numpy.typing",
    "pytest",
    "hypothesis",
    "bagua.torch_api",
    "bagua.kernels.minmax_uint8_native",
    "encodings.idna",  # by the first look at an address
    "sybil.evaluators.python",
    "sybil.parsers.markdown.lexers",
    "support.algorithm_cases",
    "support.rank_tests",
    "support.training",
)
# For ranks that ask for them: they make a fork half as expensive again.
PRELOADED_LIGHTNING = ("lightning.pytorch", "pytorch_lightning")
# The folder of the sockets. Not BAGUA_*, where names that Bagua does not know give warnings.
SERVER_VARIABLE = "RANK_SERVER_OF_TESTS"
SOCKETS = ("plain", "lightning")
WORKER_SOCKET = "worker"
PR_SET_PDEATHSIG = 1
MAX_FILE_DESCRIPTORS = 64
HUGE_PAGE = 2 << 20
MADV_COLLAPSE = 25


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
    # A rank has ended when its side is closed. A DataLoader's worker that is forked just before its rank is killed does
    # not notice that, and would keep it open.
    os.register_at_fork(after_in_child=connection.close)
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
            if task["stays"]:
                gc.collect()  # models that the function has left, whose threads would go on communicating meanwhile
            task = receive_message(connection)
        except (OSError, EOFError):
            # The test is done with us, or has given up. Not sys.exit: gloo's and torch's threads can deadlock in the
            # interpreter's finalisation.
            os._exit(0)


def serve(control: socket.socket) -> None:
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
            send_message(control, [os.waitpid(pid, 0)[1] for pid in tasks])
            continue
        parent = os.getpid()
        children: list[int] = []
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


class RankServerProcess:
    """
    Starts the process, which is cheap until a test process connects.

    Attributes:
        folder: of the Unix sockets on which it listens, SOCKETS and WORKER_SOCKET.
    """

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="bagua-rank-server-")
        self.folder = self._folder.name
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            # Whoever asks for CUDA while it imports must not wake the driver, which does not survive a fork.
            "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
        }
        with contextlib.ExitStack() as stack:
            names = (*SOCKETS, WORKER_SOCKET)
            listeners = [stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in names]
            for listener, name in zip(listeners, names, strict=True):
                listener.bind(str(Path(self.folder, name)))
                listener.listen(64)
            descriptors = [listener.fileno() for listener in listeners]
            self._process = subprocess.Popen(
                [sys.executable, __file__, *map(str, descriptors)],
                pass_fds=descriptors,
                stdin=subprocess.PIPE,  # which closes when we end
                env=environment,
                start_new_session=True,  # Ctrl-C is for the test process; we follow it
            )

    def close(self) -> None:
        self._process.communicate(timeout=60)
        self._folder.cleanup()


def import_all(names: tuple[str, ...]) -> None:
    for name in names:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Lightning's
                importlib.import_module(name)
        except Exception:
            pass  # a rank that needs it reports why
    gc.collect()
    gc.freeze()  # a collection in a rank would copy every page that has an object of ours
    use_huge_pages()


def use_huge_pages() -> None:
    """For what we have allocated, where Linux can. Most of what a rank costs that does little is 60,000 entries of page
    tables, which are copied when it is forked and freed when it ends; with huge pages a tenth of that is left."""
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for line in Path("/proc/self/maps").read_text().splitlines():
        place, access, _, _, inode, *name = line.split(maxsplit=5)
        if access == "rw-p" and inode == "0" and name in ([], ["[heap]"]):
            begin, end = (int(address, 16) for address in place.split("-"))
            for address in range(-(-begin // HUGE_PAGE) * HUGE_PAGE, end - HUGE_PAGE + 1, HUGE_PAGE):
                advise(address, HUGE_PAGE, MADV_COLLAPSE)


def fork() -> bool:
    """Whether this is the child, which ends with its parent."""
    parent = os.getpid()
    if os.fork() != 0:
        return False
    die_with_parent(parent)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    return True


def serve_all(listener: socket.socket) -> None:
    """A server for each that connects."""
    control, _ = listener.accept()
    if fork():
        listener.close()
        send_message(control, "ready")
        serve(control)
        os._exit(0)
    control.close()


def start_workers(listener: socket.socket) -> NoReturn:
    """Forks one for each process that is `as_worker`."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how they ended
    while True:
        connection, _ = listener.accept()
        message, descriptors, _, _ = socket.recv_fds(connection, 1 << 20, MAX_FILE_DESCRIPTORS)
        if fork():
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            listener.close()
            for number, descriptor in enumerate(descriptors):
                os.dup2(descriptor, number)
                os.close(descriptor)
            os.environ.clear()
            words, environment = pickle.loads(message)
            os.environ.update(environment)
            from support.forked_launcher import be_program

            be_program(words[words.index("-c") + 1], [], "-c")
        connection.close()
        for descriptor in descriptors:
            os.close(descriptor)


def as_worker(words: list[str]) -> None:
    """In place of the interpreter with these words: what it would run runs in a process that is forked, with our
    standard streams. Returns when that has ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for pytest's main process, which ends the others
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(Path(os.environ[SERVER_VARIABLE], WORKER_SOCKET)))
        socket.send_fds(connection, [pickle.dumps((words, dict(os.environ)))], [0, 1, 2])
        os.closerange(0, 2)  # whoever reads them waits for the last process that has them
        connection.recv(1)


def main() -> None:
    plain, lightning, worker = (socket.socket(fileno=int(number)) for number in sys.argv[1:])
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    watched = [sys.stdin, plain, lightning, worker]
    has_imported = False
    while True:
        ready, _, _ = select.select(watched, [], [])
        if sys.stdin in ready:
            os._exit(0)  # and all others with us
        if worker in ready:
            import_all(PRELOADED_WORKER)
            if fork():
                plain.close()
                lightning.close()
                start_workers(worker)
            watched.remove(worker)
            worker.close()
            continue
        if not has_imported:
            import_all(PRELOADED)
            has_imported = True
        if lightning in ready:
            if fork():
                plain.close()
                import_all(PRELOADED_LIGHTNING)
                while True:
                    serve_all(lightning)
            watched.remove(lightning)
            lightning.close()
        if plain in ready:
            serve_all(plain)


if __name__ == "__main__":
    if "-c" in sys.argv:
        as_worker(sys.argv[1:])
    else:
        main()
