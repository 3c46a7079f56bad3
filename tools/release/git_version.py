"""The package's version, from the git tag: the metadata provider that pyproject.toml names.

    tag v1.2.0 checked out             1.2.0
    3 commits after tag v1.2.0         1.2.1.dev3+g1a2b3c4d
    before the first tag               1.0.0.dev57+g1a2b3c4d    (1.0.0 is `first` in pyproject.toml)
    files changed since the commit     ....dirty
    a source distribution              what its PKG-INFO says
    neither git nor PKG-INFO           1.0.0.dev0+unknown

Standard library only, so that a build without isolation needs nothing but scikit-build-core and pybind11;
setuptools-scm would be one more package on machines that cannot load any.
"""

from __future__ import annotations

import re
import subprocess
from email.parser import HeaderParser
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
_TAG = re.compile(r"v(\d+)\.(\d+)\.(\d+((?:a|b|rc)\d+)?)")


def dynamic_metadata(field: str, settings: dict[str, Any], _project: dict[str, Any] | None = None) -> str:
    """What scikit-build-core calls.

    Raises:
        ValueError: for another field than "version", or a tag that is not vMAJOR.MINOR.PATCH[a|b|rcN].
    """
    if field != "version":
        raise ValueError(f"git_version provides 'version', not {field!r}")
    return version_of(ROOT, first=settings["first"])


def version_of(root: Path, first: str) -> str:
    """
    Args:
        root: a checkout, or an unpacked source distribution.
        first: the version to be released first, used before there is a tag.
    """
    package_info = root / "PKG-INFO"
    if package_info.is_file():
        return HeaderParser().parsestr(package_info.read_text(encoding="utf-8"))["Version"]
    # A copy of the sources inside another project's checkout must not take that project's version.
    top = _git(root, "rev-parse", "--show-toplevel")
    if top is None or Path(top).resolve() != root.resolve():
        return f"{first}.dev0+unknown"
    dirty = bool(_git(root, "status", "--porcelain", "--untracked-files=no"))
    described = _git(root, "describe", "--tags", "--long", "--match", "v[0-9]*")
    if described is None:
        commits, commit = _git(root, "rev-list", "--count", "HEAD"), _git(root, "rev-parse", "--short=8", "HEAD")
        return _development(first, commits or "0", commit or "unknown", dirty)
    tag, distance, commit = described.rsplit("-", 2)
    parts = _TAG.fullmatch(tag)
    if parts is None:
        raise ValueError(f"tag {tag!r} is not a version; release tags are vMAJOR.MINOR.PATCH, e.g. v1.2.0")
    if distance == "0" and not dirty:
        return tag.removeprefix("v")
    following = int(re.match(r"\d+", parts[3])[0]) + (parts[4] is None)  # 1.2.0rc1 leads to 1.2.0
    return _development(f"{parts[1]}.{parts[2]}.{following}", distance, commit.removeprefix("g"), dirty)


def _development(release: str, commits: str, commit: str, dirty: bool) -> str:
    return f"{release}.dev{commits}+g{commit}{'.dirty' if dirty else ''}"


def _git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=30)
    except OSError:  # no git on this machine
        return None
    return done.stdout.strip() if done.returncode == 0 else None


if __name__ == "__main__":
    print(version_of(ROOT, first=""))
