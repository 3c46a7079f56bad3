"""What compressing gradients to 8 bits would cost on this device: measured in some milliseconds, for an estimate of
what it would gain."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from bagua.codecs import get_codec

_ELEMENTS = 1 << 20
_REPETITIONS = 3


def compression_s_per_byte(device: torch.device, ranks: int) -> float:
    """Seconds per byte of float32 gradients, of one exchange among so many ranks: all is compressed, what comes for
    this rank's part is summed and compressed again, and all is decompressed. The fastest of a few repetitions."""
    count = max(2, ranks)
    chunk = max(1, _ELEMENTS // count)
    values = torch.ones(chunk * count, device=device)
    result = torch.empty_like(values)

    codec = get_codec("int8")

    def exchange() -> None:
        sent = codec.compress(values, count)
        codec.decompress_reduce_compress(sent, chunk, average=True)
        codec.decompress(sent, result)

    exchange()
    return min(_seconds(exchange, device) for _ in range(_REPETITIONS)) / values.nbytes


def _seconds(run: Callable[[], None], device: torch.device) -> float:
    begin = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begin
