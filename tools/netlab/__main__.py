"""`python -m tools.netlab` from the root of the repository, or `python -m netlab` with tools/ on PYTHONPATH."""

from __future__ import annotations

import sys

from .cli import main

sys.exit(main())
