"""Which NCCLs a job on this machine could load: torch's own and the system's, with their releases.

torch is never imported for this, and no NCCL is loaded into this process: a library that crashes, or that drags a GPU
driver in, must not take this process down.
"""

from __future__ import annotations

import importlib.util
import mmap
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from bagua.net.library import loader_search_path
from bagua.net.nccl_release import NcclRelease, wheel_release

_SONAME = "libnccl.so.2"
_ASK_TIMEOUT_S = 20.0
_LDCONFIG_TIMEOUT_S = 10.0
_SYSTEM_DIRECTORIES = ("/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/local/lib")
_VERSION_TEXT = re.compile(rb"NCCL version (\d+\.\d+\.\d+)")
_ASK_VERSION = """
import ctypes, sys
version = ctypes.c_int(0)
result = ctypes.CDLL(sys.argv[1]).ncclGetVersion(ctypes.byref(version))
sys.exit(f"ncclGetVersion returned {result}") if result else print(version.value)
"""


@dataclass(frozen=True)
class NcclLibrary:
    path: Path
    owner: str  # "torch" or "system"
    origin: str  # "nvidia-nccl-cu12 2.28.9", "LD_LIBRARY_PATH", "the loader's cache"
    release: NcclRelease | None  # None if it is unknown
    problem: str = ""  # why not, or why it does not load


@dataclass(frozen=True)
class TorchInstallation:
    directory: Path
    version: str  # "2.13.0+cpu"; "" if it has no metadata
    has_cuda: bool


def find_torch(search_path: Iterable[str] | None = None) -> TorchInstallation | None:
    """The torch that `import torch` would take."""
    directory = _top_level_package("torch", search_path)
    if directory is None:
        return None
    version = ""
    for metadata in sorted(directory.parent.glob("torch-*.dist-info")):
        version = metadata.name.removeprefix("torch-").removesuffix(".dist-info")
    has_cuda = any((directory / "lib" / name).exists() for name in ("libtorch_cuda.so", "libtorch_hip.so"))
    return TorchInstallation(directory, version, has_cuda)


def find_nccl_libraries(
    environment: Mapping[str, str], search_path: Iterable[str] | None = None, system: Iterable[Path] | None = None
) -> list[NcclLibrary]:
    """Every NCCL that a job could load, torch's first, each once. Asks each for its release in a process of its own."""
    candidates: list[tuple[Path, str, str]] = []
    wheel = wheel_release(search_path)
    if wheel is not None:
        origin = f"{wheel[0]} {wheel[1]}"
        candidates += [(path, "torch", origin) for path in _wheel_libraries(search_path)]
    torch = find_torch(search_path)
    if torch is not None and (torch.directory / "lib" / _SONAME).exists():
        candidates.append((torch.directory / "lib" / _SONAME, "torch", f"torch {torch.version}"))
    for directory in loader_search_path(environment):
        candidates.append((directory / _SONAME, "system", "LD_LIBRARY_PATH"))
    candidates += [(path, "system", "the loader's search") for path in (_system() if system is None else system)]

    libraries: list[NcclLibrary] = []
    seen: set[Path] = set()
    for path, owner, origin in candidates:
        if not path.exists() or path.resolve() in seen:
            continue
        seen.add(path.resolve())
        release, problem = _release_of(path)
        libraries.append(NcclLibrary(path, owner, origin, release, problem))
    if torch is not None and torch.has_cuda and not any(library.owner == "torch" for library in libraries):
        libraries = _linked_into_torch(torch) + libraries
    return libraries


def _top_level_package(name: str, search_path: Iterable[str] | None) -> Path | None:
    if search_path is not None:
        return next((Path(entry, name) for entry in search_path if Path(entry, name, "__init__.py").exists()), None)
    spec = importlib.util.find_spec(name)
    return Path(spec.origin).parent if spec is not None and spec.origin is not None else None


def _wheel_libraries(search_path: Iterable[str] | None) -> list[Path]:
    """nvidia/nccl/lib, or nvidia/cu13/lib in newer packaging."""
    directories = sys.path if search_path is None else search_path
    return [path for entry in directories for path in sorted(Path(entry or ".").glob(f"nvidia/*/lib/{_SONAME}"))]


def _linked_into_torch(torch: TorchInstallation) -> list[NcclLibrary]:
    """A torch built from source may carry NCCL inside its own library: there only the text tells."""
    path = torch.directory / "lib" / "libtorch_cuda.so"
    release = _release_in_text(path)
    if release is None:
        return []
    return [NcclLibrary(path, "torch", f"linked into torch {torch.version}", release)]


def _system() -> list[Path]:
    paths = []
    try:
        listing = subprocess.run(
            ["/sbin/ldconfig", "-p"], capture_output=True, text=True, timeout=_LDCONFIG_TIMEOUT_S
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        listing = ""
    for line in listing.splitlines():
        name, _, path = line.strip().partition(" => ")
        if name.startswith(_SONAME + " ") and path:
            paths.append(Path(path))
    directories = [*_SYSTEM_DIRECTORIES, f"{sys.prefix}/lib", "/usr/local/cuda/lib64"]
    return paths + [Path(directory) / _SONAME for directory in directories]


def _release_of(path: Path) -> tuple[NcclRelease | None, str]:
    """Asks the library itself; if that fails, its text, with the reason why it does not load."""
    try:
        answer = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _ASK_VERSION, str(path)],
            capture_output=True,
            text=True,
            timeout=_ASK_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        return _release_in_text(path), f"it did not answer within {_ASK_TIMEOUT_S:g} s"
    if answer.returncode == 0:
        return NcclRelease.from_code(int(answer.stdout)), ""
    reason = (answer.stderr.strip().splitlines() or [f"loading it ended with code {answer.returncode}"])[-1]
    return _release_in_text(path), reason


def _release_in_text(path: Path) -> NcclRelease | None:
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            found = _VERSION_TEXT.search(content)
            return None if found is None else NcclRelease.from_text(found.group(1).decode())
    except (OSError, ValueError):  # ValueError: an empty file cannot be mapped
        return None
