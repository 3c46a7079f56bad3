"""The GPU comparison: what is read from NCCL's log (the lines are those that 2.28 and 2.30 write at NCCL_DEBUG=INFO),
its sizes and buffers, ratios, which of NCCL's own settings is the best of each size, and what is shown."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support.played_comparison import CASES, OURS, Stage

from bagua.net.bench.machine import describe_machine
from bagua.net.bench.measurement import Case
from bagua.net.bench.nccl_ab.backend import BEST_TUNED, Backend, hand_tuned, own_transport, shared_memory
from bagua.net.bench.nccl_ab.report import Results, figures_of, is_slower, results_of
from bagua.net.bench.nccl_ab.session import effective_bytes, make_cases
from bagua.net.bench.nccl_log import NetworkProof, network_error, read_proof, read_proof_file
from bagua.net.bench.result_file import result_of, write_files

PREFIX = "host:4711:4712 [0] NCCL "
WITH_PLUGIN = "\n".join(
    PREFIX + line
    for line in (
        "INFO NCCL_NET_PLUGIN set by environment to /opt/bagua/libnccl-net.so",
        "INFO NET/Plugin: Loaded net plugin BaguaNet (v11)",
        "INFO Successfully loaded external network plugin /opt/bagua/libnccl-net.so",
        "INFO NET/BaguaNet : active, version 1.0.0, lo 127.0.0.1",
        "INFO Initialized NET plugin BaguaNet",
        "INFO Assigned NET plugin BaguaNet to comm",
        "INFO Using network BaguaNet",
        "INFO comm 0x55 rank 0 nRanks 2 nNodes 2 localRanks 1 localRank 0 MNNVL 0",
        "INFO Channel 00/0 : 1[1] -> 0[0] [receive] via NET/BaguaNet/0",
        "INFO Channel 00/0 : 0[0] -> 1[1] [send] via NET/BaguaNet/0",
        "INFO 8 coll channels, 0 collnet channels, 0 nvls channels, 8 p2p channels, 2 p2p channels per peer",
    )
)
WITHOUT_PLUGIN = "\n".join(
    PREFIX + line
    for line in (
        "INFO NET/Plugin: Loaded net plugin BaguaNet (v11)",
        "WARN BaguaNet: BAGUA_NET_NSTREAMS=0 is outside 1..64",
        "INFO Failed to initialize NET plugin BaguaNet",
        "INFO Assigned NET plugin Socket to comm",
        "INFO Using network Socket",
    )
)


def test_the_log_of_a_job_with_the_plugin() -> None:
    proof = read_proof(WITH_PLUGIN)
    assert proof.network == "BaguaNet"
    assert proof.table == "v11"
    assert proof.nodes == 2
    assert proof.channels == "8 coll channels, 0 collnet channels, 0 nvls channels, 8 p2p channels"
    assert proof.transports == ("NET/BaguaNet/0",)
    assert "NET/BaguaNet : active, version 1.0.0, lo 127.0.0.1" in proof.plugin_lines
    assert not any("set by environment" in line for line in proof.plugin_lines)
    assert proof.warnings == ()
    assert proof.summary().startswith("Using network BaguaNet, table v11, 8 coll channels")


def test_a_fallback_shows_as_socket_without_a_table() -> None:
    proof = read_proof(WITHOUT_PLUGIN)
    assert proof.network == "Socket"
    assert proof.table is None
    assert proof.warnings == ("BaguaNet: BAGUA_NET_NSTREAMS=0 is outside 1..64",)


def test_a_network_name_with_a_space() -> None:
    assert read_proof(PREFIX + "INFO Using network AWS Libfabric").network == "AWS Libfabric"


def test_an_absent_or_empty_log_proves_nothing(tmp_path: Path) -> None:
    assert read_proof_file(tmp_path / "none.log").network is None
    assert read_proof("").summary() == "no network named in the log"


def test_the_error_names_every_rank_that_used_another_network() -> None:
    right, wrong = NetworkProof(network="BaguaNet"), NetworkProof(network="Socket")
    assert network_error("bagua-net", "BaguaNet", [right, right]) is None
    error = network_error("bagua-net", "BaguaNet", [right, wrong, NetworkProof(), None])
    assert error is not None
    assert "rank 1 used Socket" in error
    assert "rank 2 used none that its log names" in error
    assert "rank 3" in error
    assert "rank 0" not in error


def test_a_socket_backend_that_went_through_the_plugin_is_an_error_too() -> None:
    assert network_error("NCCL default", "Socket", [NetworkProof(network="BaguaNet")]) is not None


SMALL, LARGE = (case.bytes for case in CASES)
MEMORY = Backend("shared memory", "Socket", shared_memory=True)


def results(stage: Stage) -> Results:
    return results_of(stage.run(), stage.sessions, 2)


def eleven() -> Stage:
    """t2s2 16ch is the best at the large size and the default at the small one, where ours is slower."""
    tuned = [hand_tuned(text) for text in BEST_TUNED]
    times = {backend.name: {SMALL: 0.003, LARGE: 0.005} for backend in tuned}
    times["NCCL t2s2 16ch"] = {SMALL: 0.009, LARGE: 0.004}
    return Stage(
        [
            (own_transport(), {SMALL: 0.001, LARGE: 0.012}),
            *((backend, times[backend.name]) for backend in tuned),
            (OURS, {SMALL: 0.0012, LARGE: 0.003}),
            (shared_memory(), 0.0005),
        ]
    )


def test_ratios_compare_ours_with_each_other_backend_within_repetitions() -> None:
    found = {(case.bytes, name): ratio.median for (case, name), ratio in results(Stage()).ratios.items()}
    assert found == {
        (size, name): pytest.approx(ratio)
        for size in (SMALL, LARGE)
        for name, ratio in (("NCCL default", 4.0), ("NCCL t2s2", 2.0), ("best tuned", 2.0))
    }


def test_cpu_time_per_gigabyte_counts_the_bytes_on_all_links() -> None:
    rows = {(row.bytes, row.backend): row for row in results(Stage()).rows.values()}
    assert rows[SMALL, "bagua-net"].cpu_s_per_gb is None, "launching would be all that is counted"
    # 100 iterations of 2 (W - 1) MiB took both ranks 0.5 s each.
    assert rows[LARGE, "bagua-net"].cpu_s_per_gb == pytest.approx(1.0 / (100 * 2 * (1 << 20) / 1e9))


def test_the_best_setting_is_chosen_for_each_size_and_shared_memory_is_none_of_them() -> None:
    found = results(eleven())
    assert [(case.bytes, name) for case, name in found.best.items()] == [
        (SMALL, "NCCL default"),
        (LARGE, "NCCL t2s2 16ch"),
    ]
    ratios = found.ratios_to("best tuned", "all_reduce").values()
    assert [ratio.median for ratio in ratios] == pytest.approx([1 / 1.2, 4 / 3])
    assert [is_slower(ratio) for ratio in ratios] == [True, False]


def test_the_best_is_that_of_the_median_and_is_paired_repetition_by_repetition() -> None:
    stage = Stage()
    run = stage.run()
    case = CASES[0]
    played = {
        "NCCL default": (0.001, 0.009, 0.009),
        "NCCL t2s2": (0.004, 0.004, 0.008),
        "bagua-net": (0.004, 0.002, 0.001),
    }
    for name, seconds in played.items():
        rounds = run.turns.samples[case, name]
        run.turns.samples[case, name] = {n: replace(rounds[n], seconds=s) for n, s in enumerate(seconds)}
    found = results_of(run, stage.sessions, 2)
    assert found.best[case] == "NCCL t2s2", "the default has the fastest single repetition, and the slower median"
    ratio = found.ratios[case, "best tuned"]
    assert (ratio.low, ratio.median, ratio.high) == pytest.approx((1.0, 2.0, 8.0))


def test_a_setting_that_failed_on_the_way_cannot_be_the_best() -> None:
    stage = Stage()
    stage.worker(1, 0).dies_at = 6
    found = results(stage)
    assert (CASES[0], "NCCL t2s2") in found.rows, "it keeps what it measured"
    assert set(found.best.values()) == {"NCCL default"}


def test_files_have_every_setting_and_the_best_of_each_size(tmp_path: Path) -> None:
    found = figures_of(results(eleven()), ranks=2, gpus=2)
    result = result_of("a title", found, machine=describe_machine(), parameters={})
    assert write_files(result, None, tmp_path / "run.csv") == [tmp_path / "run.csv"]
    assert len({one.case["backend"] for one in result.select("time", gpus=2)}) == 11 + 1
    best = result.select("time", backend="nccl_tuned_best")
    assert [(one.case["size_bytes"], one.case["setting"]) for one in best] == [(SMALL, "default"), (LARGE, "t2s2 16ch")]
    assert "nccl_t1s1_16ch" in (tmp_path / "run.csv").read_text()


@pytest.mark.parametrize(
    ("collective", "size", "element", "ranks", "expected"),
    [
        ("all_reduce", 8, 2, 4, 8),
        ("all_reduce", 9, 2, 4, 10),
        ("all_gather", 8, 4, 4, 16),
        ("reduce_scatter", 17, 4, 4, 32),
        ("all_to_all", 8, 2, 3, 12),
        ("send_recv", 1, 4, 2, 4),
        ("broadcast", 256 << 20, 2, 3, 256 << 20),
    ],
)
def test_sizes_hold_whole_elements_for_every_rank(
    collective: str, size: int, element: int, ranks: int, expected: int
) -> None:
    assert effective_bytes(collective, size, element, ranks) == expected


def test_sizes_that_meet_after_rounding_are_measured_once() -> None:
    assert make_cases(["all_gather"], [8, 16, 32], 4, 4) == [Case("all_gather", 16), Case("all_gather", 32)]
