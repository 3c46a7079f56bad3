"""Markdown tables, and figures as text."""

from __future__ import annotations

from collections.abc import Sequence

from bagua.net.bench.api import Figure, Label

_BINARY = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


_BACKENDS = {
    "plugin": "Bagua-Net",
    "plugin_one_stream": "Bagua-Net, one connection",
    "plugin_without_workers": "Bagua-Net without workers",
    "plugin_bytegrad_flat": "Bagua-Net, bytegrad",
    "plugin_bytegrad_int4": "Bagua-Net, bytegrad int4",
    "nccl": "NCCL",
    "nccl_tuned": "NCCL, hand-tuned",
    "nccl_tuned_best": "NCCL, best of nine",
    "nccl_t2s2_8ch": "NCCL, t2s2 8ch",
    "nccl_shared_memory": "NCCL, shared memory",
    "bare": "plain sockets",
    "raw": "raw TCP",
}


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def size(size_bytes: int) -> str:
    for factor, unit in _BINARY:
        if size_bytes >= factor and size_bytes % factor == 0:
            return f"{size_bytes // factor} {unit}"
    return f"{size_bytes} B"


def label(name: str, value: Label) -> str:
    """A label's value in a table."""
    if value is None:
        return "no limit" if name == "rate_gbps" else "-"
    if name.endswith("_bytes"):
        return size(int(value))
    if name == "elements":
        return f"{int(value) >> 20} Mi"
    if name in ("backend", "baseline"):
        return _BACKENDS.get(str(value), str(value))
    return str(value)


def figure(one: Figure, *, unit: bool = False) -> str:
    """The median with the spread, where one was taken."""
    suffix = "x" if one.unit == "x" else f" {one.unit}" if unit else ""
    spread = "" if one.low is None or one.high is None else f" ({_number(one.low, one)}-{_number(one.high, one)})"
    return f"{_number(one.median, one)}{suffix}{spread}"


def _number(value: float, one: Figure) -> str:
    """Ratios have at least two decimals."""
    text = f"{value:.10g}"
    return f"{value:.2f}" if one.unit == "x" and len(text.partition(".")[2]) < 2 else text
