"""The programs in the documentation: code blocks of a page, tied together by comments that readers do not see.

    <!-- program: join, 2 ranks -->      the Python block that follows is the beginning of the program `join`
    <!-- program: join -->               ... is its next part
    <!-- program: join, hidden           this comment itself is its next part: what a reader does not need to see
    assert ...
    -->

A program is run as a script would be, by every rank, its parts in the order of the page. Pure functions but for the
reading of the page; used by tests in both folders of Python tests.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
MOST_RANKS = 4

_FENCE = re.compile(r"^```(?P<language>[\w-]*)[^\n]*\n(?P<body>.*?)^```[ ]*$", re.MULTILINE | re.DOTALL)
_COMMENT = re.compile(r"<!--(?P<text>.*?)-->", re.DOTALL)
_MARK = re.compile(
    r"\s*program:\s*(?P<name>[\w.-]+)(?:,\s*(?P<ranks>\d+)\s+ranks?)?(?P<hidden>,\s*hidden)?[ ]*(?:\n(?P<body>.*))?",
    re.DOTALL,
)


@dataclass(frozen=True)
class Part:
    """Lines of a program: the Python source, and the line of the page on which it begins."""

    line: int
    source: str
    hidden: bool


@dataclass
class Program:
    page: str  # path, relative to the repository
    name: str
    ranks: int
    parts: list[Part] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.page}:{self.name}"

    @property
    def source(self) -> str:
        """All of it, as a file of its own."""
        return "\n".join(part.source for part in self.parts)

    def run(self) -> dict[str, object]:
        """Execute it in this process. Tracebacks name page and line. Returns its names."""
        page = str(REPOSITORY / self.page)
        names: dict[str, object] = {"__name__": "__main__", "__file__": page}
        for part in self.parts:
            code = compile("\n" * (part.line - 1) + part.source, page, "exec")
            exec(code, names)
        return names


@dataclass
class Page:
    programs: list[Program]
    loose: list[int]  # lines of Python blocks that belong to no program


def read_page(path: str) -> Page:
    """
    Args:
        path: relative to the repository.

    Raises:
        ValueError: a comment that says `program:` but not how, or that no Python block follows; names page and line.
    """
    return parse_page(path, (REPOSITORY / path).read_text())


def parse_page(path: str, text: str) -> Page:
    """As read_page, of this text."""
    programs: dict[str, Program] = {}
    blocks = {match.start(): match for match in _FENCE.finditer(text) if match["language"] in ("python", "py")}
    fences = [match.span() for match in _FENCE.finditer(text)]
    used: set[int] = set()
    for comment in _COMMENT.finditer(text):
        if "program:" not in comment["text"] or any(start <= comment.start() < end for start, end in fences):
            continue
        where = f"{path}:{_line(text, comment.start())}"
        mark = _MARK.fullmatch(comment["text"].rstrip())
        if mark is None:
            raise ValueError(
                f"{where}: cannot read {comment['text'].strip()!r}; it is `program: NAME[, N ranks][, hidden]`"
            )
        program = _program(programs, path, mark, where)
        if mark["hidden"]:
            offset = comment.start("text") + mark.start("body")
            program.parts.append(Part(_line(text, offset), (mark["body"] or "") + "\n", hidden=True))
            continue
        rest = text[comment.end() :]
        following = len(text) - len(rest.lstrip())
        block = blocks.get(following)
        if block is None or mark["body"]:
            raise ValueError(f"{where}: a Python block has to follow")
        used.add(following)
        program.parts.append(Part(_line(text, block.start("body")), block["body"], hidden=False))
    loose = [_line(text, start) for start in blocks if start not in used]
    return Page(list(programs.values()), loose)


def _program(programs: dict[str, Program], path: str, mark: re.Match[str], where: str) -> Program:
    name = mark["name"]
    if name not in programs:
        if mark["ranks"] is None or not 1 <= int(mark["ranks"]) <= MOST_RANKS:
            raise ValueError(f"{where}: the beginning of {name!r} says on how many ranks it runs, 1 to {MOST_RANKS}")
        programs[name] = Program(path, name, int(mark["ranks"]))
    elif mark["ranks"] is not None:
        raise ValueError(f"{where}: {name!r} has begun already; leave the number of ranks out")
    return programs[name]


def _line(text: str, offset: int) -> int:
    return text.count("\n", 0, offset) + 1
