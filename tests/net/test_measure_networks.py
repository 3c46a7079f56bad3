"""`measure networks` without ranks: the best of NCCL's own settings, ratios, losses. Real ranks are in
tests/net/test_bench_nccl_training.py."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs PyTorch, which is what trains")

sys.path.append(str(Path(__file__).resolve().parents[2] / "tools"))

from measure.core.step_statistics import TurnResult
from measure.networks import cells
from measure.networks.cells import RAW, Cell, CellLog, rows_of
from measure.networks.comparison import Sample, best_tuned, row_of, training_faults
from measure.ranks.network import parse_network

from bagua.net.bench.turns import Turns

DEFAULT, WIDE, THREADS, OURS = "NCCL default", "NCCL t2s4", "NCCL t4s1", "bagua-net"


def sample(variant: str, number: int, seconds: float = 0.1, losses: tuple[float, ...] = (2.0, 1.0)) -> Sample:
    fields: dict[str, Any] = dict.fromkeys(TurnResult.__dataclass_fields__)
    fields |= {"losses": list(losses), "replicas_agree": True}
    return Sample("25G", "mlp", variant, number, seconds, TurnResult(**fields))


def turns_of(*samples: Sample) -> Turns[Sample]:
    found: Turns[Sample] = Turns()
    for one in samples:
        found.samples.setdefault((one.case, one.variant), {})[one.round] = one
    return found


def test_ratios_are_paired_by_round_and_the_best_setting_is_that_of_the_least_median() -> None:
    samples = []
    for number, (default, wide, threads, ours) in enumerate([(0.4, 0.2, 0.3, 0.1), (0.4, 0.24, 0.1, 0.12)]):
        times = {DEFAULT: default, WIDE: wide, THREADS: threads, OURS: ours, "bytegrad": ours / 2}
        samples += [sample(variant, number, seconds) for variant, seconds in times.items()]
    # Medians over both rounds: 0.22 of WIDE, 0.2 of THREADS.
    row = row_of(turns_of(*samples), "25G", "mlp", [DEFAULT, WIDE, THREADS], OURS, ["bytegrad"])
    assert row is not None
    assert row.best_name == THREADS
    assert row.over_best is not None
    assert (row.over_default.low, row.over_default.high) == pytest.approx((0.4 / 0.12, 4.0))
    assert (row.over_best.low, row.over_best.high) == pytest.approx((0.1 / 0.12, 3.0))
    assert row.algorithms["bytegrad"][1].median == pytest.approx(2.0)
    failed = [sample(DEFAULT, 0), sample(DEFAULT, 1), sample(THREADS, 0, 0.01)]
    assert best_tuned(turns_of(*failed), "mlp", [DEFAULT, THREADS]) == DEFAULT, "one that failed on the way is not it"


def test_losses_of_ddp_must_agree_and_those_of_algorithms_be_finite() -> None:
    same = [sample(DEFAULT, 0), sample(OURS, 0)]
    other = sample(OURS, 1, losses=(2.0, 1.0001))

    def faults(*samples: Sample, tolerance: float = 0.0) -> list[str]:
        return training_faults(turns_of(*samples), "mlp", DEFAULT, ["bytegrad"], tolerance)

    assert faults(*same) == faults(*same, other, tolerance=1e-3) == []
    (fault,) = faults(*same, other)
    assert "bagua-net" in fault
    assert "by 5e-05" in fault
    assert faults(*same, other, sample(DEFAULT, 1, losses=(2.0, 1.1))) == [], "what rounds of the default differ by"
    assert len(faults(*same, sample(OURS, 1, losses=(2.0, math.nan)), tolerance=0.1)) == 1
    assert faults(*same, sample("bytegrad", 0, losses=(2.0, 1.5))) == []
    assert len(faults(*same, sample("bytegrad", 0, losses=(2.0, math.nan)))) == 1


def test_a_network_names_its_mtu_and_what_is_told_of_its_speed() -> None:
    flows = parse_network("3200M@400M:9000:unknown")
    assert (flows.rate_mbit, flows.per_flow_mbit, flows.mtu, flows.told_mbit) == (3200, 400, 9000, -1)
    assert parse_network("10G+5ms").told_mbit == 10_000
    free = parse_network("free")
    assert (free.rate_mbit, free.told_mbit, free.is_emulated) == (None, 100_000, True)
    assert parse_network("100G:veth").told_mbit == 10_000
    assert parse_network("loopback").told_mbit is None
    for wrong in ("25G:fast", "25G:100", "free:", "loopback:9000"):
        with pytest.raises(ValueError, match=r"network|rate|mtu"):
            parse_network(wrong)


CELL = Cell("25G", 1 << 20)


def logged(log: CellLog, times: dict[str, list[float]], cell: Cell = CELL) -> CellLog:
    log.begin([cell], facts={"torch": "2"})
    for name, seconds in times.items():
        for number, one in enumerate(seconds):
            log.add(cells.Sample(cell, name, number, one))
    return log


@pytest.mark.parametrize(
    ("best", "ours", "verdict"),
    [
        ([1.0, 1.0, 1.0, 1.0], [1.02, 1.02, 1.02, 1.02], "level"),
        ([1.0, 1.0, 1.0, 1.0], [1.05, 1.05, 1.05, 1.05], "slower"),
        ([1.0, 1.0, 1.0, 1.0], [0.9, 0.9, 0.9, 0.9], "faster"),
        ([0.9, 1.0, 1.0, 1.1], [0.9, 1.0, 1.1, 1.2], "level"),  # the quartiles overlap
        ([0.9, 1.0, 1.0, 1.4], [0.9, 1.15, 1.15, 1.5], "slower"),  # they do, and the medians are too far apart
    ],
)
def test_level_is_by_medians_and_quartiles(best: list[float], ours: list[float], verdict: str) -> None:
    (row,) = rows_of(logged(CellLog(None), {DEFAULT: [2.0] * 4, WIDE: best, OURS: ours, RAW: [0.5]}).turns, CELL)
    assert (row.best_name, row.verdict) == (WIDE, verdict)
    assert row.of_raw is not None


def test_a_cell_is_of_one_run_and_kept_by_the_next(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    first = logged(CellLog(path), {DEFAULT: [1.0], OURS: [0.5, 0.6]})
    first.end([CELL])
    other = Cell("25G", 4)
    logged(first, {DEFAULT: [1.0, 2.0]}, other)
    with path.open("a") as file:
        file.write('{"sample": {"cell": {"netw')  # killed while it wrote
    second = CellLog(path)
    assert second.finished == {CELL}
    assert second.facts == {"torch": "2"}
    assert len(second.turns.of(CELL, OURS)) == 2
    logged(second, {OURS: [3.0]}, other)
    assert [one.seconds for one in CellLog(path).turns.all()] == [1.0, 0.5, 0.6, 3.0], (
        "of the last run that measured it"
    )
    path.write_text("no JSON\n")
    with pytest.raises(ValueError, match="no sample of this tool"):
        CellLog(path)
