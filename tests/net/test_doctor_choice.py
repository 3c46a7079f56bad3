"""What `bagua-net doctor` says of the network: what to use on it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from bagua.net import native
from bagua.net.doctor.choice import EXPECTATIONS, PAGE, check_choice

_RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results"
_ETH0 = native.Interface("eth0", "192.0.2.1", 25000, 0, "/sys/devices/x", False, True, "first")
_LO = native.Interface("lo", "127.0.0.1", 0, -1, "", True, True, "the only one")


def said(*interfaces: native.Interface, has_rdma: bool = False) -> str:
    section = check_choice(interfaces, has_rdma=has_rdma)
    assert (_RESULTS.parents[1] / PAGE).is_file()
    assert PAGE in section.findings[-1].text
    return section.findings[0].text


@pytest.mark.parametrize(
    ("mbps", "rate"),
    [(1000, 10), (10_000, 10), (16_000, 10), (20_000, 25), (25_000, 25), (40_000, 40), (50_000, 40), (200_000, 100)],
)
def test_the_row_of_the_fastest_interface(mbps: int, rate: float) -> None:
    interfaces = [replace(_ETH0, name="slow", speed_mbps=100), replace(_ETH0, speed_mbps=mbps), _LO]
    section = check_choice(interfaces, has_rdma=False)
    assert section.facts["expected"]["rate_gbps"] == rate
    assert said(*interfaces).startswith(f"eth0 has {mbps / 1000:g} Gb/s. At {rate} Gb/s, ")


def test_no_figure_where_none_was_measured() -> None:
    for text, expected in (
        (said(_ETH0, has_rdma=True), "RDMA: leave the plugin off"),
        (said(_LO), "no network between hosts"),
        (said(), "no network between hosts"),
        (said(replace(_ETH0, speed_mbps=0)), "the speed of eth0 is unknown"),
        (said(replace(_ETH0, speed_mbps=400_000)), "eth0 has 400 Gb/s: NCCL tuned by hand may be faster"),
    ):
        assert text.startswith(expected)
        assert " times as fast" not in text


def test_the_figures_are_those_of_the_result_files() -> None:
    steps, sharded = (_figures(name) for name in ("steps-by-network-2h200", "fsdp-2h200"))
    for one in EXPECTATIONS:
        link = {"model": "gpt2", "rate_gbps": one.rate_gbps}
        assert one.over_default == _median(steps, **link, backend="plugin", baseline="nccl", delay_ms=0.0)
        assert one.over_tuned == _median(steps, **link, backend="plugin", baseline="nccl_tuned", delay_ms=0.0)
        assert one.int4 == _median(steps, **link, backend="plugin_bytegrad_int4", baseline="plugin", delay_ms=0.0)
        assert one.fsdp2 == _median(sharded, **link, backend="plugin_fsdp_int4_differences", sequences=4)


def _figures(name: str) -> list[dict[str, object]]:
    figures = json.loads((_RESULTS / f"{name}.json").read_text())["figures"]
    return [{**figure["case"], "median": figure["median"]} for figure in figures if figure["metric"] == "speedup"]


def _median(figures: list[dict[str, object]], **case: object) -> object:
    found = [figure["median"] for figure in figures if case.items() <= figure.items()]
    assert len(found) <= 1
    return found[0] if found else None
