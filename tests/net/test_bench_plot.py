"""The plot: what it must contain, and what is said when it cannot be drawn."""

from __future__ import annotations

import importlib
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from bagua.net.bench.measurement import Measurement
from bagua.net.bench.plot import PlotUnavailableError, check_plot_path, write_plot


def make_rows(sizes: list[int]) -> list[Measurement]:
    return [
        Measurement.from_samples(
            backend=name,
            collective="all_reduce",
            size_bytes=size,
            ranks=2,
            iterations=5,
            repetition_seconds=[factor * (20e-6 + size / 5e9) for factor in (scale, scale * 1.1, scale * 1.3)],
        )
        for size in sizes
        for scale, name in ((1.0, "plugin"), (1.4, "bare"), (2.0, "gloo"))
    ]


SIZES = [8 << shift for shift in range(0, 26, 2)]


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
def test_each_format_is_written(tmp_path: Path, suffix: str) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib: pip install bagua[plot]")
    path = tmp_path / f"plot.{suffix}"
    write_plot(path, make_rows(SIZES), title="ring", caption="a machine", reference_gb_s=6.0)
    magic = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}[suffix]
    assert path.read_bytes().startswith(magic)


def svg_texts(path: Path) -> list[str]:
    root = ElementTree.parse(path).getroot()
    return ["".join(node.itertext()).strip() for node in root.iter("{http://www.w3.org/2000/svg}text")]


def test_the_plot_says_what_it_shows(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib: pip install bagua[plot]")
    path = tmp_path / "plot.svg"
    write_plot(path, make_rows(SIZES), title="ring, 2 ranks", caption="EPYC, 2 CPUs", reference_gb_s=6.0)
    texts = svg_texts(path)
    for expected in ("plugin", "bare", "gloo", "raw TCP limit", "bus bandwidth (GB/s)", "time (µs)", "message size"):
        assert expected in texts, expected
    assert "8 B" in texts
    assert any("EPYC, 2 CPUs" in text for text in texts)
    assert "ring, 2 ranks" in texts


def test_large_sizes_alone_have_one_panel(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib: pip install bagua[plot]")
    path = tmp_path / "plot.svg"
    write_plot(path, make_rows([1 << 20, 1 << 24]), title="ring", caption="machine")
    assert "time (µs)" not in svg_texts(path)
    assert "raw TCP limit" not in svg_texts(path)


def test_backends_differ_without_colour() -> None:
    styles = importlib.import_module("bagua.net.bench.plot")._STYLES
    assert len({marker for _, marker, _ in styles}) == len(styles)
    assert len({str(dash) for _, _, dash in styles}) == len(styles)


def test_an_unknown_suffix_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"suffix '\.jpg'; use one of \.png, \.svg, \.pdf"):
        check_plot_path(tmp_path / "plot.jpg")


def test_no_rows_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nothing was measured"):
        write_plot(tmp_path / "plot.png", [], title="", caption="")


def test_missing_matplotlib_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(PlotUnavailableError, match=r"pip install bagua\[plot\]"):
        check_plot_path(tmp_path / "plot.png")
