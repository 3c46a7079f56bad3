"""Codecs by name."""

from __future__ import annotations

import functools
from collections.abc import Callable

from bagua.codecs.bf16 import Bf16
from bagua.codecs.codec import Codec
from bagua.codecs.fp8_e4m3 import Fp8E4M3
from bagua.codecs.int4 import Int4
from bagua.codecs.int8 import Int8

_CODECS: dict[str, Callable[[], Codec]] = {"bf16": Bf16, "fp8_e4m3": Fp8E4M3, "int4": Int4, "int8": Int8}
# The name that Bagua 0.9 has for `compression=`.
_ALIASES = {"MinMaxUInt8": "int8"}


def codec_names() -> list[str]:
    """The names of all codecs, sorted."""
    return sorted(_CODECS)


def get_codec(codec: str | Codec) -> Codec:
    """The codec of this name; every call returns the same object.

    Args:
        codec: one of `codec_names()`, or "MinMaxUInt8" for int8, or a Codec, which is returned as it is.

    Raises:
        ValueError: an unknown name; the error lists the known ones.
        TypeError: neither a name nor a Codec.
    """
    if isinstance(codec, Codec):
        return codec
    if not isinstance(codec, str):
        raise TypeError(f"codec is {codec!r}. Pass a name ({', '.join(codec_names())}) or a bagua.codecs.Codec.")
    name = _ALIASES.get(codec, codec)
    if name not in _CODECS:
        raise ValueError(f"Unknown codec {codec!r}. Known codecs: {', '.join(codec_names())}.")
    return _made(name)


@functools.cache
def _made(name: str) -> Codec:
    return _CODECS[name]()
