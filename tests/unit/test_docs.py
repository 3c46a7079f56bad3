"""The documentation keeps its promises: commands and settings exist, code blocks are code that is run, and what is
generated is current. `make docs` checks the links."""

from __future__ import annotations

import ast
import functools
import os
import re
import shlex
import subprocess
import sys
import tomllib
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.page_programs import PROGRAMS, blocks_run_by
from support.page_programs import blocks_of as python_blocks_of

from bagua import fsdp
from bagua.net import _core
from bagua.net.bench.ring.options import parse_options
from bagua.torch_api import checkpoint, contrib

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY / "tools"))

import results.pages  # noqa: E402

PAGES = sorted(
    [*REPOSITORY.glob("*.md"), *(REPOSITORY / "docs").rglob("*.md"), *(REPOSITORY / "examples").rglob("*.md")]
)
# Its commands are those of the commits that were measured, and these folders are no more.
RESULTS = REPOSITORY / "docs" / "reference" / "results.md"
TOOLS_OF_OLD_COMMITS = ("tools/train/", "tools/convergence/", "tools/kernels/", "tools/bench/measure_")

FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>[\w-]*)[^\n]*\n(?P<body>.*?)^(?P=indent)```\s*$", re.MULTILINE | re.DOTALL
)
# What tells a person that a page is not finished.
PLACEHOLDER = re.compile(
    r"\b(?:TODO|TBD|FIXME|XXX|lorem ipsum|coming soon|to be (?:written|filled|measured))\b|<!-- figure\b", re.IGNORECASE
)


@dataclass(frozen=True)
class CodeBlock:
    page: Path
    line: int
    language: str
    body: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(REPOSITORY)}:{self.line}"


def code_blocks(page: Path) -> list[CodeBlock]:
    text = page.read_text()
    return [
        CodeBlock(page, text.count("\n", 0, match.start()) + 1, match["language"], match["body"])
        for match in FENCE.finditer(text)
    ]


@functools.cache  # not while tests are collected, which every worker does
def own_names() -> set[str]:
    """Of the package, as pages use them: its public classes, and what the folders around training export."""
    trees = [ast.parse(path.read_text()) for path in (REPOSITORY / "bagua").rglob("*.py")]
    classes = {node.name for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)}
    return {"bagua", *contrib.__dir__(), *fsdp.__all__, *checkpoint.__all__, *classes}


SHELL = {"sh", "bash", "shell", "console"}
PYTHON = {"python", "py"}


def blocks_of(page: Path, languages: set[str]) -> list[CodeBlock]:
    return [block for block in code_blocks(page) if block.language in languages]


def shell_commands(block: CodeBlock) -> list[list[str]]:
    """The words of each command of a block. In a console block only the lines behind a prompt are commands."""
    text = re.sub(r"\\\n\s*", " ", block.body)
    lines = [line.strip() for line in text.splitlines()]
    if block.language == "console":
        lines = [line[2:] for line in lines if line.startswith("$ ")]
    commands = []
    for line in lines:
        for part in re.split(r"&&|\|\||;|\|", line):
            words = shlex.split(part, comments=True)
            while words and (re.fullmatch(r"\w+=.*", words[0]) or words[0] in {"time", "sudo", "eval"}):
                words = shlex.split(words[1].strip("$()")) if words[0] == "eval" else words[1:]
            if words:
                commands.append(words)
    return commands


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z][\w-]*):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE))


# Each test goes through all pages, and says everything that it has found: a page is not an item of its own, of which
# every worker of pytest would have hundreds to collect.


def name_of(page: Path) -> str:
    return str(page.relative_to(REPOSITORY))


def test_no_page_is_unfinished() -> None:
    found = [f"{name_of(page)}: {one}" for page in PAGES for one in PLACEHOLDER.findall(page.read_text())]
    assert found == []


def missing_from_shell_block(block: CodeBlock) -> list[str]:
    scripts = set(tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["scripts"])
    missing = []
    for words in shell_commands(block):
        name = words[0]
        if name == "make":
            asked = {word for word in words[1:] if not word.startswith("-") and "=" not in word}
            missing += [f"{block}: make has no target {target}" for target in sorted(asked - make_targets())]
        if name.startswith("bagua") and name not in scripts:
            missing.append(f"{block}: no command {name} is installed; there are {sorted(scripts)}")
        files = [word for word in words if re.fullmatch(r"(?:\./)?(?:tools|examples|tests|docs|\.ci)/[\w./-]+", word)]
        kept = [file for file in files if block.page != RESULTS or not file.startswith(TOOLS_OF_OLD_COMMITS)]
        missing += [f"{block}: no file {file}" for file in kept if not (REPOSITORY / file).exists()]
    return missing


def test_shell_commands_exist() -> None:
    blocks = [block for page in PAGES for block in blocks_of(page, SHELL)]
    assert [one for block in blocks for one in missing_from_shell_block(block)] == []


def test_python_blocks_compile() -> None:
    for page in PAGES:
        for block in blocks_of(page, PYTHON):
            compile(block.body, str(block), "exec")


def names_without_import(page: Path) -> list[str]:
    """Names of the reader's own program, such as `model`, need no explanation. Where ours come from does."""
    trees = [ast.parse(block.body) for block in code_blocks(page) if block.language in PYTHON]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    used = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    imported = re.findall(r"^\W*(?:from|import) .*$", page.read_text(), re.MULTILINE)
    known = {name for line in imported for name in re.findall(r"\w+", line)}
    defined = {node.name for node in nodes if isinstance(node, ast.ClassDef)}
    return [f"{name_of(page)}: {name}" for name in sorted((used & own_names()) - known - defined)]


def test_pages_import_what_they_use_of_bagua() -> None:
    assert [one for page in PAGES for one in names_without_import(page)] == []


def test_python_blocks_are_run_and_programs_run_blocks_that_exist() -> None:
    """By a program of tests/docs/programs, or as a script of its own."""
    pages = [name_of(page) for page in PAGES if page == REPOSITORY / "README.md" or "docs" in page.parts]
    there = {(page, number): block for page in pages for number, block in enumerate(python_blocks_of(page), start=1)}
    run = {block for program in PROGRAMS.glob("*.py") for block in blocks_run_by(program)}
    missing = [
        f"{page}:{one.line}" for (page, number), one in there.items() if not (one.script or (page, number) in run)
    ]
    assert missing == [], "run them in tests/docs/programs, or give a fragment another language, such as `text`"
    assert run - there.keys() == set()


def test_settings_in_the_documentation_exist() -> None:
    """`BAGUA_NET_*` stands for all of them; a longer name, such as MY_BAGUA_NET_X, is another."""
    variable = re.compile(r"(?<![A-Z0-9_])(?:ENABLE_BAGUA_NET|BAGUA_NET_[A-Z][A-Z0-9_]*)")
    known = {knob["name"] for knob in [*_core.knobs(), *_core.retired_knobs()]}
    pages = [page for page in PAGES if page.name != "CHANGELOG.md"]
    assert [
        (name_of(page), name) for page in pages for name in variable.findall(page.read_text()) if name not in known
    ] == []


@pytest.mark.parametrize("generator", ["generate_settings", "generate_cli"])
def test_generated_pages_are_current(generator: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY / "tools" / "docs")}
    command = [sys.executable, "-m", generator, "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr


def test_tables_are_those_of_the_result_files() -> None:
    found = results.pages.load_results(REPOSITORY / "docs" / "results")
    for page in results.pages.PAGES:
        text = (REPOSITORY / page).read_text(encoding="utf-8")
        assert results.pages.fill(text, found) == text, f"{page}: run make docs"


def test_code_blocks_name_their_language() -> None:
    """A block without one is checked by nothing above; output is `text`."""
    assert [str(block) for page in PAGES for block in code_blocks(page) if not block.language] == []


def test_readme_is_short_and_says_what_was_not_validated() -> None:
    readme = (REPOSITORY / "README.md").read_text()
    assert len(readme.splitlines()) <= 100
    assert "Not yet on physical multi-node networks" in readme
    for promised in ("make bench", "make test", "ENABLE_BAGUA_NET=1", "bagua-net doctor"):
        assert promised in readme


def test_drawings_are_well_formed_and_described() -> None:
    drawings = sorted((REPOSITORY / "docs" / "images").glob("*.svg"))
    assert drawings
    for drawing in drawings:
        root = ElementTree.parse(drawing).getroot()
        assert root.tag == "{http://www.w3.org/2000/svg}svg", drawing
        assert root.find("{http://www.w3.org/2000/svg}title") is not None, f"{drawing}: what a screen reader says"


def test_the_reader_of_shell_blocks_finds_what_does_not_exist() -> None:
    body = 'make nothing\neval "$(bagua-nothing env)"\nA=1 time python \\\n tools/nothing.py # why\nmake test\n'
    assert len(missing_from_shell_block(CodeBlock(REPOSITORY / "x.md", 1, "sh", body))) == 3
    block = CodeBlock(REPOSITORY / "x.md", 1, "console", "$ make test && bagua-net doctor\nmake nothing\n")
    assert shell_commands(block) == [["make", "test"], ["bagua-net", "doctor"]]


def test_make_bench_gives_options_that_exist() -> None:
    """The README's first command."""
    recipe = (REPOSITORY / "Makefile").read_text().partition("\nbench:")[2].partition("\n\n")[0]
    words = recipe.replace("\\\n", "").partition("$(BENCH_ARGS)")[2].partition("$(BENCH_ARGS)")[2].split()
    assert "--json" in words
    parse_options(words)
