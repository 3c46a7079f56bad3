"""Small git repositories."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path


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

    def commit(self, text: str = "1") -> str:
        """Its sha."""
        (self.root / "file").write_text(text, encoding="utf-8")
        self.git("add", ".")
        self.git("commit", "--quiet", "--allow-empty", "--message", text)
        return self.git("rev-parse", "HEAD")
