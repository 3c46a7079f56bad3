"""What a user of bagua-net-bench is told when a run cannot go on."""

from __future__ import annotations


class BenchError(RuntimeError):
    """The message names the value, the cause and the remedy; the command prints it and exits with code 1."""


class ConnectionLostError(BenchError):
    """The other host's process has ended, or cannot be reached any more."""


class UsageError(ValueError):
    """An option or environment variable that no run could start with; exit code 2, as argparse does."""
