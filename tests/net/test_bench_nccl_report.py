"""What a person reads of the GPU comparison, and what is drawn: all backends where there are few, else the best of
NCCL's own settings in one column and one line."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from support.played_comparison import CASES, DEFAULT, OURS, TUNED, Stage

from bagua.net.bench.machine import describe_machine
from bagua.net.bench.nccl_ab.backend import BEST_TUNED, Backend, bagua_net_variant, hand_tuned, own_transport
from bagua.net.bench.nccl_ab.backend import shared_memory as memory
from bagua.net.bench.nccl_ab.options import parse_options
from bagua.net.bench.nccl_ab.outputs import plotted_rows, write_outputs
from bagua.net.bench.nccl_ab.report import render_closing, render_tables
from bagua.net.bench.nccl_ab.results import results_of
from bagua.net.bench.nccl_ab.run import RunOutcome
from bagua.net.bench.result_file import read_result

SMALL, LARGE = (case.bytes for case in CASES)


def backends_of(stage: Stage) -> list[Backend]:
    return [group.backend for group in stage.groups]


def eleven(*more: tuple[Backend, float]) -> Stage:
    """t2s2 16ch is the best at the large size and the default at the small one, where ours is slower."""
    tuned = [hand_tuned(text) for text in BEST_TUNED]
    times = {backend.name: {SMALL: 0.003, LARGE: 0.005} for backend in tuned}
    times["NCCL t2s2 16ch"] = {SMALL: 0.009, LARGE: 0.004}
    return Stage(
        [
            (own_transport(), {SMALL: 0.001, LARGE: 0.012}),
            *((backend, times[backend.name]) for backend in tuned),
            (OURS, {SMALL: 0.0012, LARGE: 0.003}),
            *more,
            (memory(), 0.0005),
        ]
    )


def table_of(stage: Stage, *, all_columns: bool = False) -> list[str]:
    found = results_of(stage.cases, stage.groups, stage.run(), 2)
    return render_tables(found, backends_of(stage), all_columns=all_columns).splitlines()


def test_few_backends_have_a_column_each() -> None:
    lines = table_of(Stage())
    assert lines[0] == "all_reduce: time in us (busbw in GB/s), median over repetitions"
    titles = ["size", "NCCL default", "NCCL t2s2", "bagua-net", "best tuned", "over default", "over best", "verified"]
    assert [title.strip() for title in lines[1].split("  ") if title] == titles
    assert lines[2].split() == [
        *("1", "KiB", "4000", "(0.00026)", "2000", "(0.00051)", "1000", "(0.001)"),
        *("t2s2", "4.00x", "2.00x", "yes"),
    ]


def test_without_a_second_setting_there_is_no_best_column() -> None:
    lines = table_of(Stage([(DEFAULT, 0.002), (OURS, 0.001)]))
    assert "best" not in lines[1]
    assert lines[1].split()[-3:] == ["over", "default", "verified"]


def test_of_many_settings_the_best_of_each_size_has_a_column() -> None:
    lines = table_of(eleven())
    titles = [
        "size",
        "NCCL default",
        "best tuned",
        "bagua-net",
        "shared memory",
        "over default",
        "over best",
        "verified",
    ]
    assert [title.strip() for title in lines[1].split("  ") if title] == titles
    assert lines[2].split() == [
        *("1", "KiB", "1000", "(0.001)", "1000", "(0.001)", "default", "1200", "(0.00085)", "500", "(0.002)"),
        *("0.83x", "0.83x", "yes"),
    ]
    assert lines[3].split()[4:8] == ["4000", "(0.262)", "t2s2", "16ch"]
    assert lines[3].split()[-3:] == ["4.00x", "1.33x", "yes"]
    assert max(len(line) for line in lines) <= 120


def test_a_variant_keeps_its_column_beside_the_best() -> None:
    variant = bagua_net_variant("one:BAGUA_NET_NSTREAMS=1", Path("/opt/libnccl-net.so"))
    assert "one" in table_of(eleven((variant, 0.002)))[1].split()


def test_all_columns_are_shown_on_request() -> None:
    lines = table_of(eleven(), all_columns=True)
    for text in BEST_TUNED:
        assert hand_tuned(text).name in lines[1]
    assert lines[3].split()[-5:] == ["t2s2", "16ch", "4.00x", "1.33x", "yes"], "and which of them is the best"


def test_wrong_data_shows_in_its_line() -> None:
    stage = Stage()
    stage.worker(1, 1).wrong_at = 3
    outcome = stage.run()
    lines = render_tables(results_of(CASES, stage.groups, outcome, 2), backends_of(stage)).splitlines()
    assert [line.split()[-1] for line in lines[2:4]] == ["NO", "yes"]


def closing_of(stage: Stage, outcome: RunOutcome | None = None) -> list[str]:
    outcome = outcome or stage.run()
    found = results_of(stage.cases, stage.groups, outcome, 2)
    return render_closing(stage.groups, found, outcome, ["a note"]).splitlines()


def test_the_closing_lines_have_proof_ratios_notes_and_errors() -> None:
    stage = Stage()
    outcome = stage.run()
    outcome.errors.append("something broke")
    closing = closing_of(stage, outcome)
    assert "network of bagua-net: Using network BaguaNet" in closing
    assert "note: a note" in closing
    assert closing[-1] == "ERROR: something broke"
    for baseline, ratio in (("NCCL default", 4), ("best tuned", 2), ("NCCL t2s2", 2)):
        assert any(line.startswith(f"all_reduce, bagua-net over {baseline}: {ratio}.00x") for line in closing)


def test_the_closing_lines_name_every_size_where_ours_is_slower() -> None:
    closing = closing_of(eleven())
    for baseline in ("NCCL default", "best tuned"):
        at = closing.index(f"all_reduce, bagua-net no more than 3% slower than {baseline}: 1 of 2 sizes; slower:")
        assert closing[at + 1] == "  1 KiB: 0.83x (spread 0.83..0.83) over NCCL default"
    assert not any("over NCCL t4s1" in line for line in closing), "the best stands for all"


def test_nothing_slower_is_said_as_well() -> None:
    assert "all_reduce, bagua-net no more than 3% slower than best tuned: 2 of 2 sizes" in closing_of(Stage())


def outputs(stage: Stage, folder: Path) -> None:
    library = folder / "libnccl-net.so"
    library.write_bytes(b"")
    words = ["--library", str(library), "--json", str(folder / "run.json"), "--csv", str(folder / "run.csv")]
    outcome = stage.run()
    write_outputs(
        parse_options([*words, "--plot", str(folder / "run.svg")]),
        results_of(stage.cases, stage.groups, outcome, 2),
        stage.groups,
        outcome,
        describe_machine(),
        parameters={},
        notes=[],
        device="H200",
        ranks=2,
        gpus=2,
        setting="2 x H200",
    )


def test_files_have_every_setting_and_the_best_of_each_size(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib: pip install bagua[plot]")
    outputs(eleven(), tmp_path)
    result = read_result(tmp_path / "run.json")
    assert result.machine["gpu"] == "H200"
    assert len({one.case["backend"] for one in result.select("time", gpus=2)}) == 11 + 1
    best = result.select("time", backend="nccl_tuned_best")
    assert [(one.case["size_bytes"], one.case["setting"]) for one in best] == [(SMALL, "default"), (LARGE, "t2s2 16ch")]
    speedups = [one.median for one in result.select("speedup", baseline="nccl_tuned_best")]
    assert speedups == pytest.approx([1 / 1.2, 4 / 3])
    assert "nccl_t1s1_16ch" in (tmp_path / "run.csv").read_text()
    root = ElementTree.parse(tmp_path / "run.svg").getroot()
    texts = ["".join(node.itertext()).strip() for node in root.iter("{http://www.w3.org/2000/svg}text")]
    for label in ("NCCL default", "best tuned", "bagua-net", "shared memory", "each hand-tuned setting"):
        assert label in texts
    assert "NCCL t4s1" not in texts


def test_the_envelope_is_one_line_after_the_default() -> None:
    stage = eleven()
    found = results_of(stage.cases, stage.groups, stage.run(), 2)
    rows = plotted_rows(found, backends_of(stage), "all_reduce")
    assert list(dict.fromkeys(row.backend for row in rows))[:3] == ["NCCL default", "best tuned", "NCCL t2s4"]
    assert [row.time_us for row in rows if row.backend == "best tuned"] == pytest.approx([1000, 4000])


def test_few_backends_are_drawn_as_they_are() -> None:
    stage = Stage([(DEFAULT, 0.004), (TUNED, 0.002), (OURS, 0.001)])
    found = results_of(stage.cases, stage.groups, stage.run(), 2)
    rows = plotted_rows(found, backends_of(stage), "all_reduce")
    assert rows == list(found.rows)
