"""Who may include whom: the layers of the C++ tree, read from the sources."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.import_arrows import PACKAGE, REPOSITORY, differences_of_rows

PLUGIN = REPOSITORY / "net_plugin"

# For every folder of net_plugin/: the folders that it may include, beside itself.
CPP_ALLOWED: dict[str, set[str]] = {
    "base": set(),
    "config": {"base"},
    "crypto": {"base"},
    "wire": {"base", "crypto"},
    "os": {"base"},
    "trace": {"base"},
    "stats": {"base", "os", "trace"},
    "transport": {"base", "config", "crypto", "wire", "os", "trace", "stats"},
    "abi": {"base", "config", "crypto", "wire", "os", "trace", "stats", "transport"},
    "python": {"base", "config", "crypto", "wire", "os", "trace", "stats", "transport"},
}
# The same for the folders of net_plugin/transport/. Only transport/*.h, which joins them, may include all.
TRANSPORT_ALLOWED: dict[str, set[str]] = {
    "recovery": set(),
    "tuning": set(),
    "chunks": {"tuning"},
    "stream": {"chunks", "recovery", "tuning"},
    "connect": {"chunks", "recovery", "tuning"},
    "faults": {"stream"},
    "comm": {"chunks", "connect", "faults", "recovery", "stream", "tuning"},
}
INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)
# Of the plugin's code the load driver shares the definitions of the table, plain values and socket options: nothing
# that moves bytes.
SHARED_WITH_BENCH = re.compile(r"abi/(net|nccl)_types\w*\.h|base/\w+\.h|os/(random_bytes|socket_address|tcp_socket)\.h")
# What may only be known in abi/: NCCL's names. The word NCCL itself is free, in comments and messages.
NCCL_NAME = re.compile(r"\b(ncclNet\w*|ncclResult_t|ncclSuccess|NCCL_NET_HANDLE_MAXSIZE|NCCL_PTR_\w+)\b")


def cpp_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.suffix in {".cc", ".h", ".c"})


def without_comments(source: str) -> str:
    return re.sub(r"//[^\n]*|/\*.*?\*/", "", source, flags=re.DOTALL)


def test_every_folder_of_the_plugin_has_a_layer() -> None:
    folders = {path.name for path in PLUGIN.iterdir() if path.is_dir() and cpp_files(path)}
    assert folders
    assert differences_of_rows("CPP_ALLOWED", CPP_ALLOWED, folders) == []


@pytest.mark.parametrize("folder", sorted(CPP_ALLOWED))
def test_cpp_includes_point_down(folder: str) -> None:
    wrong = []
    for path in cpp_files(PLUGIN / folder):
        for include in INCLUDE.findall(path.read_text()):
            where = f"{path.relative_to(REPOSITORY)} includes {include}"
            assert (PLUGIN / include).is_file(), f"{where}: no such file, includes are relative to net_plugin/"
            if include.split("/")[0] not in CPP_ALLOWED[folder] | {folder}:
                wrong.append(where)
    assert wrong == []


def test_every_folder_of_the_transport_has_a_layer() -> None:
    folders = {path.name for path in (PLUGIN / "transport").iterdir() if path.is_dir() and cpp_files(path)}
    assert differences_of_rows("TRANSPORT_ALLOWED", TRANSPORT_ALLOWED, folders) == []


@pytest.mark.parametrize("folder", sorted(TRANSPORT_ALLOWED))
def test_includes_within_the_transport_point_down(folder: str) -> None:
    wrong = []
    for path in cpp_files(PLUGIN / "transport" / folder):
        for include in INCLUDE.findall(path.read_text()):
            parts = include.split("/")
            if parts[0] == "transport" and parts[1] not in TRANSPORT_ALLOWED[folder] | {folder}:
                wrong.append(f"{path.relative_to(REPOSITORY)} includes {include}")
    assert wrong == []


def test_only_abi_knows_nccl_types() -> None:
    wrong = []
    for folder in sorted(set(CPP_ALLOWED) - {"abi"}):
        for path in cpp_files(PLUGIN / folder):
            wrong += [
                f"{path.relative_to(REPOSITORY)}: {name}"
                for name in NCCL_NAME.findall(without_comments(path.read_text()))
            ]
    assert wrong == []


def test_the_bench_sees_of_the_plugin_only_its_interface() -> None:
    """The driver measures the library as NCCL uses it: through the table that dlopen gives."""
    bench = REPOSITORY / "tools" / "bench"
    files = cpp_files(bench)
    assert files
    wrong = []
    for path in files:
        for include in INCLUDE.findall(path.read_text()):
            own = include.startswith("bench/") and (bench.parent / include).is_file()
            if not own and not SHARED_WITH_BENCH.fullmatch(include):
                wrong.append(f"{path.relative_to(REPOSITORY)} includes {include}")
    assert wrong == []


def test_headers_are_guarded() -> None:
    headers = [
        path
        for root in (PLUGIN, PACKAGE, REPOSITORY / "tools", REPOSITORY / "tests" / "cpp")
        for path in root.rglob("*.h")
    ]
    assert headers
    assert [str(path.relative_to(REPOSITORY)) for path in headers if "#pragma once" not in path.read_text()] == []
