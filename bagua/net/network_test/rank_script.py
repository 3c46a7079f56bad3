"""What the launcher starts on every rank, by its path: launchers of Python scripts and others take it alike."""

import sys
from pathlib import Path

if __name__ == "__main__":
    # Python puts the folder of a script first, where modules of this package would hide others of the same name.
    sys.path[:] = [entry for entry in sys.path if not entry or Path(entry).resolve() != Path(__file__).resolve().parent]
    from bagua.net.network_test.rank import main

    sys.exit(main(sys.argv[1:]))
