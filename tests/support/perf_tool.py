"""tools/perf as a module, and small git repositories whose plugin "builds" in no time.

`tools` holds programs and no installed package, so it goes behind everything else on the path.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TOOLS = Path(__file__).resolve().parents[2] / "tools"
if str(TOOLS) not in sys.path:
    sys.path.append(str(TOOLS))

# The library is the file `speed`, which the fake driver reads: by this number its times are multiplied.
_CMAKE_LISTS = """\
cmake_minimum_required(VERSION 3.25)
project(stand_in LANGUAGES NONE)
file(MAKE_DIRECTORY ${CMAKE_BINARY_DIR}/net_plugin)
add_custom_target(
  nccl-net COMMAND ${CMAKE_COMMAND} -E copy ${CMAKE_SOURCE_DIR}/speed ${CMAKE_BINARY_DIR}/net_plugin/libnccl-net.so)
"""


class Repository:
    """A git repository of its own; the user's git settings do not reach it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir()
        self.git("init", "--quiet", "--initial-branch", "main")

    def git(self, *words: str) -> str:
        identity = ["-c", "user.name=A Tester", "-c", "user.email=tester@example.com", "-c", "commit.gpgsign=false"]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
        environment |= {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
        command = ["git", "-C", str(self.root), *identity, *words]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
        return done.stdout.strip()

    def commit(self, speed: str = "1", cmake_lists: str = _CMAKE_LISTS) -> str:
        """Its sha."""
        (self.root / "CMakeLists.txt").write_text(cmake_lists, encoding="utf-8")
        (self.root / "speed").write_text(speed, encoding="utf-8")
        self.git("add", ".")
        self.git("commit", "--quiet", "--allow-empty", "--message", f"speed {speed}")
        return self.git("rev-parse", "HEAD")
