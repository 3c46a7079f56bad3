"""From changed files to the tests that they reach.

A changed file belongs to a room, and the arrows between rooms are read from the sources: imports of the package module
by module, includes of the plugin folder by folder (`make lint` and tests/compat check that they point down). Whatever
has an arrow to the change, over any number of steps, is affected, and so is a test that names something affected: in
its own text, in that of the support files that it uses, or in the lines of its folder. A C++ test is affected by the
rooms that it includes. What no arrow leads to, such as build files, affects all tests.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Collection
from dataclasses import dataclass, field
from fnmatch import filter as fnmatch_filter
from pathlib import Path

from support.import_arrows import imports_of_file, module_arrows, module_name, reachable

from .lines import LINES

REPOSITORY = Path(__file__).resolve().parents[2]
CPP_RUNNER = "tests/cpp/test_cpp.py"
# All that runs ranks stands on the first two, torch calls the third in every process, and all tests use the last.
REACH_ALL = ("bagua/job/", "bagua/collectives/", "bagua/net/autoload.py", "tests/support/")
# Of pages, and the programs that run their code.
PAGES = re.compile(r"docs/|tests/docs/programs/|mkdocs\.yml|[^/]+\.md")
SOURCES = {".py", ".cc", ".h", ".c"}

_MODULE = re.compile(r"\bbagua[./][a-z]\w*(?:[./]\w+)*")
_FROM_BAGUA = re.compile(r"^\s*from bagua import \(?([^)\n]+)", re.MULTILINE)
_INCLUDED_FOLDER = re.compile(r'^\s*#\s*include\s*"(\w+(?:/\w+)*)/\w+\.\w+"', re.MULTILINE)
_INCLUDE = re.compile(r'^\s*#\s*include\s+[<"]([^">]+)[">]', re.MULTILINE)
_INCLUDE_ROOTS = [REPOSITORY / name for name in ("tests/cpp", "net_plugin", "tools")]
_SUPPORT = re.compile(r"\bsupport[./](\w+)")
# `import_module(f"...")`: one of the modules in the folder.
_COMPUTED_IMPORT = re.compile(r"\bimport_module\((?!\")")
# bagua.torch_api loads these when somebody asks for them, who names them by a word.
_ON_REQUEST = tuple(f"bagua.torch_api.{name}" for name in ("checkpoint", "contrib", "model_parallel"))
_ASKS = re.compile(r"\b(checkpoint|contrib|model_parallel|moe)\b")
# What stands for a room where it is neither an import nor a path.
_WORDS = {
    "bagua.cli.*": re.compile(r"\bbagua-net\b"),
    "bagua.script.*": re.compile(r"\bbaguarun\b"),
    "net_plugin/*": re.compile(r"\blibnccl-net\b|\bENABLE_BAGUA_NET\b|\bnet_plugin\b"),
    "tools/bench": re.compile(r"\bbagua-net-driver\b"),
    "docs": re.compile(r"\bdocs/|\"docs\""),
    "examples": re.compile(r"\bexamples/|\"examples\""),
}


@dataclass
class Selection:
    """Why, what pytest is given, and which C++ tests; all of them, if a reason says so."""

    everything: bool = False
    reasons: list[str] = field(default_factory=list)
    tests: list[str] = field(default_factory=list)
    cpp_tests: list[str] = field(default_factory=list)


def room_of(path: str) -> str | None:
    """The room of a source or page; None, if any test may depend on the file."""
    folder, _, name = path.rpartition("/")
    parts = folder.split("/")
    if name == "CMakeLists.txt" or path.startswith(REACH_ALL):
        return None
    if PAGES.match(path):
        return "docs"
    if parts[0] == "net_plugin" and len(parts) > 1:
        return "/".join(parts[: 3 if parts[1] == "transport" else 2])
    if parts[0] in {"bagua", "tools"} and len(parts) > 1:
        return "/".join(parts[:2])
    return "examples" if parts[0] == "examples" else None


class Arrows:
    """Of the tree as it is now: what names what. A node is a module of bagua, or else a room."""

    def __init__(self) -> None:
        files = [path for path in (REPOSITORY / "bagua").rglob("*.py") if path.parent.name != "bagua"]
        self.file_of = {module_name(path): path for path in files}
        self._rooms = {room for folder in ("net_plugin", "tools", "examples") for room in _rooms_in(folder)} | {"docs"}
        tools = "|".join(sorted(room.partition("/")[2] for room in self._rooms if room.startswith("tools/")))
        self._tool = re.compile(rf'\btools/({tools})\b|^\s*(?:from|import) ({tools})\b|"-m", "({tools})"', re.MULTILINE)
        self._named: dict[Path, set[str]] = {}
        self.below = module_arrows(
            {name + ".__init__" * (path.name == "__init__.py"): path.read_text() for name, path in self.file_of.items()}
        )
        imported = {one.module for one in imports_of_file(REPOSITORY / "bagua" / "__init__.py") if not one.lazy}
        of_root = {module for module in self.file_of if any(one.startswith(f"{module}.") for one in imported)}
        for name, found in self.below.items():
            text = self.file_of[name].read_text()
            found |= of_root
            # An import runs the packages above as well, and a process is started by a module's name.
            found |= {parent for one in (name, *found) for parent in _packages_of(one)} | self._named_whole(text)
            if _COMPUTED_IMPORT.search(text):
                package = module_name(self.file_of[name].parent)
                found |= {one for one in self.below if one.startswith(f"{package}.")}
            if name == "bagua.torch_api":
                found -= self._on_request()
        self.below |= {room: set() for room in self._rooms}
        for room in self._rooms:
            self.below[room] = {
                one
                for path in _sources_of(room)
                for one in (self.named_in(path) if path.suffix == ".py" else self._included_in(path))
            }
            self.below[room] -= {"docs"}  # a tool that writes or names a page does not depend on it
        # Names all rooms, and needs none of them.
        self.below["tools/check"] = set()

    def matching(self, patterns: Collection[str]) -> set[str]:
        return {node for pattern in patterns for node in fnmatch_filter(self.below, pattern)}

    def named_in(self, path: Path) -> set[str]:
        if path not in self._named:
            self._named[path] = self._named_in_text(path.read_text())
        return self._named[path]

    def _included_in(self, path: Path) -> set[str]:
        return {f"net_plugin/{folder}" for folder in _INCLUDED_FOLDER.findall(path.read_text())} & self._rooms

    def _named_in_text(self, text: str) -> set[str]:
        found = set()
        names = {match.replace("/", ".").removesuffix(".py") for match in _MODULE.findall(text)}
        names |= {f"bagua.{word}" for names in _FROM_BAGUA.findall(text) for word in re.findall(r"\w+", names)}
        for name in names:
            if (REPOSITORY / "bagua" / f"{name.split('.')[1]}.py").is_file():
                continue  # a file of the root, which reaches all tests anyway
            while name != "bagua" and name not in self.file_of and not _is_folder(name):
                name = name.rpartition(".")[0]
            if name == "bagua":  # what it defines itself is that of torch_api
                name = "bagua.torch_api"
            inside = {one for one in self.file_of if one == name or one.startswith(f"{name}.")}
            found |= inside - self._on_request() if name == "bagua.torch_api" and not _ASKS.search(text) else inside
        for pattern, words in _WORDS.items():
            if words.search(text):
                found |= self.matching([pattern])
        return found | {f"tools/{tool}" for ways in self._tool.findall(text) for tool in ways if tool}

    def affected_by(self, changed: Collection[str]) -> set[str]:
        above: dict[str, set[str]] = {node: set() for node in self.below}
        for node, found in self.below.items():
            for one in found & above.keys():
                above[one].add(node)
        return set(changed).union(*(reachable(node, above) for node in changed))

    def _on_request(self) -> set[str]:
        return {one for one in self.file_of if f"{one}.".startswith(tuple(f"{name}." for name in _ON_REQUEST))}

    def _named_whole(self, text: str) -> set[str]:
        return {name for name in re.findall(r'"(bagua(?:\.\w+)+)"', text) if name in self.below}


def reach_of(test: Path, arrows: Arrows) -> set[str]:
    return arrows.matching(lines_of(test)) | _named_by(test, arrows)


@functools.cache
def _named_by(test: Path, arrows: Arrows) -> set[str]:
    """What a test names, with the files beside it and those of tests/support that it uses."""
    beside = [path for path in test.parent.glob("*.py") if not path.name.startswith("test_")]
    waiting = [test, *beside]
    seen: set[Path] = set()
    found: set[str] = set()
    while waiting:
        path = waiting.pop()
        if path in seen or not path.is_file():
            continue
        seen.add(path)
        found |= arrows.named_in(path)
        waiting += [REPOSITORY / "tests" / "support" / f"{name}.py" for name in _SUPPORT.findall(path.read_text())]
    return found


def lines_of(test: Path) -> tuple[str, ...]:
    name = str(test.relative_to(REPOSITORY / "tests"))
    folder = name.partition("/")[0]
    if folder not in LINES:
        raise ValueError(f"tests/{folder} has no line in tools/check/lines.py\nSay there what its tests start or read.")
    return (*LINES[folder], *LINES.get(name, ()))


def select(changed: Collection[str], arrows: Arrows) -> Selection:
    """`changed` are paths from the root of the repository, also of files that are no more."""
    selection = Selection()
    tests: set[str] = set()
    cpp_rooms: set[str] = set()
    cpp_files: set[Path] = set()
    nodes: dict[str, set[str]] = {}  # by room
    for path in sorted(changed):
        file = REPOSITORY / path
        folder = "/".join(path.split("/")[:2])
        room = room_of(path)
        if room:
            cpp_rooms.add(room)
            own = {name for name, source in arrows.file_of.items() if source == file}
            nodes.setdefault(room, set()).update(own or arrows.matching([room.replace("/", "."), room, f"{room}/*"]))
            if room.startswith("bagua/") and not own:
                nodes[room] |= arrows.matching([room.replace("/", ".") + ".*"])
        elif path.startswith(f"{folder}/") and folder.startswith("tests/") and folder != "tests/support":
            if folder == "tests/cpp" and file.suffix in SOURCES - {".py"} and file.is_file():
                cpp_files.add(file)
            elif file.is_file() and file.name.startswith("test_"):
                tests.add(path)
            elif not file.name.startswith("test_"):
                tests |= {str(one.relative_to(REPOSITORY)) for one in (REPOSITORY / folder).rglob("test_*.py")}
        else:
            selection.everything = True
            selection.reasons.append(f"{path} -> everything")
    for room in sorted(nodes):
        affected = arrows.affected_by(nodes[room])
        rooms = {"/".join(one.split(".")[:2]) if one.startswith("bagua.") else one for one in affected} - {room}
        reached = {
            str(test.relative_to(REPOSITORY)) for test in all_tests() if not reach_of(test, arrows).isdisjoint(affected)
        }
        tests |= reached
        folders = [f"{name} ({count})" for name, count in _counted(reached).items()]
        selection.reasons.append(f"{room} -> {', '.join(sorted(rooms)) or 'no room'} -> {', '.join(folders)}")
    sources = sorted((REPOSITORY / "tests" / "cpp").rglob("*_test.cc")) if cpp_rooms or cpp_files else []
    for source in sources:
        included = _files_included(source)
        rooms = {room_of(str(one.relative_to(REPOSITORY))) for one in included}
        # Those named abi_ open the whole plugin.
        opened = source.name.startswith("abi_") and any(room.startswith("net_plugin/") for room in cpp_rooms)
        if opened or not rooms.isdisjoint(cpp_rooms) or not included.isdisjoint(cpp_files):
            selection.cpp_tests.append(source.stem)
    if selection.cpp_tests:
        selection.reasons.append(f"C++ tests that include a change -> {', '.join(selection.cpp_tests)}")
    selection.tests = sorted(tests)
    return selection


def all_tests() -> list[Path]:
    """The files that pytest collects, without the runner of the C++ tests, which are chosen one by one."""
    found = (REPOSITORY / "tests").rglob("test_*.py")
    return sorted(path for path in found if path != REPOSITORY / CPP_RUNNER)


@functools.cache
def _files_included(source: Path) -> set[Path]:
    """The C++ test, the headers of this repository that it includes over any number of steps, and their .cc files."""
    waiting = [source]
    seen: set[Path] = set()
    while waiting:
        path = waiting.pop()
        if path not in seen:
            seen.add(path)
            waiting += _included_by(path)
    return seen


@functools.cache
def _included_by(path: Path) -> list[Path]:
    names = _INCLUDE.findall(path.read_text(encoding="utf-8"))
    found = (root / name for name in names for root in _INCLUDE_ROOTS)
    return [one for header in found for one in (header, header.with_suffix(".cc")) if one.is_file()]


def _counted(tests: Collection[str]) -> dict[str, int]:
    folders = sorted("/".join(test.split("/")[:2]) for test in tests)
    return {folder: folders.count(folder) for folder in folders}


def _rooms_in(folder: str) -> set[str]:
    paths = (path for path in (REPOSITORY / folder).rglob("*") if path.suffix in SOURCES)
    return {room for path in paths if (room := room_of(str(path.relative_to(REPOSITORY))))}


def _sources_of(room: str) -> list[Path]:
    paths = (path for path in (REPOSITORY / room).rglob("*") if path.suffix in SOURCES)
    return [path for path in paths if room_of(str(path.relative_to(REPOSITORY))) == room]


def _packages_of(module: str) -> list[str]:
    parts = module.split(".")
    return [".".join(parts[:count]) for count in range(2, len(parts))]


def _is_folder(module: str) -> bool:
    return REPOSITORY.joinpath(*module.split(".")).is_dir()
