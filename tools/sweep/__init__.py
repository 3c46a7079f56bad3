"""`make sweep`: which algorithm is the fastest at which rate and delay of the network?

See docs/how-to/compare-algorithms.md.

Networks are tools/netlab's: each rank is a host of its own, in a network namespace. In each network all algorithms of
tools/train/core_comparison train in turns, in one process group.
"""

from __future__ import annotations

import sys
from pathlib import Path

# The package is found by tools/ on the path, which has netlab, too; core_comparison lies in the folder of its
# script. At the end: nothing there may hide a package.
sys.path.append(str(Path(__file__).resolve().parents[1] / "train"))
