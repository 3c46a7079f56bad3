"""What Bagua-Net does in the processes of this host, read from their statistics pages.

`snapshot()` reads every process that the caller may look at, at one moment; `report(earlier, later)` makes rates of two
of them. Nothing in the observed processes runs or waits for that. `bagua-net stats`, `top` and `exporter` show it.
"""

from __future__ import annotations

from bagua.net.stats.errors import StatsError
from bagua.net.stats.rates import report
from bagua.net.stats.reports import CommReport, HostReport, ProcessReport, StreamReport
from bagua.net.stats.snapshots import Snapshot, snapshot

__all__ = ["CommReport", "HostReport", "ProcessReport", "Snapshot", "StatsError", "StreamReport", "report", "snapshot"]
