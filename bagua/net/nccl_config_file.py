"""NCCL's configuration files: which there are, what they set, and our line in one of them.

[Note: how NCCL reads them] First the user's file: NCCL_CONF_FILE if it is set (NCCL 2.23 and newer), otherwise
~/.nccl.conf; then /etc/nccl.conf. Each line is NAME=VALUE, with nothing trimmed; from 2.26 on a line that starts with
`#` is a comment, and before that one more setting, of a name that nobody asks for. What is set already is not
replaced: the environment wins over the files, the user's file over the system's, and the first line over later ones.
That is why our line goes to the top, which leaves every other byte as it was.

Files are handled as bytes: a comment in whatever encoding survives.
"""

from __future__ import annotations

import os
import pwd
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

SYSTEM_FILE = Path("/etc/nccl.conf")

_VARIABLE = b"NCCL_NET_PLUGIN"
# Without "=": NCCL 2.25 and older know no comments, and take every line with "=" for a setting.
_MARK = b"# bagua-net: the next line was written by `bagua-net enable`; `bagua-net disable` removes both\n"
_SET_ASIDE = b"# bagua-net set aside: "


class ConfigFileError(RuntimeError):
    """The file cannot be read or changed, or must not be. The message names it, the cause and the remedy."""


@dataclass(frozen=True)
class ConfigSetting:
    name: str
    value: str
    file: Path


def user_file(environment: Mapping[str, str]) -> Path | None:
    """The user's file by the rules of NCCL 2.30; None if there is no home directory to look in."""
    named = environment.get("NCCL_CONF_FILE", "")
    if named:
        return Path(named)
    home = environment.get("HOME", "")
    return Path(home) / ".nccl.conf" if home else None


def password_database_file() -> Path | None:
    """Where NCCL before 2.30 looks: the home directory of the password database, whatever HOME says."""
    try:
        return Path(pwd.getpwuid(os.getuid()).pw_dir) / ".nccl.conf"
    except KeyError:
        return None


def config_files(environment: Mapping[str, str], system_file: Path | None = None) -> list[Path]:
    """Those that exist, in the order in which they win."""
    candidates = [user_file(environment), SYSTEM_FILE if system_file is None else system_file]
    return [path for path in candidates if path is not None and path.is_file()]


def read_settings(files: list[Path]) -> list[ConfigSetting]:
    """Everything that these files set, in effect order: of two lines for one name only the first is listed. A file
    that cannot be read is passed over, as NCCL does."""
    settings: dict[str, ConfigSetting] = {}
    for file in files:
        try:
            content = file.read_bytes()
        except OSError:
            continue
        for name, value in _assignments(content):
            settings.setdefault(os.fsdecode(name), ConfigSetting(os.fsdecode(name), os.fsdecode(value), file))
    return list(settings.values())


def enable(file: Path, plugin: str, *, force: bool) -> bool:
    """Makes `file` name the plugin; False if it does already. A NCCL_NET_PLUGIN line of the user's own is an error,
    or with `force` is set aside until `disable`."""
    before = _read(file)
    lines, _ = _without_our_setting(_lines(before))
    own = [line for line in lines if _is_plugin_line(line)]
    if own and not force:
        raise ConfigFileError(
            f"{file} sets {os.fsdecode(own[0].strip())} already\n"
            "Remove that line, or run `bagua-net enable --force`, which disables it until `bagua-net disable`."
        )
    rest = b"".join(_SET_ASIDE + line if _is_plugin_line(line) else line for line in lines)
    after = _MARK + _VARIABLE + b"=" + os.fsencode(plugin) + b"\n" + rest
    if after == before:
        return False
    _replace(file, after)
    return True


def disable(file: Path) -> bool:
    """Takes our line out and puts back what `enable --force` set aside; False if there was nothing of ours."""
    before = _lines(_read(file))
    lines, found = _without_our_setting(before)
    after = b"".join(line.removeprefix(_SET_ASIDE) for line in lines)
    if not found and after == b"".join(before):
        return False
    if after or file.is_symlink():
        _replace(file, after)
        return True
    try:
        file.unlink()
    except OSError as error:
        raise ConfigFileError(_no_access("removed", file, error)) from error
    return True


def _lines(content: bytes) -> list[bytes]:
    """With their ends. Not splitlines(): NCCL knows no line end but the line feed."""
    lines = [line + b"\n" for line in content.split(b"\n")]
    last = lines.pop().removesuffix(b"\n")
    return [*lines, last] if last else lines


def _assignments(content: bytes) -> list[tuple[bytes, bytes]]:
    pairs = []
    for line in _lines(content):
        name, equals, value = line.removesuffix(b"\n").removesuffix(b"\r").partition(b"=")
        if equals and not line.startswith(b"#"):
            pairs.append((name, value))
    return pairs


def _is_plugin_line(line: bytes) -> bool:
    return line.startswith(_VARIABLE + b"=")


def _without_our_setting(lines: list[bytes]) -> tuple[list[bytes], bool]:
    """What is left, and whether our line was there."""
    rest: list[bytes] = []
    found = follows_mark = False
    for line in lines:
        if line == _MARK:
            found = follows_mark = True
        elif follows_mark and _is_plugin_line(line):
            follows_mark = False
        else:
            follows_mark = False
            rest.append(line)
    return rest, found


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise ConfigFileError(_no_access("read", file, error)) from error


def _replace(file: Path, content: bytes) -> None:
    """At no moment is there a half-written file: jobs may be starting. A link stays one; mode and owner are kept."""
    # Imported here: activation, which runs in every `import torch`, only reads.
    import tempfile

    target = file.resolve()
    temporary: Path | None = None
    try:
        descriptor, name = tempfile.mkstemp(prefix=".nccl.conf-", dir=target.parent)
        temporary = Path(name)
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(content)
            stream.flush()
            if target.exists():
                kept = target.stat()
                if (kept.st_uid, kept.st_gid) != (os.getuid(), os.getgid()):
                    os.fchown(stream.fileno(), kept.st_uid, kept.st_gid)
                os.fchmod(stream.fileno(), kept.st_mode & 0o7777)
            else:
                # Other users' jobs read /etc/nccl.conf; mkstemp's 0600 would hide it from them.
                os.fchmod(stream.fileno(), 0o644)
            os.fsync(stream.fileno())
        temporary.replace(target)
    except OSError as error:
        if temporary is not None:
            temporary.unlink(missing_ok=True)
        raise ConfigFileError(_no_access("written", file, error)) from error


def _no_access(what: str, file: Path, error: OSError) -> str:
    if what == "written" and isinstance(error, FileNotFoundError) and file.resolve().parent.is_dir():
        # /proc, for one, says so of every new file.
        return f"{file} cannot be written: {file.resolve().parent} takes no new files\nName another in NCCL_CONF_FILE."
    if isinstance(error, PermissionError):
        remedy = "Run the command as the file's owner (sudo for --system), or name another file in NCCL_CONF_FILE."
    elif isinstance(error, FileNotFoundError):
        remedy = f"Create the directory {file.parent} first, or name another file in NCCL_CONF_FILE."
    else:
        remedy = "Fix the cause, or name another file in NCCL_CONF_FILE."
    return f"{file} cannot be {what} ({error.strerror})\n{remedy}"
