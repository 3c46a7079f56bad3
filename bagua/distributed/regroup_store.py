"""The store of a job that goes on without ranks that it loses. It has to outlive each rank, so that none of them serves
it: the agent of the first node does, or `python -m bagua.distributed.run --regroup --store-only`.
"""

from __future__ import annotations

import datetime
import signal
import socket
import time
from collections.abc import Callable

from bagua.command_exit import CommandError
from bagua.job.torch_internals import TCPStore

CLIENT_TIMEOUT = datetime.timedelta(seconds=30)  # of a request
TELL_S = 30.0
_PROBE_S = 1.0
_PAUSE_S = 0.1


def serve(port: int) -> TCPStore:
    """
    Raises:
        CommandError: the port cannot be served.
    """
    try:
        return TCPStore("localhost", port, None, True, CLIENT_TIMEOUT, wait_for_workers=False)
    except RuntimeError as error:
        raise CommandError(
            f"port {port} cannot be served: {str(error).splitlines()[0]}\n"
            "End what uses it (ss -ltnp shows it; a job that is still running?), or choose another port, the same on"
            " all nodes: --master-port"
        ) from None


def serve_until_ended(port: int) -> int:
    """Until SIGTERM or SIGINT.

    Raises:
        CommandError: the port cannot be served.
    """
    # A rank that ends it by Ctrl-C in the same terminal is no error.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    store = serve(port)
    print(f"The store of the job listens at port {store.port} of {socket.gethostname()}.", flush=True)
    signal.sigwait({signal.SIGTERM, signal.SIGINT})
    return 0


def serve_or_reach(
    host: str, port: int, node_rank: int | None, timeout_s: float, say: Callable[[str], None]
) -> tuple[TCPStore, bool]:
    """
    The job's store. Node 0 serves it, unless somebody does already: `--store-only`, or another agent of this host.
    Where nodes have no numbers, the host does that `host` names.

    Returns:
        the store, and whether this process serves it.

    Raises:
        CommandError: nobody serves it within the timeout, or the port cannot be served.
    """
    if node_rank == 0 or (node_rank is None and _is_own_address(host)):
        if _answers(host, port):
            return _connected(host, port), False
        try:
            return serve(port), True
        except CommandError:
            # Another agent of this host has been faster.
            if not _answers(host, port):
                raise
    begin = time.monotonic()
    is_told = False
    while not _answers(host, port):
        waited = time.monotonic() - begin
        if waited >= timeout_s:
            raise CommandError(
                f"nobody serves the job's store at {host}:{port} within {timeout_s:g} s.\n"
                "Check that node 0 runs this command with the same address and port, and that a firewall lets the port"
                " through. To wait longer: --rdzv-conf join_timeout=SECONDS"
            )
        if not is_told and waited >= TELL_S:
            is_told = True
            say(f"waiting for node 0, which is to serve the job's store at {host}:{port}, for {timeout_s:g} s in all")
        time.sleep(_PAUSE_S)
    return _connected(host, port), False


def _connected(host: str, port: int) -> TCPStore:
    try:
        return TCPStore(host, port, None, False, CLIENT_TIMEOUT, wait_for_workers=False)
    except RuntimeError as error:
        raise CommandError(
            f"what listens at {host}:{port} is no store: {str(error).splitlines()[0]}\nChoose another --master-port."
        ) from None


def _answers(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), _PROBE_S).close()
    except OSError:
        return False
    return True


def _is_own_address(host: str) -> bool:
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError:
        return False
    for family, kind, protocol, _, address in found:
        with socket.socket(family, kind, protocol) as probe:
            try:
                probe.bind(address)
            except OSError:
                continue
            return True
    return False
