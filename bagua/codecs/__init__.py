"""Compressions of tensors for communication, by name. Each is a Codec (bagua.codecs.codec), one file."""

from __future__ import annotations

from bagua.codecs.codec import Codec, dtype_names
from bagua.codecs.names import codec_names, get_codec

__all__ = ["Codec", "codec_names", "dtype_names", "get_codec"]
