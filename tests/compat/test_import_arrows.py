"""Who may import whom: the layers of the Python package, read from the sources."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.import_arrows import (
    PACKAGE,
    REPOSITORY,
    circles_of,
    differences_of_rows,
    imports_of,
    imports_of_file,
    module_name,
    python_files,
)

# Third-party packages that the torch-free part may use where a function needs them; their absence is an error of that
# function alone, which names the remedy.
LAZY_THIRD_PARTY = {"torch", "matplotlib", "prometheus_client", "rich", "textual", "flask", "werkzeug"}
# Modules of worker processes, which are about torch from end to end: they may import it at the top, and everything else
# may import them only lazily.
TORCH_MODULES = {"bagua.net.bench.nccl_ab.gpu_collectives"}
# The same for the screen of `bagua-net top`.
SCREEN_MODULES = {"bagua.net.top.app"}
# Root files that load neither torch nor the compiled extension.
ROOT_FILES = {
    *("bagua", "bagua.version", "bagua.env", "bagua.bagua_define"),
    *("bagua.error_text", "bagua.gpu_presence", "bagua.host_port", "bagua.lightning_name", "bagua.rank_list"),
}

# For every folder: what of bagua it may import, beside itself and the root files. Lowest first.
ALLOWED: dict[str, set[str]] = {
    "net": set(),
    "tuning": set(),
    "kernels": set(),
    "codecs": {"kernels"},
    "job": set(),
    "collectives": {"job"},
    "fsdp": {"collectives", "job", "codecs", "tuning"},
    "replicas": {"collectives", "job"},
    "engine": {"replicas", "collectives", "job", "codecs", "kernels", "tuning"},
    "comm_ops": {"engine", "collectives", "job", "codecs", "kernels"},
    "comm_hooks": {"comm_ops", "engine", "replicas", "collectives", "job", "codecs", "kernels"},
    "torch_api": {"comm_ops", "engine", "replicas", "collectives", "job", "codecs", "kernels", "net", "legacy"},
    "legacy": {"torch_api", "comm_ops", "engine", "collectives", "job", "distributed", "tuning"},
    "service": {"legacy"},
    "lightning": {"torch_api", "engine", "collectives", "job"},
    "cli": {"net", "torch_api", "tuning"},
    "distributed": {"cli", "legacy"},
    "script": {"distributed", "cli"},
}


def violations_of_layers(path: Path) -> list[str]:
    folder = path.relative_to(PACKAGE).parts[0]
    allowed = {f"bagua.{name}" for name in ALLOWED[folder] | {folder}}
    found = []
    for one in imports_of_file(path):
        if (
            not one.is_of("bagua")
            or one.module in ROOT_FILES
            or one.module.rpartition(".")[0] in ROOT_FILES - {"bagua"}
        ):
            continue
        if one.module.count(".") == 1 and not (PACKAGE / one.module.split(".")[1]).is_dir():
            continue  # a name that bagua/__init__.py defines
        if not any(one.is_of(package) for package in allowed):
            found.append(f"{path.relative_to(REPOSITORY)}:{one.line} imports {one.module}")
    return found


def test_rows_and_folders_that_differ_are_found() -> None:
    rows = {"low": set(), "high": {"low", "middle"}, "gone": set()}
    assert differences_of_rows("ROWS", rows, {"low", "high", "new"}) == [
        "name the layers of new in ROWS",
        "ROWS names gone, which does not exist",
        "ROWS names middle, which does not exist",
    ]


def test_every_folder_of_the_package_has_a_layer() -> None:
    folders = {path.name for path in PACKAGE.iterdir() if path.is_dir() and any(path.rglob("*.py"))}
    assert differences_of_rows("ALLOWED", ALLOWED, folders) == []


def test_every_root_file_exists() -> None:
    assert {module_name(path) for path in PACKAGE.glob("*.py")} == ROOT_FILES


def test_python_imports_point_down() -> None:
    files = [path for path in python_files(".") if path.parent != PACKAGE]
    assert files
    assert [violation for path in files for violation in violations_of_layers(path)] == []


# What old code alone uses, by its names now and by those of Bagua 0.9.
OF_OLD_CODE = ("bagua.legacy", "bagua.service", "bagua.bagua_define", "bagua.torch_api.tensor", "bagua.torch_api.utils")
# Two packages that install it, and files at the paths of 0.9.
KNOW_OLD_CODE = {
    *("bagua.distributed", "bagua.torch_api"),
    *("bagua.bagua_define", "bagua.service", "bagua.service.autotune_service", "bagua.service.autotune_task_manager"),
    *("bagua.torch_api.tensor", "bagua.torch_api.utils"),
}


def test_nothing_else_knows_what_old_code_uses() -> None:
    files = [path for path in python_files(".") if PACKAGE / "legacy" not in path.parents]
    knowing = {module_name(path) for path in files for one in imports_of_file(path) if any(map(one.is_of, OF_OLD_CODE))}
    assert knowing == KNOW_OLD_CODE


# Modules that are no Python files: the compiled extension, and what the build writes.
WITHOUT_SOURCE = {"bagua.net._core", "bagua._version"}
# Circles that are still there, by one of their modules. A file of bagua.net asks its package where its folders are; the
# registry of algorithms and their base class need each other.
KNOWN_CIRCLES: set[str] = {"bagua.net.library", "bagua.torch_api.algorithms.registry"}


def test_no_module_imports_itself_through_others() -> None:
    """In any folder, for type checkers and lazily included: what needs each other is one thing, in one file."""
    sources = {}
    for path in python_files("."):
        name = module_name(path)
        sources[f"{name}.__init__" if path.name == "__init__.py" else name] = path.read_text()
    circles = circles_of(sources, WITHOUT_SOURCE)
    unknown = [circle for circle in circles if not KNOWN_CIRCLES.intersection(circle)]
    assert unknown == [], "modules that import each other"
    gone = [name for name in KNOWN_CIRCLES if not any(name in circle for circle in circles)]
    assert gone == [], "take them out of KNOWN_CIRCLES"


def test_the_search_for_circles_finds_them() -> None:
    sources = {
        "bagua.__init__": "",
        "bagua.a": "from bagua.b import x",
        "bagua.b": "def f():\n    import bagua.c",
        "bagua.c": "if TYPE_CHECKING:\n    from bagua import a",
        "bagua.d": "from bagua import a, native",
        "bagua.e.__init__": "from bagua.e import f",
        "bagua.e.f": "from . import g",
    }
    assert circles_of(sources, {"bagua.native", "bagua.e.g"}) == [["bagua.a", "bagua.b", "bagua.c"]]
    assert circles_of(sources) == [["bagua.a", "bagua.b", "bagua.c"], ["bagua.e", "bagua.e.f"]]


# --- the training core -----------------------------------------------------------------------------------------------

# Folders that carry algorithms out without knowing any.
NAMELESS = ("job", "collectives", "replicas", "engine")


def algorithm_names(sources: dict[str, str]) -> set[str]:
    """The modules of algorithms, their classes, and the names under which they are registered."""
    of_all = {"__init__", "base", "registry"}
    names = set(sources) - of_all
    for module, source in sources.items():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ClassDef) and module not in of_all:
                names.add(node.name)
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("Registry.register"):
                names.update(one.value for one in node.args[:1] if isinstance(one, ast.Constant))
    return names


def words_of(source: str) -> set[str]:
    """Identifiers, and the words of strings and comments."""
    return set(re.findall(r"\w+", source))


def test_engine_and_collectives_name_no_algorithm() -> None:
    folder = PACKAGE / "torch_api" / "algorithms"
    names = algorithm_names({path.stem: path.read_text() for path in folder.glob("*.py")})
    assert {"gradient_allreduce", "GradientAllReduceAlgorithm"} <= names
    wrong = [
        f"{path.relative_to(REPOSITORY)} names {name}"
        for path in python_files(*NAMELESS)
        for name in sorted(names & words_of(path.read_text()))
    ]
    assert wrong == []


def test_algorithms_know_nothing_of_what_runs_them() -> None:
    """They are told the engine in their methods; what wraps modules imports them, not the other way round."""
    allowed = {"bagua.torch_api.algorithms", "bagua.torch_api.env"}
    files = python_files("torch_api/algorithms")
    assert files
    wrong = [
        f"{path.relative_to(REPOSITORY)}:{one.line} imports {one.module}"
        for path in files
        for one in imports_of_file(path)
        if one.is_of("bagua.torch_api") and not any(one.is_of(package) for package in allowed)
    ]
    assert wrong == []


def test_the_core_imports_nothing_but_torch() -> None:
    """At import time: a user who has torch has all that plain training needs."""
    wrong = [
        f"{path.relative_to(REPOSITORY)}:{one.line} imports {one.module}"
        for path in python_files("job", "collectives", "replicas", "engine", "comm_ops", "comm_hooks", "torch_api")
        for one in imports_of_file(path)
        if not one.lazy and one.module.split(".")[0] not in sys.stdlib_module_names | {"torch", "bagua"}
    ]
    assert wrong == []


def test_the_search_for_algorithms_finds_them() -> None:
    sources = {
        "base": "class Algorithm: ...",
        "__init__": "GlobalAlgorithmRegistry.register('by_name', far.FarAlgorithm)",
        "far": "class FarAlgorithm(Algorithm): ...",
    }
    assert algorithm_names(sources) == {"by_name", "far", "FarAlgorithm"}
    assert "by_name" in words_of("x = 1  # as by_name does")


def test_root_files_import_only_the_standard_library_at_import_time() -> None:
    for path in sorted(PACKAGE.glob("*.py")):
        for one in imports_of_file(path):
            top = one.module.split(".")[0]
            assert top in sys.stdlib_module_names or (
                top == "bagua" and (one.lazy or one.module.startswith(tuple(ROOT_FILES)))
            ), f"{path.name}:{one.line} imports {one.module}"


def wrong_imports_of_net_and_cli(path: Path) -> list[str]:
    about_torch = module_name(path) in TORCH_MODULES
    about_screen = module_name(path) in SCREEN_MODULES
    wrong = []
    for one in imports_of_file(path):
        top = one.module.split(".")[0]
        where = f"{path.relative_to(REPOSITORY)}:{one.line} imports {one.module}"
        if any(one.is_of(module) for module in TORCH_MODULES) and not (one.lazy or about_torch):
            wrong.append(f"{where} at import time, and with it torch; import it inside a function")
        if any(one.is_of(module) for module in SCREEN_MODULES) and not one.lazy:
            wrong.append(f"{where} at import time, and with it textual; import it inside a function")
        if top in sys.stdlib_module_names or top == "bagua" or (about_torch and top == "torch"):
            continue
        if about_screen and top in {"rich", "textual"}:
            continue
        if top not in LAZY_THIRD_PARTY:
            wrong.append(f"{where}, which is neither of the standard library nor of {sorted(LAZY_THIRD_PARTY)}")
        elif not one.lazy:
            wrong.append(f"{where} at import time; import it inside the function that needs it")
    return wrong


def test_net_and_cli_load_only_the_standard_library() -> None:
    paths = [
        *python_files("net", "cli", "distributed", "script", "tuning", "service"),
        *(path for path in python_files("legacy") if path.stem.startswith(("autotune", "launcher"))),
    ]
    assert [one for path in paths for one in wrong_imports_of_net_and_cli(path)] == []


# Each module in a process of its own, forked: what one of them has imported must not help the next.
BLOCKED_IMPORT = """
import importlib.abc, os, sys, traceback

class Blocked(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"torch", "numpy", "matplotlib", "prometheus_client", "rich", "textual"}:
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Blocked())
failed = []
for module in sys.argv[1:]:
    if not (child := os.fork()):
        try:
            __import__(module)
            third_party = {"torch", "numpy", "matplotlib", "prometheus_client", "rich", "textual"} & set(sys.modules)
            assert not third_party, third_party
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        failed.append(module)
sys.exit(" ".join(failed) or 0)
"""


def test_imports_with_torch_blocked() -> None:
    modules = [
        *("bagua", "bagua.env", "bagua.net", "bagua.net.autoload", "bagua.cli.net", "bagua.cli.net_bench"),
        *("bagua.error_text", "bagua.host_port", "bagua.rank_list"),
        *("bagua.net.stats", "bagua.net.stats.sources", "bagua.net.exporter.collector"),
        *("bagua.distributed.launch", "bagua.distributed.run", "bagua.script.baguarun"),
        *("bagua.service", "bagua.bagua_define", "bagua.tuning.memory", "bagua.cli.main"),
    ]
    command = [sys.executable, "-W", "error", "-c", BLOCKED_IMPORT, *modules]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


class TestImportReader:
    """The reader of support.import_arrows finds what it must find: a rule that sees no import proves nothing."""

    def test_sees_relative_lazy_and_dynamic_imports(self) -> None:
        source = (
            "from __future__ import annotations\n"
            "from . import sizes\n"
            "from ..library import find\n"
            "def draw():\n"
            "    import matplotlib.pyplot as plt\n"
            "    importlib.import_module('torch.cuda')\n"
            "if TYPE_CHECKING:\n"
            "    import torch\n"
        )
        found = {(one.module, one.lazy) for one in imports_of(source, "bagua.net.bench.report", is_package=False)}
        assert found == {
            ("__future__.annotations", False),
            ("bagua.net.bench.sizes", False),
            ("bagua.net.library.find", False),
            ("matplotlib.pyplot", True),
            ("torch.cuda", True),
        }

    def test_a_third_party_import_is_told_with_its_line(self, monkeypatch: pytest.MonkeyPatch) -> None:
        path = python_files("cli")[0]
        source = "import matplotlib\nimport unknown\ndef draw():\n    import matplotlib\n"
        monkeypatch.setitem(globals(), "imports_of_file", lambda _: imports_of(source, "bagua.cli.x", is_package=False))
        where = path.relative_to(REPOSITORY)
        first, second = wrong_imports_of_net_and_cli(path)
        assert first.startswith(f"{where}:1 imports matplotlib at import time")
        assert second.startswith(f"{where}:2 imports unknown, which is neither")

    def test_resolves_relative_imports_of_a_package(self) -> None:
        found = [one.module for one in imports_of("from .sizes import x", "bagua.net.bench", is_package=True)]
        assert found == ["bagua.net.bench.sizes.x"]
