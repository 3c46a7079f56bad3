"""Bagua's compressed communication for users of torch's DistributedDataParallel:

    ddp.register_comm_hook(None, bagua.comm_hooks.bytegrad)

docs/how-to/train/torch-ddp-hooks.md says which hook is for what.
"""

from __future__ import annotations

from bagua.misuse import missing_torch

if (without_torch := missing_torch(__name__)) is not None:
    raise without_torch

from bagua.comm_hooks.byte_hooks import ByteGradState, bytegrad, hierarchical_bytegrad
from bagua.comm_hooks.error_feedback import ErrorFeedbackState, error_feedback_bytegrad

__all__ = ["ByteGradState", "ErrorFeedbackState", "bytegrad", "error_feedback_bytegrad", "hierarchical_bytegrad"]
