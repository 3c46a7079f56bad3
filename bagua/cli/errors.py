"""What a command or launcher tells its user when it cannot go on."""

from __future__ import annotations

EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_OF_SIGNAL = 128  # plus the number of the signal, as shells report it
EXIT_INTERRUPTED = EXIT_OF_SIGNAL + 2  # Ctrl-C


class CommandError(Exception):
    """The message is printed after the command's name; it names the value, the cause and the remedy."""

    def __init__(self, message: str, exit_code: int = EXIT_FAILURE) -> None:
        super().__init__(message)
        self.exit_code = exit_code
