"""What compressing gradients would cost on this device: measured on a few elements, for an estimate of what it would
gain."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from bagua.codecs import Codec, get_codec

# On a GPU, with fewer elements launches would take the time.
_ELEMENTS = 1 << 20
# On CPUs, chunks whose operations torch runs on one thread, as those of less than 32768 elements: where the cores are
# busy, several threads wait for each other a hundred times as long as they work, in each of some hundred operations. A
# few chunks cost as much for each byte as many.
_CHUNK_ON_CPU = 1 << 14
_MOST_CHUNKS_ON_CPU = 4
_REPETITIONS = 3


def compressed_share(codec: str) -> float:
    """Of the bytes of float32 gradients that the codec sends."""
    return get_codec(codec).compressed_bytes(_ELEMENTS) / (4 * _ELEMENTS)


def compression_s_per_byte(
    codec: str | Codec, device: torch.device, ranks: int, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Seconds per byte of float32 gradients, of one exchange among so many ranks: all is compressed, what comes for
    this rank's part is summed and compressed again, and all is decompressed. The fastest of a few repetitions. On CPUs
    this is of one thread, and the work does not grow with the ranks.

    Args:
        ranks: their number; one counts as two.
    """
    if device.type == "cpu":
        count, chunk = max(2, min(ranks, _MOST_CHUNKS_ON_CPU)), _CHUNK_ON_CPU
    else:
        count = max(2, ranks)
        chunk = max(1, _ELEMENTS // count)
    values = torch.ones(chunk * count, dtype=torch.float32, device=device)
    result = torch.empty_like(values)
    made = get_codec(codec)

    def exchange() -> None:
        sent = made.compress(values, count)
        made.decompress_reduce_compress(sent, chunk, average=True)
        made.decompress(sent, result)

    def seconds() -> float:
        begin = clock()
        exchange()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return clock() - begin

    seconds()  # allocations, and kernels that are compiled
    return min(seconds() for _ in range(_REPETITIONS)) / values.nbytes
