"""Who else may use or change BAGUA_NET_SECRET_FILE: what the library warns of in its log (net_plugin/crypto)."""

from __future__ import annotations

import stat
from pathlib import Path

SECRET_FILE = "BAGUA_NET_SECRET_FILE"


def warnings(file: str) -> list[tuple[str, str]]:
    """What is wrong with the rights of the file, each with the remedy; nothing of what is no file or "": not set."""
    try:
        mode = Path(file).stat().st_mode
    except OSError:
        return []
    if not stat.S_ISREG(mode):
        return []
    found = []
    if mode & stat.S_IROTH:
        found.append(
            (f"every user of this host can read {file}, and join the job", f"unless they may: chmod o-r {file}")
        )
    if mode & stat.S_IWGRP:
        found.append((f"the group of {file} can change it, and join the job", f"unless it may: chmod g-w {file}"))
    return found
