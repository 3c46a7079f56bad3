"""Does the bagua that is installed here work? Run by the Python of an environment that holds nothing else.

It needs neither torch nor a GPU: the commands start, every compiled file loads and reports the version of the package,
the plugin carries a ring between two processes, and bytes arrive as they were sent.
"""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import bagua
from bagua.net import _core
from bagua.net.library import driver_path, library_path

COMMANDS = Path(sys.executable).parent


def command(*words: str, cwd: str, statuses: tuple[int, ...] = (0,)) -> str:
    done = subprocess.run([COMMANDS / words[0], *words[1:]], capture_output=True, text=True, timeout=120, cwd=cwd)
    if done.returncode not in statuses:
        raise SystemExit(f"{' '.join(words)} exited with status {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def main() -> None:
    origin = Path(bagua.__file__).resolve()
    if not origin.is_relative_to(Path(sys.prefix).resolve()):
        raise SystemExit(f"bagua was imported from {origin}, which is outside this environment")
    with tempfile.TemporaryDirectory() as folder:
        reported = command("bagua-net", "--version", cwd=folder).split()[-1]
        versions = {bagua.__version__, importlib.metadata.version("bagua"), _core.version(), reported}
        if len(versions) != 1:
            raise SystemExit(f"the parts of the package report different versions: {', '.join(sorted(versions))}")
        for path in (library_path(), driver_path()):
            if not Path(path).is_file():
                raise SystemExit(f"the package lacks {path}")
        command("bagua-net", "doctor", cwd=folder, statuses=(0, 1))  # 1: this environment has no NCCL
        result = Path(folder, "result.json")
        sizes = ("-b", "1K", "-e", "1M", "-f", "32")
        command("bagua-net-bench", *sizes, "--time-budget", "6", "--json", str(result), cwd=folder)
        if not json.loads(result.read_text()):
            raise SystemExit("bagua-net-bench wrote no figures")
    print(versions.pop())


if __name__ == "__main__":
    main()
