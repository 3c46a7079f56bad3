"""Type checkers accept what the documentation shows: README's script passes mypy --strict and basedpyright.

`make lint` runs it in the environment that bagua is installed in, after mypy has read torch for the package: with its
settings, which have more than --strict, and its cache, this takes a second in place of twenty.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
CHECKERS = {
    "mypy": [
        *("mypy", "--strict", "--config-file", str(REPOSITORY / "pyproject.toml")),
        *("--cache-dir", str(REPOSITORY / ".mypy_cache")),
    ],
    # What it calls a warning is about torch, whose types are partly unknown.
    "basedpyright": ["basedpyright", "--level", "error", "--pythonpath", sys.executable],
}
# Of what with_bagua returns, the own type is known: any name would be an attribute of a mere nn.Module.
RIGHT = "features: int = model.in_features\n"
WRONG = ["text: str = model.in_features", "model.no_such_method()", "bagua.with_bagua(3, [optimizer])"]


def script_of_the_readme() -> str:
    blocks = re.findall(r"^```python\n(# train\.py\b.*?)^```$", (REPOSITORY / "README.md").read_text(), re.M | re.S)
    if len(blocks) != 1:
        raise SystemExit(f"README.md has {len(blocks)} Python blocks that begin with `# train.py`, not one.")
    return str(blocks[0])


def errors_of(checker: str, folder: Path) -> tuple[set[tuple[str, str]], str]:
    """(file, line) of each error, and everything that the checker said."""
    command = [sys.executable, "-m", *CHECKERS[checker], "train.py", "wrong.py"]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    return set(re.findall(r"(\w+\.py):(\d+)(?::\d+)?(?: -)?:? error", result.stdout)), result.stdout + result.stderr


def main() -> int:
    script = script_of_the_readme()
    first = len(script.splitlines()) + 1
    expected = {("wrong.py", str(first + number)) for number in range(len(WRONG))}
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "train.py").write_text(script + RIGHT)
        Path(folder, "wrong.py").write_text("".join(f"{line}\n" for line in [*script.splitlines(), *WRONG]))
        for checker in CHECKERS:
            found, said = errors_of(checker, Path(folder))
            if found != expected:
                failed = True
                print(f"{checker}: errors in {sorted(found)}, expected in {sorted(expected)}\n{said}", file=sys.stderr)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
