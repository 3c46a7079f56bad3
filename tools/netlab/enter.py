"""Runs a command inside a network namespace: `python -I -S enter.py NETNS_PATH PARENT_PID INTERFACES CPUS COMMAND...`.

A program of its own, started by Lab.start, because code between fork and exec of a process that has threads
(preexec_fn) may deadlock. Only the standard library, and little of it: it starts in some 15 ms.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys

_CLONE_NEWNET = 0x40000000
_CLONE_NEWNS = 0x00020000
_MS_REC = 0x4000
_MS_BIND = 0x1000
_MS_SLAVE = 1 << 19
_PR_SET_PDEATHSIG = 1
_CGROUPS = "/sys/fs/cgroup"

# Shells' convention for "cannot be started"; 125 is ours for "the namespace could not be entered".
_EXIT_NOT_ENTERED = 125
_EXIT_NOT_EXECUTABLE = 126
_EXIT_NOT_FOUND = 127

_libc = ctypes.CDLL(None, use_errno=True)


def _checked(result: int, step: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{step}: {os.strerror(number)}")


def _mount(source: str, target: str, kind: str, flags: int) -> None:
    _checked(
        _libc.mount(source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), None),
        f"mount {source or kind} on {target}",
    )


def _die_with_parent(parent_pid: int) -> None:
    _checked(_libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent_pid:  # it died before the call above
        os._exit(_EXIT_NOT_ENTERED)


def _show_own_interfaces(interfaces: str) -> None:
    """Replaces /sys by one of this namespace: /sys/class/net shows the interfaces of the namespace that mounted it,
    and NCCL and our plugin read speed and MTU there. The cgroup tree, a mount below /sys, is carried over, since
    programs size their thread pools by it.

    `interfaces` has a folder for each interface that /sys shall show with other entries than the kernel's.
    """
    _checked(_libc.unshare(_CLONE_NEWNS), "unshare(CLONE_NEWNS)")
    _mount("", "/", "none", _MS_SLAVE | _MS_REC)
    cgroups = os.open(_CGROUPS, os.O_PATH | os.O_DIRECTORY) if os.path.ismount(_CGROUPS) else None
    _mount("sysfs", "/sys", "sysfs", 0)
    if cgroups is not None:
        _mount(f"/proc/self/fd/{cgroups}", _CGROUPS, "none", _MS_BIND | _MS_REC)
        os.close(cgroups)
    with os.scandir(interfaces) as folders:
        for folder in folders:
            with contextlib.suppress(FileNotFoundError):  # the interface was removed
                _show_instead(folder.path, os.path.realpath(f"/sys/class/net/{folder.name}"))


def _show_instead(folder: str, shown: str) -> None:
    """Puts `folder` in the place of an interface's in /sys, where nothing can be created. Entries that it lacks are
    links to the kernel's, which are at `kernel` in it."""
    kernels = os.open(shown, os.O_PATH | os.O_DIRECTORY)
    _mount(folder, shown, "none", _MS_BIND)
    _mount(f"/proc/self/fd/{kernels}", f"{shown}/kernel", "none", _MS_BIND)
    os.close(kernels)
    with os.scandir(f"{shown}/kernel") as entries:
        for entry in entries:
            # A link of the kernel's is relative to where it was.
            target = os.readlink(entry.path) if entry.is_symlink() else f"kernel/{entry.name}"  # noqa: PTH115 - importing pathlib takes long
            with contextlib.suppress(FileExistsError):  # the folder's own, or made by another process of this host
                os.symlink(target, f"{shown}/{entry.name}")  # noqa: PTH211


def main(arguments: list[str]) -> None:
    netns_path, parent_pid, interfaces, cpus, *command = arguments
    try:
        _die_with_parent(int(parent_pid))
        netns = os.open(netns_path, os.O_RDONLY | os.O_CLOEXEC)
        _checked(_libc.setns(netns, _CLONE_NEWNET), f"setns({netns_path})")
        os.close(netns)
        _show_own_interfaces(interfaces)
        if cpus:
            os.sched_setaffinity(0, [int(cpu) for cpu in cpus.split(",")])
    except OSError as error:
        print(f"netlab: cannot enter the network namespace: {error.strerror}", file=sys.stderr, flush=True)
        os._exit(_EXIT_NOT_ENTERED)
    try:
        os.execvp(command[0], command)
    except FileNotFoundError:
        print(f"netlab: command {command[0]!r} not found", file=sys.stderr, flush=True)
        os._exit(_EXIT_NOT_FOUND)
    except OSError as error:
        print(f"netlab: command {command[0]!r} cannot be started: {error.strerror}", file=sys.stderr, flush=True)
        os._exit(_EXIT_NOT_EXECUTABLE)


if __name__ == "__main__":
    main(sys.argv[1:])
