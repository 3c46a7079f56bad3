"""The entry point of group `torch.backends`: `import torch` calls it in every process (unless
TORCH_DEVICE_BACKEND_AUTOLOAD=0), which is how a script that never heard of bagua gets the plugin."""

from __future__ import annotations


def autoload() -> None:
    """Importing this module has imported `bagua`, which has activated the plugin if that was asked for; this repeats
    it for a process that set the variables after `import bagua`."""
    from bagua.net.activation import activate_at_import

    activate_at_import()
