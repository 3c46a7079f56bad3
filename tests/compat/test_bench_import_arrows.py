"""Who may import whom in bagua.net.bench: its kinds of run share what lies beside their folders, and nothing else."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest
from support.import_arrows import PACKAGE, Import, differences_of_rows, imports_of, module_name, python_files

# For every folder of bagua/net/bench: which of the others it may import. The files beside the folders are what the
# kinds of run share: they import none of them.
BENCH_ALLOWED: dict[str, set[str]] = {
    "nccl_ab": set(),
    "ring": set(),
}
BENCH = "bagua.net.bench"


def modules_run_by_name(source: str) -> Iterator[Import]:
    """The strings that are a module's whole name and nothing else: what `python -m` is given for a process."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(r"\w+(\.\w+)+", node.value):
            yield Import(node.value, node.lineno, True)


def violations_of_bench(source: str, module: str, *, is_package: bool) -> list[str]:
    """What `module`, of bagua.net.bench, imports or starts of a kind of run that is none of its business."""
    own = module.removeprefix(f"{BENCH}.").partition(".")[0]  # a folder, or a file beside them
    forbidden = {f"{BENCH}.{name}" for name in set(BENCH_ALLOWED) - BENCH_ALLOWED.get(own, set()) - {own}}
    found = {
        (one.line, one.module)
        for one in (*imports_of(source, module, is_package=is_package), *modules_run_by_name(source))
        if any(one.is_of(package) for package in forbidden)
    }
    return [f"{module}:{line} imports {imported}" for line, imported in sorted(found)]


def test_every_folder_of_the_benchmark_has_a_row() -> None:
    folders = {path.parent.name for path in (PACKAGE / "net" / "bench").glob("*/*.py")}
    assert differences_of_rows("BENCH_ALLOWED", BENCH_ALLOWED, folders) == []


def test_kinds_of_run_import_only_what_they_share() -> None:
    files = python_files("net/bench")
    assert files
    wrong = [
        violation
        for path in files
        for violation in violations_of_bench(path.read_text(), module_name(path), is_package=path.name == "__init__.py")
    ]
    assert wrong == []


@pytest.mark.parametrize(
    ("module", "statement", "imported"),
    [
        ("settings", "from bagua.net.bench.ring.places import maker", "ring.places.maker"),
        ("settings", "def late():\n    from bagua.net.bench import ring", "ring"),
        ("nccl_ab.run", "from ..ring import summary", "ring.summary"),
        ("ring.run", "import bagua.net.bench.nccl_ab.log", "nccl_ab.log"),
        ("ring.places", "command = [sys.executable, '-m', 'bagua.net.bench.nccl_ab.worker']", "nccl_ab.worker"),
        ("ring.run", "from bagua.net.bench.ring.places import maker", None),
        ("ring.run", "from bagua.net.bench.settings import RAW", None),
        ("nccl_ab.worker", "parser = ArgumentParser(prog='python -m bagua.net.bench.nccl_ab.worker')", None),
    ],
)
def test_arrows_between_kinds_of_run_are_found(module: str, statement: str, imported: str | None) -> None:
    found = violations_of_bench(statement, f"{BENCH}.{module}", is_package=False)
    line = 1 + statement.count("\n")
    assert found == ([] if imported is None else [f"{BENCH}.{module}:{line} imports {BENCH}.{imported}"])
