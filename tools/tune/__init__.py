"""How good is the search of `with_bagua(..., autotune=True)`?

    PYTHONPATH=tools python -m tune record --out build/tune       every setting and the search itself, in real networks
    PYTHONPATH=tools python -m tune simulate build/tune/*.json    the search on recorded turns, many times

`record` needs root: each rank is a host of tools/netlab.
"""

from __future__ import annotations

import sys
from pathlib import Path

# core_comparison and rank_team lie in the folder of their scripts. At the end: nothing there may hide a package.
sys.path.append(str(Path(__file__).resolve().parents[1] / "train"))
