"""`Trainer(strategy="bagua")` without an import of ours. `import torch` calls `install` in every process, by an entry
point of group `torch.backends`. What it installs costs a look into a dictionary for each module that is imported. When
Lightning is imported, it makes the name known; the strategy itself is imported when somebody uses the name.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

# Where Lightning keeps its register of strategies, and the package that this is for.
_PACKAGE_OF = {"lightning.pytorch.strategies": "lightning.pytorch", "pytorch_lightning.strategies": "pytorch_lightning"}


def install() -> None:
    """Once for a process; again does nothing."""
    if not any(isinstance(finder, _StrategiesFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _StrategiesFinder())


class _StrategiesFinder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in _PACKAGE_OF:
            return None
        for finder in sys.meta_path:
            if finder is not self and (spec := finder.find_spec(fullname, path, target)) is not None:
                if spec.loader is not None:
                    spec.loader = _RegisteringLoader(spec.loader, _PACKAGE_OF[fullname])
                return spec
        return None


class _RegisteringLoader(Loader):
    """Loads as another does, which the module then names as its own, and registers our strategy."""

    def __init__(self, loader: Loader, package: str) -> None:
        self._loader = loader
        self._package = package

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        registry = getattr(module, "StrategyRegistry", None)
        if registry is not None and "bagua" not in registry:
            registry.register("bagua", self._make, description="Bagua's algorithms")

    def _make(self, **options: Any) -> Any:
        return importlib.import_module("bagua.lightning.strategy").strategy_for(self._package)(**options)
