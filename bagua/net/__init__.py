"""The Python interface of the plugin: where its library is, and how to switch it on.

Importing it sets no variable, and loads neither torch nor native code. `import torch` and `import bagua` call
`activate`.
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
