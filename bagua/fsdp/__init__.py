"""Compressed communication for FSDP2:

    handle = bagua.fsdp.compress_communication(model)  # after fully_shard

docs/how-to/train/compress-fsdp.md says what is compressed and what it costs.
"""

from __future__ import annotations

from bagua.fsdp.compression import compress_communication
from bagua.fsdp.handle import CompressionHandle

__all__ = ["CompressionHandle", "compress_communication"]
