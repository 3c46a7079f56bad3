"""What compressing gradients would cost on this device: measured in some milliseconds, for an estimate of what it would
gain."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from bagua.codecs import get_codec

_ELEMENTS = 1 << 20
_REPETITIONS = 3


def compressed_share(codec: str) -> float:
    """Of the bytes of float32 gradients that the codec sends."""
    return get_codec(codec).compressed_bytes(_ELEMENTS) / (4 * _ELEMENTS)


def compression_s_per_byte(codec: str, device: torch.device, ranks: int) -> float:
    """Seconds per byte of float32 gradients, of one exchange among so many ranks: all is compressed, what comes for
    this rank's part is summed and compressed again, and all is decompressed. The fastest of a few repetitions."""
    count = max(2, ranks)
    chunk = max(1, _ELEMENTS // count)
    values = torch.ones(chunk * count, dtype=torch.float32, device=device)
    result = torch.empty_like(values)
    made = get_codec(codec)

    def exchange() -> None:
        sent = made.compress(values, count)
        made.decompress_reduce_compress(sent, chunk, average=True)
        made.decompress(sent, result)

    exchange()
    return min(_seconds(exchange, device) for _ in range(_REPETITIONS)) / values.nbytes


def _seconds(run: Callable[[], None], device: torch.device) -> float:
    begin = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begin
