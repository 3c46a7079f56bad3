"""Bagua in Lightning: `Trainer(strategy="bagua")` after `import bagua.lightning`.

Works with both packages of Lightning, `lightning` and `pytorch_lightning`, from 2.5 on. Their Trainers accept
strategies of their own package only: `BaguaStrategy` is for the one that is in use, `strategy_for` makes it for the
other.
"""

from __future__ import annotations

from bagua.lightning.packages import package_in_use, packages_in_use
from bagua.lightning.strategy import strategy_for

__all__ = ["BaguaStrategy", "strategy_for"]

BaguaStrategy = strategy_for(package_in_use())

for _package in packages_in_use():
    strategy_for(_package)  # which registers the name "bagua" there
