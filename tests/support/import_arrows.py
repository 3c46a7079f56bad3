"""Who imports whom, read from the sources of the Python package: for `make check`, and for tests that read sources."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGE = REPOSITORY / "bagua"

DYNAMIC_IMPORTS = {"importlib.import_module", "import_module", "__import__"}


@dataclass(frozen=True)
class Import:
    module: str
    lazy: bool  # inside a function: the cost and the need arise only when it is called


def module_name(path: Path) -> str:
    parts = list(path.relative_to(REPOSITORY).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def is_type_checking(test: ast.expr) -> bool:
    return (isinstance(test, ast.Name) and test.id == "TYPE_CHECKING") or (
        isinstance(test, ast.Attribute) and test.attr == "TYPE_CHECKING"
    )


def _name_of(function: ast.expr) -> str:
    """`name` or `module.name`; unparsing every call takes longer than all the rest."""
    if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
        return f"{function.value.id}.{function.attr}"
    return function.id if isinstance(function, ast.Name) else ""


def imports_of(source: str, module: str, *, is_package: bool) -> Iterator[Import]:
    """Every import but those for type checkers. Names imported from a package count as the modules they may be."""

    def walk(node: ast.AST, lazy: bool) -> Iterator[Import]:
        if isinstance(node, ast.If) and is_type_checking(node.test):
            for statement in node.orelse:
                yield from walk(statement, lazy)
            return
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, lazy)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = module.split(".")
                keep = len(parents) - node.level + (1 if is_package else 0)
                base = ".".join([*parents[:keep], *([base] if base else [])])
            for alias in node.names:
                yield Import(f"{base}.{alias.name}", lazy)
        elif isinstance(node, ast.Call) and _name_of(node.func) in DYNAMIC_IMPORTS and node.args:
            argument = node.args[0]
            if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                yield Import(argument.value, lazy)
        inside = lazy or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            yield from walk(child, inside)

    yield from walk(ast.parse(source), False)


def imports_of_file(path: Path) -> list[Import]:
    return list(imports_of(path.read_text(), module_name(path), is_package=path.name == "__init__.py"))


def module_arrows(sources: Mapping[str, str]) -> dict[str, set[str]]:
    """For every module those that it imports. In `sources` the name of a package ends with ".__init__"."""
    modules = {name.removesuffix(".__init__"): name for name in sources}
    arrows: dict[str, set[str]] = {}
    for module, name in modules.items():
        found = set()
        for one in imports_of(sources[name], module, is_package=name != module):
            target = one.module
            while target and target not in modules:
                target = target.rpartition(".")[0]
            found.add(target)
        arrows[module] = found & modules.keys() - {module}
    return arrows


def reachable(module: str, arrows: Mapping[str, set[str]]) -> set[str]:
    found: set[str] = set()
    waiting = list(arrows[module])
    while waiting:
        one = waiting.pop()
        if one not in found:
            found.add(one)
            waiting.extend(arrows[one])
    return found


def python_files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (PACKAGE / folder).rglob("*.py"))


def differences_of_rows(name: str, rows: dict[str, set[str]], folders: set[str]) -> list[str]:
    """A folder without a row has no rule, and a row without a folder, or that names one, is a rule about nothing."""
    named = set(rows).union(*rows.values())
    return [
        *(f"name the layers of {folder} in {name}" for folder in sorted(folders - set(rows))),
        *(f"{name} names {folder}, which does not exist" for folder in sorted(named - folders)),
    ]
