"""Bagua-Net, the NCCL network plugin, seen from Python: where it is, and how NCCL is made to take it.

No torch and no native code is imported here, and nothing is set: `import torch` and `import bagua` call `activate`.
"""

from __future__ import annotations

from bagua.env import EnvironmentValueError
from bagua.net.activation import ActivationError, ActivationResult, ActivationState, KeptSetting, activate, environment
from bagua.net.library import MissingFileError, library_path
from bagua.net.plugin_setting import PLUGIN_NAME, PluginPathError

__all__ = [
    "PLUGIN_NAME",
    "ActivationError",
    "ActivationResult",
    "ActivationState",
    "EnvironmentValueError",
    "KeptSetting",
    "MissingFileError",
    "PluginPathError",
    "activate",
    "environment",
    "library_path",
]
