"""--plot: bus bandwidth over size and time of small sizes, side by side, readable in grey and in print.

matplotlib is imported when a plot is drawn: measuring needs no third-party package.
"""

from __future__ import annotations

import importlib
import textwrap
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from bagua.net.bench.measurement import Measurement
from bagua.net.bench.sample import LATENCY_LIMIT_BYTES
from bagua.net.bench.sizes import format_size

SUFFIXES = (".png", ".svg", ".pdf")

_EXPLANATION = "Lines: medians over repetitions; bands: slowest and fastest repetition; 1 GB/s = 10⁹ bytes/s."

# Okabe and Ito's colours differ in hue for people with colour-blindness; marker and dash tell them apart in grey.
_STYLES: tuple[tuple[str, str, Any], ...] = (
    ("#0072B2", "o", "-"),
    ("#D55E00", "s", "--"),
    ("#000000", "^", "-."),
    ("#009E73", "D", ":"),
    ("#CC79A7", "v", (0, (5, 1, 1, 1, 1, 1))),
    ("#E69F00", "P", (0, (3, 2))),
    ("#56B4E9", "X", (0, (1, 2))),
)


_Band = tuple[float, float, float]  # low, median, high


class PlotUnavailableError(RuntimeError):
    """matplotlib is missing."""


def check_plot_path(path: Path) -> None:
    """Raise before the run when the plot could not be drawn after it."""
    if path.suffix.lower() not in SUFFIXES:
        raise ValueError(f"--plot {str(path)!r} has suffix {path.suffix!r}; use one of {', '.join(SUFFIXES)}")
    _pyplot()


def _pyplot() -> Any:
    try:
        matplotlib = importlib.import_module("matplotlib")
    except ImportError as error:
        raise PlotUnavailableError(
            "--plot needs matplotlib, which is not installed; run: pip install matplotlib"
        ) from error
    # Agg draws to files without a display.
    matplotlib.use("Agg")
    return importlib.import_module("matplotlib.pyplot")


def backends_in_order(measurements: Sequence[Measurement]) -> list[str]:
    return list(dict.fromkeys(measurement.backend for measurement in measurements))


def write_plot(
    path: Path,
    measurements: Sequence[Measurement],
    *,
    title: str,
    caption: str,
    reference_gb_s: float | None = None,
    reference_label: str = "raw TCP limit",
    faint: Collection[str] = (),
    faint_label: str = "",
) -> None:
    """Bands are the slowest and the fastest repetition. `reference_gb_s` draws the limit as a horizontal line. The
    backends named `faint` are thin grey lines behind the others, with one label for all of them."""
    if not measurements:
        raise ValueError(f"nothing was measured, so there is nothing to draw in {str(path)!r}")
    check_plot_path(path)
    plt = _pyplot()
    settings = {
        "font.size": 9,
        "axes.titlesize": 10,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "legend.frameon": False,
        "svg.fonttype": "none",
        "pdf.fonttype": 42,
    }
    with plt.rc_context(settings):
        small = [m for m in measurements if m.bytes <= LATENCY_LIMIT_BYTES]
        panels = 2 if small else 1
        figure, axes = plt.subplots(1, panels, figsize=(4.6 * panels + 0.4, 4.2), squeeze=False, layout="constrained")
        bandwidth = axes[0][0]
        for backend in faint:
            grey = {"color": "0.75", "linewidth": 0.7, "zorder": 1}
            mine = [m for m in measurements if m.backend == backend]
            bandwidth.plot([m.bytes for m in mine], [m.busbw_gb_s for m in mine], **grey)
            if small:
                mine = [m for m in small if m.backend == backend]
                axes[0][1].plot([m.bytes for m in mine], [m.time_us for m in mine], **grey)
        if faint:
            bandwidth.plot([], [], color="0.75", linewidth=0.7, label=faint_label)
        for index, backend in enumerate(c for c in backends_in_order(measurements) if c not in faint):
            _draw(bandwidth, [m for m in measurements if m.backend == backend], index, _bandwidth)
            if small:
                _draw(axes[0][1], [m for m in small if m.backend == backend], index, _time)
        if reference_gb_s is not None:
            bandwidth.axhline(reference_gb_s, color="0.35", linewidth=1, linestyle=(0, (6, 3)), label=reference_label)
        # The curves rise to the upper right, so the lower right is free.
        bandwidth.legend(loc="lower right")
        bandwidth.set_ylabel("bus bandwidth (GB/s)")
        bandwidth.set_title("Bus bandwidth (higher is better)", loc="left")
        _finish_axes(bandwidth, measurements)
        if small:
            axes[0][1].set_ylabel("time (µs)")
            axes[0][1].set_title("Time of small sizes (lower is better)", loc="left")
            _finish_axes(axes[0][1], small)
        figure.suptitle(title, fontsize=11, x=0.01, ha="left")
        foot = "\n".join(textwrap.wrap(f"{caption}. {_EXPLANATION}", 96 * panels))
        figure.supxlabel(foot, fontsize=7, color="0.35", x=0.01, ha="left")
        figure.savefig(path, dpi=200)
        plt.close(figure)


def _draw(axes: Any, rows: Sequence[Measurement], index: int, value: Callable[[Measurement], _Band]) -> None:
    if not rows:
        return
    colour, marker, dash = _STYLES[index % len(_STYLES)]
    sizes = [row.bytes for row in rows]
    low, middle, high = zip(*map(value, rows), strict=True)
    axes.fill_between(sizes, low, high, color=colour, alpha=0.15, lw=0)
    label = rows[0].backend
    axes.plot(sizes, middle, color=colour, marker=marker, linestyle=dash, linewidth=1.4, markersize=4, label=label)


def _bandwidth(row: Measurement) -> _Band:
    slowest, fastest = row.busbw_range_gb_s
    return slowest, row.busbw_gb_s, fastest


def _time(row: Measurement) -> _Band:
    return row.time_min_us, row.time_us, row.time_max_us


def _finish_axes(axes: Any, rows: Sequence[Measurement]) -> None:
    ticker = importlib.import_module("matplotlib.ticker")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    sizes = sorted({row.bytes for row in rows})
    step = max(1, -(-len(sizes) // 7))
    ticks = sizes[::step]
    axes.set_xticks(ticks, [format_size(size) for size in ticks], rotation=30, ha="right")
    axes.minorticks_off()
    # Within two decades more ticks than powers of ten, else the axis would show one number or none.
    low, high = axes.get_ylim()
    if high / low < 100:
        subs = (1, 2, 5) if high / low > 8 else (1, 1.5, 2, 3, 4, 5, 7)
        axes.yaxis.set_major_locator(ticker.LogLocator(subs=subs))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xlabel("message size")
    axes.grid(True, which="major", color="0.9", linewidth=0.6)
    axes.set_axisbelow(True)
