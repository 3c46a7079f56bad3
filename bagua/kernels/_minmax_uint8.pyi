"""MinMaxUInt8 for memory of the CPU, compiled. Addresses are integers; types are 0 fp32, 1 fp16, 2 bf16.

`instructions` "" takes the best of the processor; "portable", "avx2" and "avx512" raise ValueError where there is none.
"""

INSTRUCTIONS: str  # the best ones of this processor

def compress(
    source: int,
    type: int,  # noqa: A002 (the name in C++)
    chunks: int,
    elements: int,
    block: int,
    stride: int,
    out: int,
    threads: int,
    instructions: str,
) -> None: ...
def decompress(
    compressed: int,
    target: int,
    type: int,  # noqa: A002
    accumulate: bool,
    chunks: int,
    elements: int,
    block: int,
    stride: int,
    threads: int,
    instructions: str,
) -> None: ...
def decompress_reduce_compress(
    received: int,
    average: bool,
    versions: int,
    elements: int,
    block: int,
    stride: int,
    out: int,
    threads: int,
    instructions: str,
) -> None: ...
