"""What each NCCL release does with network plugins: which table it takes, and how it reads NCCL_NET_PLUGIN."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

OLDEST_TABLE = 5
NEWEST_TABLE = 12

# First release that looks for a table, newest first; a release takes the newest table that it knows.
_FIRST_RELEASE_OF_TABLE = (
    ((2, 30), 12),
    ((2, 28), 11),
    ((2, 26), 10),
    ((2, 24), 9),
    ((2, 20), 8),
    ((2, 19), 7),
    ((2, 13), 6),
    ((2, 12), 5),
)
_NEWEST_KNOWN = (2, 30)
_FIRST_WITH_PATH = (2, 21)
_FIRST_WITH_CONFIG_VARIABLE = (2, 23)
_FIRST_WITH_HOME_VARIABLE = (2, 30)


class NcclRelease(NamedTuple):
    """Compares like a tuple: NcclRelease(2, 28, 9) < NcclRelease(2, 30, 7)."""

    major: int
    minor: int
    patch: int

    @classmethod
    def from_code(cls, code: int) -> NcclRelease:
        """What ncclGetVersion returns: 2804 for 2.8.4, and from 2.9 on 22809 for 2.28.9."""
        if code < 10000:
            return cls(code // 1000, code % 1000 // 100, code % 100)
        return cls(code // 10000, code % 10000 // 100, code % 100)

    @classmethod
    def from_text(cls, text: str) -> NcclRelease | None:
        """ "2.28.9", or "2.28.9+cuda12.9"; None if it is no version."""
        parts = text.split("+")[0].split(".")
        try:
            major, minor, patch = (int(part) for part in (*parts, "0", "0")[:3])
        except ValueError:
            return None
        return cls(major, minor, patch)

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}.{self.patch}"

    @property
    def table(self) -> int | None:
        """The newest table that this release looks for and the library has; None if there is none."""
        for first, table in _FIRST_RELEASE_OF_TABLE:
            if self[:2] >= first:
                return table
        return None

    @property
    def is_newer_than_known(self) -> bool:
        return self[:2] > _NEWEST_KNOWN

    @property
    def takes_path(self) -> bool:
        """Whether NCCL_NET_PLUGIN may be a path. Older ones make `libnccl-net-<value>.so` of it in any case."""
        return self[:2] >= _FIRST_WITH_PATH

    @property
    def reads_config_variable(self) -> bool:
        """Whether NCCL_CONF_FILE names the configuration file."""
        return self[:2] >= _FIRST_WITH_CONFIG_VARIABLE

    @property
    def reads_home_variable(self) -> bool:
        """Whether ~/.nccl.conf is looked for under $HOME; older ones ask the password database."""
        return self[:2] >= _FIRST_WITH_HOME_VARIABLE

    @property
    def forgets_plugin_name(self) -> bool:
        """After the last communicator these open the default libnccl-net.so, and not NCCL_NET_PLUGIN, again."""
        return self[:2] in ((2, 28), (2, 29))


def wheel_release(search_path: Iterable[str] | None = None) -> tuple[str, NcclRelease] | None:
    """Name and release of the NCCL wheel that torch brings, by its metadata: this runs in `import torch`."""
    for directory in sys.path if search_path is None else search_path:
        for metadata in sorted(Path(directory or ".").glob("nvidia_nccl_cu*.dist-info")):
            name, _, version = metadata.name.removesuffix(".dist-info").partition("-")
            release = NcclRelease.from_text(version)
            if release is not None:
                return name.replace("_", "-"), release
    return None
