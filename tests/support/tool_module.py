"""Scripts of tools/ and examples/ as modules: they are in no package."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

_REPOSITORY = Path(__file__).resolve().parents[2]


def load_script(path: str) -> ModuleType:
    """`path` is that of the script in the repository. It is loaded anew by every call."""
    file = _REPOSITORY / path
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
