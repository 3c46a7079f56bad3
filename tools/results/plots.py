"""The plots of the benchmark page: one family, readable at 700 pixels."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

from bagua.net.bench.api import Figure, ResultFile

from .markdown import size
from .reference import Results

# Okabe and Ito's colours, which all readers tell apart.
_BACKENDS = {
    "plugin": ("Bagua-Net", "#0072B2"),
    "nccl_tuned_best": ("NCCL, best of\nnine settings", "#D55E00"),
    "nccl_tuned": ("NCCL, 2 threads x 2 sockets, 8 channels", "#D55E00"),
    "nccl": ("NCCL, default", "#555555"),
}
# Where the lines of all-reduce on two GPUs have their names: size in bytes, GB/s.
_LABELS = {"plugin": (1 << 25, 27.5), "nccl_tuned_best": (1 << 30, 13.5), "nccl": (1 << 30, 5.5)}
_STYLE = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "axes.titlesize": 9}
_ALGORITHMS = {
    "torch_ddp": "torch DDP",
    "ddp_fp16_hook": "DDP, fp16 hook",
    "ddp_powersgd_hook": "DDP, PowerSGD hook",
    "bytegrad": "bytegrad",
    "qadam": "qadam",
    "decentralized": "decentralized",
    "decentralized_shift_one": "decentralized, shift_one",
    "low_precision_decentralized": "low_precision_\ndecentralized",
    "async": "async",
}


def write_plots(folder: Path, results: Results) -> None:
    with plt.rc_context(_STYLE):
        _save(_all_reduce(results), folder / "all-reduce.png", "H200s of one host, TCP over loopback.")
        _save(_vgg16(results), folder / "vgg16.png", "bf16, 32 pictures a GPU. H200s of one host, TCP over loopback.")
        _save(
            _algorithms(results["sweep-2gpu"]),
            folder / "algorithms.png",
            "VGG16, two H200s, emulated networks; one-way delay. async does not wait; at 1 Gb/s no average ended.",
        )


def _save(figure: Any, path: Path, caption: str) -> None:
    figure.supxlabel(caption, fontsize=7, color="0.35", x=0.01, ha="left")
    figure.savefig(path, dpi=200, metadata={"Software": None})
    plt.close(figure)


def _size_of(one: Figure) -> int:
    return int(one.case["size_bytes"] or 0)


def _all_reduce(results: Results) -> Any:
    figure, axes = plt.subplots(1, 2, figsize=(7, 3.5), sharey=True, layout="constrained")
    for axis, gpus in zip(axes, (2, 4), strict=True):
        result = results[f"allreduce-{gpus}gpu"]
        for backend in ("plugin", "nccl_tuned_best", "nccl"):
            name, colour = _BACKENDS[backend]
            points = [one for one in result.select("busbw", backend=backend) if _size_of(one) >= 1 << 10]
            sizes = [_size_of(one) for one in points]
            axis.plot(sizes, [one.median for one in points], color=colour, marker="o", markersize=3, clip_on=False)
            if gpus == 2:
                axis.text(*_LABELS[backend], name, color=colour, fontsize=8, ha="right", va="center")
        axis.set_xscale("log", base=2)
        ticks = [1 << power for power in (10, 16, 20, 24, 28)]
        axis.set_xticks(ticks, [size(tick).replace(" ", "\n") for tick in ticks])
        axis.set_xlim(1 << 10, 1 << 30)
        axis.set_title(f"{gpus} GPUs", loc="left")
        axis.set_xlabel("message size")
    axes[0].set_ylabel("bus bandwidth (GB/s)")
    speedups = [results[f"allreduce-{gpus}gpu"].find("speedup", baseline="nccl", size_bytes=1 << 28) for gpus in (2, 4)]
    figure.suptitle(
        "All-reduce of 256 MiB on two and four GPUs: {:.1f}x and {:.1f}x as fast as with NCCL's default".format(
            *(one.median for one in speedups)
        ),
        fontsize=10, x=0.01, ha="left",
    )  # fmt: skip
    return figure


def _vgg16(results: Results) -> Any:
    figure, axes = plt.subplots(1, 2, figsize=(7, 2.6), sharex=True, layout="constrained")
    for axis, gpus in zip(axes, (2, 4), strict=True):
        bars = results[f"vgg16-ddp-{gpus}gpu"].select("step_time")[::-1]
        for y, one in enumerate(bars):
            name, colour = _BACKENDS[str(one.case["backend"])]
            axis.barh(y, one.median, color=colour, height=0.5)
            axis.text(1, y + 0.32, name, fontsize=8, va="bottom")
            axis.text(one.median, y, f" {one.median:g} ms", va="center", fontsize=9)
        axis.set_ylim(-0.5, 2.8)
        axis.set_xlim(0, 220)
        axis.set_xticks((0, 50, 100, 150))
        axis.set_yticks([])
        axis.set_title(f"{gpus} GPUs", loc="left")
        axis.set_xlabel("step time (ms)")
    speedups = [
        results[f"vgg16-ddp-{gpus}gpu"].find("speedup", backend="plugin", baseline="nccl").median for gpus in (2, 4)
    ]
    title = "A VGG16 training step on two and four GPUs: {:.1f}x and {:.1f}x as fast as with NCCL's default".format(
        *speedups
    )
    figure.suptitle(title, fontsize=10, x=0.01, ha="left")
    return figure


def _algorithms(result: ResultFile) -> Any:
    # With a delay the machine moves no more than about 25 Gb/s.
    columns = [(rate, delay) for delay in (0, 1, 5, 20) for rate in (1, 10, 25, 100) if rate < 100 or delay == 0]
    values = [
        [
            result.find("speedup", model="vgg16", algorithm=algorithm, rate_gbps=rate, delay_ms=delay).median
            for rate, delay in columns
        ]
        for algorithm in _ALGORITHMS
    ]
    figure, axis = plt.subplots(figsize=(7, 4), layout="constrained")
    limit = math.log2(16)
    shades = [[max(-limit, min(limit, math.log2(value))) for value in row] for row in values]
    axis.imshow(shades, cmap="PuOr", vmin=-limit, vmax=limit, aspect="auto")
    for y, row in enumerate(values):
        for x, value in enumerate(row):
            text = f"{value:.0f}" if value >= 10 else f"{value:.1f}" if value >= 1.05 else f"{value:.2f}"
            axis.text(x, y, text, ha="center", va="center", fontsize=8, color="white" if value > 5.5 else "black")
    axis.set_xticks(range(len(columns)), [f"{rate}\n{delay}" for rate, delay in columns])
    axis.set_yticks(range(len(_ALGORITHMS)), list(_ALGORITHMS.values()))
    axis.set_xlabel("rate (Gb/s), delay (ms)")
    bytegrad = values[list(_ALGORITHMS).index("bytegrad")]
    title = f"Speed-up over gradient all-reduce: bytegrad is {min(bytegrad):.1f}x to {max(bytegrad):.1f}x as fast"
    figure.suptitle(title, fontsize=9, x=0.01, ha="left")
    return figure
