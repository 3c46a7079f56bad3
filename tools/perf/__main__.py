"""`make perf` runs `python -m perf` with tools/ on PYTHONPATH: the root would bring the source tree of bagua before the
installed package, which has the library."""

from __future__ import annotations

import sys

from .cli import main

sys.exit(main())
