"""The plugin's C functions, called from Python as NCCL's proxy thread calls them: table v8, host memory, one message at
a time. For measurements of traffic; what it costs NCCL to call them is another matter."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_ulong, c_void_p
from pathlib import Path

_HANDLE_BYTES = 128
_HOST_MEMORY = 1  # NCCL_PTR_HOST
_SLOTS = 19
_LOGGER = ctypes.CFUNCTYPE(None, c_int, c_ulong, c_char_p, c_int, c_char_p)  # and more, which we do not read
# By position in the table; each returns an ncclResult_t.
_SIGNATURES: dict[str, tuple[int, Sequence[object]]] = {
    "init": (1, [_LOGGER]),
    "devices": (2, [POINTER(c_int)]),
    "listen": (4, [c_int, c_void_p, POINTER(c_void_p)]),
    "connect": (5, [c_int, c_void_p, POINTER(c_void_p), c_void_p]),
    "accept": (6, [c_void_p, POINTER(c_void_p), c_void_p]),
    "regMr": (7, [c_void_p, c_void_p, c_size_t, c_int, POINTER(c_void_p)]),
    "isend": (10, [c_void_p, c_void_p, c_int, c_int, c_void_p, POINTER(c_void_p)]),
    "irecv": (11, [c_void_p, c_int, *[POINTER(c_void_p), POINTER(c_int), POINTER(c_int)], *[POINTER(c_void_p)] * 2]),
    "test": (13, [c_void_p, POINTER(c_int), POINTER(c_int)]),
}


class PluginError(RuntimeError):
    """A function of the plugin failed."""


class _Table(ctypes.Structure):
    _fields_ = [("slots", c_void_p * _SLOTS)]


class Plugin:
    """
    Args:
        library: libnccl-net.so.

    Raises:
        OSError: it cannot be opened.
        PluginError: it finds no network.
    """

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        table = _Table.in_dll(self._library, "ncclNetPlugin_v8")
        self._functions = {
            name: ctypes.CFUNCTYPE(c_int, *types)(table.slots[slot])  # type: ignore[arg-type]
            for name, (slot, types) in _SIGNATURES.items()
        }
        self._silent = _LOGGER(lambda *_: None)
        self._call("init", self._silent)
        devices = c_int()
        self._call("devices", byref(devices))
        if devices.value < 1:
            raise PluginError("the plugin sees no network interface; look at NCCL_SOCKET_IFNAME")

    def _call(self, name: str, *arguments: object) -> None:
        if (result := self._functions[name](*arguments)) != 0:
            raise PluginError(f"{name} returned {result}, an ncclResult_t; bagua-net doctor looks for the cause")

    def listen(self) -> tuple[bytes, c_void_p]:
        """A handle for the peer, and what is to be accepted."""
        handle, listening = ctypes.create_string_buffer(_HANDLE_BYTES), c_void_p()
        self._call("listen", 0, handle, byref(listening))
        return handle.raw, listening

    def connect(self, handle: ctypes.Array[ctypes.c_char]) -> c_void_p | None:
        """None: call again, with the same buffer."""
        comm = c_void_p()
        self._call("connect", 0, handle, byref(comm), None)
        return comm if comm.value else None

    def accept(self, listening: c_void_p) -> c_void_p | None:
        """None: call again."""
        comm = c_void_p()
        self._call("accept", listening, byref(comm), None)
        return comm if comm.value else None

    def register(self, comm: c_void_p, memory: ctypes.Array[ctypes.c_char]) -> c_void_p:
        registered = c_void_p()
        self._call("regMr", comm, memory, len(memory), _HOST_MEMORY, byref(registered))
        return registered

    def send(self, comm: c_void_p, address: int, size: int, memory: c_void_p) -> c_void_p | None:
        """A request; None: later."""
        request = c_void_p()
        self._call("isend", comm, address, size, 0, memory, byref(request))
        return request if request.value else None

    def receive(self, comm: c_void_p, address: int, size: int, memory: c_void_p) -> c_void_p | None:
        """A request for a message of up to `size` bytes; None: later."""
        request, tag = c_void_p(), c_int(0)
        data, registered = c_void_p(address), c_void_p(memory.value)
        self._call("irecv", comm, 1, byref(data), byref(c_int(size)), byref(tag), byref(registered), byref(request))
        return request if request.value else None

    def size_if_done(self, request: c_void_p) -> int | None:
        """Bytes of the message that is over; the request is dead then."""
        done, size = c_int(), c_int()
        self._call("test", request, byref(done), byref(size))
        return size.value if done.value else None
