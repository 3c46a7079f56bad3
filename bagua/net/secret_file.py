"""What encrypts the plugin's traffic, and who else may use or change BAGUA_NET_SECRET_FILE: what the library warns
of in its log (net_plugin/crypto)."""

from __future__ import annotations

import stat
from collections.abc import Mapping
from pathlib import Path

SECRET_FILE = "BAGUA_NET_SECRET_FILE"
_ENCRYPTION = "BAGUA_NET_ENCRYPTION"


def cipher(environment: Mapping[str, str]) -> str:
    """What the plugin's traffic is encrypted with; "": it is not."""
    value = environment.get(_ENCRYPTION, "").strip().lower()
    if value in ("", "0"):
        return ""
    return "ChaCha20-Poly1305" if value == "chacha20" else "AES-256-GCM, or ChaCha20-Poly1305 without AES"


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
