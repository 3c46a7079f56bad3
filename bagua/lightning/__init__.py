"""Bagua in Lightning: `Trainer(strategy="bagua")` after `import bagua.lightning`.

Works with both packages of Lightning, `lightning` and `pytorch_lightning`, from 2.5 on. Their Trainers accept
strategies of their own package only: `BaguaStrategy` is for the one that is in use, `strategy_for` makes it for the
other; so do `CommunicationMonitor` and `monitor_for`. `bagua.lightning.utilities` needs neither.
"""

from __future__ import annotations

from typing import Any

from bagua.lightning.packages import package_in_use, packages_in_use

__all__ = ["BaguaStrategy", "CommunicationMonitor", "monitor_for", "strategy_for"]

try:
    _package = package_in_use()
except ImportError:
    pass  # those who ask for the strategy are told
else:
    from bagua.lightning.monitor import monitor_for
    from bagua.lightning.strategy import strategy_for

    BaguaStrategy, CommunicationMonitor = strategy_for(_package), monitor_for(_package)
    for _package in packages_in_use():
        strategy_for(_package)  # which registers the name "bagua" there


def __getattr__(name: str) -> Any:
    if name in __all__:
        package_in_use()  # raises
    raise AttributeError(f"module {__name__} has no attribute {name!r}")
