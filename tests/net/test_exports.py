"""What the built library shows to the process that opens it, NCCL's tables, and what it takes from it, libc.

A C++ symbol of ours, or of the static libstdc++, would clash with torch's; a further library would have to be installed
on every machine. Read from the ELF file itself, so that no binutils are needed.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from pathlib import Path

import pytest

NETWORKS = {f"ncclNetPlugin_v{version}" for version in range(5, 13)}
PROFILERS = {f"ncclProfiler_v{version}" for version in range(4, 8)}
TUNERS = {f"ncclTunerPlugin_v{version}" for version in range(2, 7)}
# glibc in its parts; libpthread and libdl are separate files before glibc 2.34.
LIBC_FAMILY = ("libc.so.6", "libm.so.6", "libpthread.so.0", "libdl.so.2", "ld-linux-x86-64.so.2")

SHT_DYNAMIC, SHT_DYNSYM = 6, 11
DT_NEEDED, DT_TEXTREL, DT_RPATH, DT_RUNPATH, DT_FLAGS_1 = 1, 22, 15, 29, 0x6FFFFFFB
DF_1_NOW, DF_1_NODELETE = 0x1, 0x8
STT_OBJECT, STB_WEAK = 1, 2


@dataclass(frozen=True)
class Symbol:
    name: str
    kind: int
    defined: bool
    weak: bool


class SharedObject:
    """The dynamic section and the dynamic symbols of a 64-bit little-endian ELF file."""

    def __init__(self, path: Path) -> None:
        self._bytes = path.read_bytes()
        assert self._bytes[:6] == b"\x7fELF\x02\x01", f"{path} is not a 64-bit little-endian ELF file"
        (offset,) = struct.unpack_from("<Q", self._bytes, 40)
        size, count = struct.unpack_from("<HH", self._bytes, 58)
        # name, type, flags, address, offset, size, link, info, alignment, entry size
        self._sections = [struct.unpack_from("<IIQQQQIIQQ", self._bytes, offset + i * size) for i in range(count)]

    def _of_type(self, section_type: int) -> tuple[int, int, int]:
        (found,) = (section for section in self._sections if section[1] == section_type)
        return found[4], found[5], self._sections[found[6]][4]

    def _text(self, at: int) -> str:
        return self._bytes[at : self._bytes.index(b"\0", at)].decode()

    def symbols(self) -> list[Symbol]:
        begin, size, names = self._of_type(SHT_DYNSYM)
        entries = struct.iter_unpack("<IBBHQQ", self._bytes[begin : begin + size])
        return [
            Symbol(self._text(names + name), info & 0xF, section != 0, info >> 4 == STB_WEAK)
            for name, info, _other, section, _value, _size in entries
            if name != 0
        ]

    def dynamic(self) -> list[tuple[int, int]]:
        begin, size, _names = self._of_type(SHT_DYNAMIC)
        return list(struct.iter_unpack("<qQ", self._bytes[begin : begin + size]))

    def needed(self) -> list[str]:
        names = self._of_type(SHT_DYNAMIC)[2]
        return [self._text(names + value) for tag, value in self.dynamic() if tag == DT_NEEDED]


@pytest.fixture(scope="module")
def library() -> SharedObject:
    chosen = os.environ.get("BAGUA_NET_PLUGIN_LIBRARY")
    if chosen:
        return SharedObject(Path(chosen))
    from bagua.net.library import library_path

    return SharedObject(library_path())


def test_exports_the_tables_and_nothing_else(library: SharedObject) -> None:
    exported = [symbol for symbol in library.symbols() if symbol.defined]
    assert {symbol.name for symbol in exported} == NETWORKS | TUNERS | PROFILERS
    assert all(symbol.kind == STT_OBJECT for symbol in exported), "NCCL looks up data, not functions"


def test_needs_libc_and_nothing_else(library: SharedObject) -> None:
    needed = library.needed()
    assert "libc.so.6" in needed
    assert not set(needed) - set(LIBC_FAMILY)


def test_takes_nothing_from_the_cxx_runtime(library: SharedObject) -> None:
    # Weak ones may stay unresolved: the static libstdc++ leaves a few of its transactional memory.
    undefined = [symbol.name for symbol in library.symbols() if not symbol.defined and not symbol.weak]
    assert undefined
    # _ZN... would have to come from whatever libstdc++ the process happens to have.
    assert not [name for name in undefined if name.startswith(("_Z", "__cxa_throw", "__gxx"))]


def test_stays_mapped_and_is_found_where_it_lies(library: SharedObject) -> None:
    tags = dict(library.dynamic())
    # NCCL up to 2.27 closes the library without a word while threads of ours may still run.
    assert tags.get(DT_FLAGS_1, 0) & DF_1_NODELETE
    assert tags.get(DT_FLAGS_1, 0) & DF_1_NOW
    assert not {DT_TEXTREL, DT_RPATH, DT_RUNPATH} & set(tags)
