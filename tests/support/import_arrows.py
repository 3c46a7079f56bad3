"""Who imports whom, read from the sources of the Python package; for the tests that say who may."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGE = REPOSITORY / "bagua"

DYNAMIC_IMPORTS = {"importlib.import_module", "import_module", "__import__"}


@dataclass(frozen=True)
class Import:
    module: str
    line: int
    lazy: bool  # inside a function: the cost and the need arise only when it is called

    def is_of(self, package: str) -> bool:
        return self.module == package or self.module.startswith(package + ".")


def module_name(path: Path) -> str:
    parts = list(path.relative_to(REPOSITORY).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def is_type_checking(test: ast.expr) -> bool:
    return (isinstance(test, ast.Name) and test.id == "TYPE_CHECKING") or (
        isinstance(test, ast.Attribute) and test.attr == "TYPE_CHECKING"
    )


def imports_of(source: str, module: str, *, is_package: bool, with_types: bool = False) -> Iterator[Import]:
    """Every import; those for type checkers only `with_types`. Names imported from a package count as the modules they
    may be."""

    def walk(node: ast.AST, lazy: bool) -> Iterator[Import]:
        if isinstance(node, ast.If) and is_type_checking(node.test) and not with_types:
            for statement in node.orelse:
                yield from walk(statement, lazy)
            return
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno, lazy)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = module.split(".")
                keep = len(parents) - node.level + (1 if is_package else 0)
                base = ".".join([*parents[:keep], *([base] if base else [])])
            for alias in node.names:
                yield Import(f"{base}.{alias.name}", node.lineno, lazy)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in DYNAMIC_IMPORTS and node.args:
            argument = node.args[0]
            if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                yield Import(argument.value, node.lineno, lazy)
        inside = lazy or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            yield from walk(child, inside)

    yield from walk(ast.parse(source), False)


def imports_of_file(path: Path) -> list[Import]:
    return list(imports_of(path.read_text(), module_name(path), is_package=path.name == "__init__.py"))


def module_arrows(
    sources: Mapping[str, str], others: Collection[str] = (), *, with_types: bool = True
) -> dict[str, set[str]]:
    """For every module those that it imports. The arguments are those of `circles_of`, and of `imports_of`."""
    modules = {name.removesuffix(".__init__"): name for name in sources}
    arrows: dict[str, set[str]] = {}
    for module, name in modules.items():
        found = set()
        for one in imports_of(sources[name], module, is_package=name != module, with_types=with_types):
            target = one.module
            while target and target not in modules and target not in others:
                target = target.rpartition(".")[0]
            found.add(target)
        arrows[module] = found & modules.keys() - {module}
    return arrows


def circles_of(sources: Mapping[str, str], others: Collection[str] = ()) -> list[list[str]]:
    """Groups of modules of which each one imports all others, directly or not, for type checkers and lazily included.

    Args:
        sources: by the name of the module; that of a package ends with ".__init__".
        others: modules without a source, which import nothing.
    """
    arrows = module_arrows(sources, others)
    reached = {module: reachable(module, arrows) for module in arrows}
    circles = {
        frozenset({module} | {other for other in reached[module] if module in reached[other]})
        for module in arrows
        if module in reached[module]
    }
    return sorted(sorted(circle) for circle in circles)


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
