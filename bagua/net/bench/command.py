"""What every kind of run of bagua-net-bench does around the run: how wrong options are told, and how it ends."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

from bagua.net.bench.errors import BenchError, UsageError

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


class OptionParser(argparse.ArgumentParser):
    """Says in one line what is wrong, where argparse's own prints the whole usage before it."""

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_USAGE, f"{self.prog}: error: {_with_help(self.prog, message)}\n")


def run_in_order(program: str, helpers: str, run: Callable[[], int]) -> int:
    """The exit code of `run`, with one line for what it raised. `helpers`: what has ended when it is interrupted."""
    # Slurm and torchrun end a job with SIGTERM; the helpers are then ended in order, as with Ctrl-C.
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        return run()
    except UsageError as error:
        return _complain(program, _with_help(program, str(error)), EXIT_USAGE)
    except BenchError as error:
        return _complain(program, str(error), EXIT_FAILED)
    except KeyboardInterrupt:
        return _complain(program, f"interrupted; all {helpers} are ended", EXIT_INTERRUPTED)
    finally:
        signal.signal(signal.SIGTERM, before)


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _with_help(program: str, message: str) -> str:
    return f"{message} (all options: {program} --help)"


def _complain(program: str, message: str, code: int) -> int:
    sys.stdout.flush()
    print(f"{program}: error: {message}", file=sys.stderr, flush=True)
    return code
