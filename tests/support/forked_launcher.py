"""Launchers in a process that is forked with torch imported, which takes most of the time of `python -m`.

The processes that a launcher starts are new ones, as ever, unless it is told to fork those as well. Each launcher has
one test that starts it as users do.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import itertools
import os
import signal
import subprocess
import sys
import traceback
import types
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from support.ranks import run_ranks


def run_launcher(
    module: str,
    words: Sequence[str],
    folder: Path,
    environment: Mapping[str, str],
    timeout: float,
    forks: bool = False,
) -> subprocess.CompletedProcess[str]:
    """
    Args:
        module: has `main`, which takes the words of the command line.
        folder: in which it runs.
        forks: so does what it starts, see fork_scripts.
    """
    (done,) = run_ranks(1, launch, module, list(words), str(folder), dict(environment), forks, timeout=timeout)
    return subprocess.CompletedProcess([module, *words], *done)


class _ForkedScript(subprocess.Popen[Any]):
    """`[env NAME=value] python [-u] script words`, or with `-m module`: a child of this process, as ever, which runs
    the script where others call exec."""

    def __init__(
        self,
        args: Sequence[str],
        *,
        env: Mapping[str, str],
        preexec_fn: Callable[[], None] | None = None,
        pass_fds: Sequence[int] = (),
        **more: Any,
    ) -> None:
        words = list(args)
        if words[0] == "env" and sys.executable in words:
            variables = words[1 : words.index(sys.executable)]
            env = {**env, **dict(one.split("=", 1) for one in variables)}
            words = words[1 + len(variables) :]
        if words[0] == sys.executable:
            preexec_fn = functools.partial(_be_script, words[1:], env, pass_fds, preexec_fn)
        super().__init__(args, env=env, preexec_fn=preexec_fn, pass_fds=pass_fds, **more)


def fork_scripts() -> None:
    """From now on, the launchers of this process start scripts with what it has imported."""
    handler = importlib.import_module("torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler")
    subprocess.Popen = handler.Popen = _ForkedScript  # type: ignore[misc]


def _be_script(
    words: Sequence[str], env: Mapping[str, str], descriptors: Sequence[int], before: Callable[[], None] | None
) -> NoReturn:
    if before is not None:
        before()
    os.environ.clear()
    os.environ.update(env)
    # As an interpreter begins.
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    for first, last in itertools.pairwise([2, *sorted(descriptors), os.sysconf("SC_OPEN_MAX")]):
        os.closerange(first + 1, last)  # that of the parent, too, which waits for exec
    run = "path"
    while words[0] in ("-u", "-m"):
        run = "module" if words[0] == "-m" else run
        words = words[1:]
    be_program(f"import runpy; runpy.run_{run}({words[0]!r}, run_name='__main__')", words[1:], words[0])


def be_program(text: str, words: Sequence[str], name: str = "-c") -> NoReturn:
    """Run it and end as the interpreter does."""
    warnings.resetwarnings()  # a rank makes errors of them
    sys.argv = [name, *words]
    sys.modules["__main__"] = types.ModuleType("__main__")
    # The interpreter's own way: it keeps the exception that ends the program, and ends as it does at the end of `main`.
    failed = ctypes.pythonapi.PyRun_SimpleString(text.encode())
    ctypes.pythonapi.Py_Exit(int(failed != 0))
    raise AssertionError("the process has ended")


def launch(
    module: str, words: list[str], folder: str, environment: Mapping[str, str], forks: bool
) -> tuple[int, str, str]:
    """As run_launcher, in a rank. Returns the exit status, and what was printed and told."""
    if forks:
        fork_scripts()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    warnings.resetwarnings()  # a rank makes errors of them
    with captured(1) as output, captured(2) as errors:
        status = _status(module, words)
    return status, output.read_text(), errors.read_text()


def _status(module: str, words: list[str]) -> int:
    try:
        return int(importlib.import_module(module).main(words) or 0)
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except Exception:
        traceback.print_exc()
        return 1


@contextlib.contextmanager
def captured(descriptor: int) -> Iterator[Path]:
    """The file to which all goes that this process and those that it starts write."""
    path = Path(f"/proc/self/fd/{os.memfd_create('printed')}")
    before = os.dup(descriptor)
    os.dup2(int(path.name), descriptor)
    try:
        yield path
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(before, descriptor)
