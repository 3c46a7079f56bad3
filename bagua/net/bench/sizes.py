"""Message sizes as nccl-tests spells them: parsing ("256M"), formatting ("256 MiB") and the series -b/-e/-f."""

from __future__ import annotations

import re

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_SPELLING = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([KMG])(?:iB?)?|B)?", re.IGNORECASE)

# 1 TiB: far above what fits in memory, low enough that a slip of the keyboard is caught as one.
MAX_SIZE_BYTES = 1 << 40


def parse_size(text: str) -> int:
    """Bytes of a size such as 8, "64K", "1.5M", "256MiB" or "1G"; K, M and G are powers of 1024."""
    match = _SPELLING.fullmatch(text.strip())
    if match is None:
        raise ValueError(
            f"size {text!r} is not a number with an optional suffix K, M or G; write for example 8, 64K, 256M or 1G"
            " (powers of 1024)"
        )
    number, unit = match.group(1), (match.group(2) or "").upper()
    scaled = float(number) * _UNITS[unit] if "." in number else int(number) * _UNITS[unit]
    size = int(scaled)
    if size != scaled:
        raise ValueError(f"size {text!r} is {scaled} bytes; give a whole number of bytes")
    if size > MAX_SIZE_BYTES:
        raise ValueError(f"size {text!r} is {size} bytes; the limit is {MAX_SIZE_BYTES} bytes (1 TiB)")
    return size


def format_size(size_bytes: int) -> str:
    """A size for people: "8 B", "64 KiB", "1.5 MiB"; exact, or with at most two decimals."""
    for suffix, unit in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size_bytes >= unit:
            return f"{size_bytes / unit:.2f}".rstrip("0").rstrip(".") + f" {suffix}"
    return f"{size_bytes} B"


def size_series(begin_bytes: int, end_bytes: int, factor: int) -> list[int]:
    """begin, begin * factor, ... up to and including end, as nccl-tests walks -b, -e and -f."""
    if begin_bytes < 1:
        raise ValueError(f"smallest size {begin_bytes} B is below the limit of 1 B; raise -b/--minbytes")
    if begin_bytes > end_bytes:
        raise ValueError(
            f"smallest size {format_size(begin_bytes)} is above the largest size {format_size(end_bytes)};"
            " lower -b/--minbytes or raise -e/--maxbytes"
        )
    sizes = []
    size = begin_bytes
    while size <= end_bytes:
        sizes.append(size)
        size *= factor
    return sizes
