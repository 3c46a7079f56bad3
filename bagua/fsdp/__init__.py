"""Compressed communication for FSDP2:

    handle = bagua.fsdp.compress_communication(model)  # after fully_shard
    meter = bagua.fsdp.measure_communication(model)  # what steps wait for, with compression or without

docs/how-to/train/compress-fsdp.md says what is compressed and what it costs.
"""

from __future__ import annotations

from bagua.misuse import missing_torch

if (without_torch := missing_torch(__name__)) is not None:
    raise without_torch

from bagua.fsdp.compression import compress_communication
from bagua.fsdp.handle import CompressionHandle
from bagua.fsdp.waits import CommunicationMeter, StepWaits, measure_communication

__all__ = ["CommunicationMeter", "CompressionHandle", "StepWaits", "compress_communication", "measure_communication"]
