"""`bagua-net-bench --nccl`: the environment of each backend, the network that NCCL's log names, ranks that share GPUs,
and runs with workers that are played in a time of their own. The lines of the log are those that 2.28 and 2.30 write at
NCCL_DEBUG=INFO."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from support.played_comparison import CASES, OURS, Stage

from bagua.net.bench.errors import BenchError
from bagua.net.bench.gpu_sharing import GpuSharing, gpu_name, mps_is_running, sharing_of
from bagua.net.bench.measurement import Case
from bagua.net.bench.nccl_ab import processes
from bagua.net.bench.nccl_ab.backend import (
    BEST_TUNED,
    bagua_net,
    bagua_net_variant,
    hand_tuned,
    ignored_variables,
    make_backends,
    own_transport,
    shared_memory,
    tuned_settings,
    worker_environment,
)
from bagua.net.bench.nccl_ab.command import prove
from bagua.net.bench.nccl_ab.options import NcclOptions, parse_options
from bagua.net.bench.nccl_ab.processes import RankRequest, RankSettings, own_ranks
from bagua.net.bench.nccl_ab.report import Results, figures_of, is_slower, results_of
from bagua.net.bench.nccl_ab.session import check_memory, effective_bytes, make_cases, needed_bytes
from bagua.net.bench.nccl_log import NetworkProof, network_error, read_proof, read_proof_file
from bagua.net.bench.paced_run import PacedRun
from bagua.net.bench.processes import LocalPlace

GIB = 1 << 30
LIBRARY = Path("/opt/bagua/libnccl-net.so")
LOG = Path("/tmp/nccl.log")
SMALL, LARGE = (case.bytes for case in CASES)

# --- backends ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("2x2x8x1", "THREADSxSOCKETS"),
        ("0x2", "0 threads is outside NCCL's 1..16"),
        ("17x1", "17 threads is outside NCCL's 1..16"),
        ("16x8", "16 threads x 8 sockets is outside NCCL's 1..64"),
        ("2x2x65", "65 channels is outside 1..64"),
        ("", "best or none"),
    ],
)
def test_a_wrong_tuned_names_value_and_limit(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=f"--tuned {text!r}.*{said}"):
        hand_tuned(text)


def test_tuned_is_repeated_or_a_list_and_best_stands_for_settings() -> None:
    threads = {"NCCL_SOCKET_NTHREADS": "4", "NCCL_NSOCKS_PERTHREAD": "2"}
    assert hand_tuned("4x2").settings == own_transport().settings | threads
    assert hand_tuned("4x2x16").settings == own_transport().settings | threads | {"NCCL_MIN_NCHANNELS": "16"}
    for words, expected in (
        (None, ["2x2x8"]),
        (["none"], []),
        (["2x4,4x4x16"], ["2x4", "4x4x16"]),
        (["best,3x3x4"], [*BEST_TUNED, "3x3x4"]),
        (["best, 2x2x8", "best"], list(BEST_TUNED)),
    ):
        assert tuned_settings(words) == expected
    backends = make_backends(library=LIBRARY, tuned=tuned_settings(["best"]), variants=[], with_shared_memory=True)
    assert [backend.is_own_tcp for backend in backends] == [True] * 9 + [False] * 2
    assert [backends[place].name for place in (0, 1, 8, 9, 10)] == [
        "NCCL default",
        "NCCL t2s4",
        "NCCL t2s2 16ch",
        "bagua-net",
        "shared memory",
    ]
    with pytest.raises(ValueError, match="two backends are called 'NCCL t2s2'"):
        make_backends(library=LIBRARY, tuned=["2x2", "2x2"], variants=[], with_shared_memory=False)


@pytest.mark.parametrize("text", ["rails4", "rails4:", ":A=1", "rails4:BAGUA_NET_RAILS", "rails4:4=A", "x:A=1,"])
def test_a_wrong_variant_is_an_error_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match=f"{text!r}.*NAME:VARIABLE=VALUE"):
        bagua_net_variant(text, bagua_net(LIBRARY))


def test_no_setting_of_the_caller_reaches_a_backend_that_it_would_change() -> None:
    changing = {"NCCL_MIN_NCHANNELS": "32", "BAGUA_NET_NSTREAMS": "1", "ENABLE_BAGUA_NET": "0", "RANK": "3"}
    # What keeps the machine safe and its other networks off has to stay.
    kept = {"PATH": "/usr/bin", "NCCL_NVLS_ENABLE": "0", "NCCL_IB_DISABLE": "1", "NCCL_SOCKET_IFNAME": "eth0"}
    inherited = {**changing, **kept, "NCCL_NET_PLUGIN": "other", "MASTER_PORT": "29500"}
    ours = worker_environment(bagua_net(LIBRARY), inherited, tcp_only=True, debug_file=LOG)
    default = worker_environment(own_transport(), inherited, tcp_only=True, debug_file=LOG)
    for found in (ours, default):
        assert kept.items() <= found.items()
        assert not {"NCCL_MIN_NCHANNELS", "BAGUA_NET_NSTREAMS", "MASTER_PORT", "RANK"} & found.keys()
        assert (found["NCCL_P2P_DISABLE"], found["NCCL_SHM_DISABLE"]) == ("1", "1")
    assert (ours["NCCL_NET_PLUGIN"], "ENABLE_BAGUA_NET" in ours, "NCCL_NET" in ours) == (str(LIBRARY), False, False)
    assert (default["NCCL_NET"], default["ENABLE_BAGUA_NET"], "NCCL_NET_PLUGIN" in default) == ("Socket", "0", False)
    assert ignored_variables(inherited) == ["BAGUA_NET_NSTREAMS", "NCCL_MIN_NCHANNELS", "NCCL_NET_PLUGIN"]
    assert worker_environment(own_transport(), {}, tcp_only=True, debug_file=LOG)["NCCL_SOCKET_IFNAME"] == "lo"
    free = worker_environment(own_transport(), {}, tcp_only=False, debug_file=LOG)
    assert not {"NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_SOCKET_IFNAME"} & free.keys()


# --- GPUs -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def options(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., NcclOptions]:
    library = tmp_path / "libnccl-net.so"
    library.touch()

    def parsed(gpus: int, *words: str) -> NcclOptions:
        monkeypatch.setattr(processes, "_gpu_count", lambda: gpus)
        return parse_options(["--library", str(library), *words])

    return parsed


@pytest.mark.parametrize(
    ("gpus", "words", "said"),
    [
        (0, [], "needs 2 GPUs or more, and torch sees 0; look at CUDA_VISIBLE_DEVICES and nvidia-smi, or"),
        (0, ["--share-gpus"], "needs 2 GPUs or more, and torch sees 0; look at CUDA_VISIBLE_DEVICES"),
        (1, [], "torch sees 1; add --share-gpus to have several ranks on one, look at .*, or leave --nccl out"),
        (2, ["--ranks", "4"], "--ranks 4 needs as many GPUs, and torch sees 2; give 2 or fewer"),
        (1, ["--share-gpus", "--shared-memory"], "shared memory: 2 ranks that share 1 GPU reach each other over TCP"),
        (1, ["--share-gpus", "--no-tcp-only"], "--no-tcp-only: 2 ranks that share 1 GPU reach each other over TCP"),
    ],
)
def test_gpus_that_are_not_there(
    gpus: int, words: list[str], said: str, options: Callable[..., NcclOptions], tmp_path: Path
) -> None:
    with pytest.raises(BenchError, match=said):
        own_ranks(options(gpus, *words), {}, tmp_path)


def test_ranks_that_share_gpus_are_hosts_of_their_own(options: Callable[..., NcclOptions], tmp_path: Path) -> None:
    ranks, sharing = own_ranks(options(1, "--share-gpus"), {}, tmp_path)
    assert (ranks.count, sharing) == (2, GpuSharing(1, through_mps=False))
    assert own_ranks(options(2, "--share-gpus", "--ranks", "5"), {}, tmp_path)[0].count == 5
    assert own_ranks(options(4, "--share-gpus"), {}, tmp_path)[1] is None
    place = ranks.places[0]
    assert isinstance(place, LocalPlace)
    assert isinstance(place.settings, RankSettings)
    requests = [RankRequest(0, rank, rank, 2, "cuda", tcp_only=True, bind="", title="") for rank in range(2)]
    first, second = (place.settings.process_environment(request) for request in requests)
    assert first["NCCL_HOSTID"] != second["NCCL_HOSTID"]
    assert first["LOCAL_WORLD_SIZE"] == "2"
    with pytest.raises(ValueError, match="2 ranks cannot share GPUs where there are none; look at nvidia-smi"):
        sharing_of(2, 0, {})
    assert gpu_name(1, {}) == "1"
    assert gpu_name(1, {"CUDA_VISIBLE_DEVICES": "3, GPU-5"}) == "GPU-5"


def test_mps_runs_if_its_process_does(tmp_path: Path) -> None:
    """A daemon that is gone has left its file, and it writes no newline."""
    environment = {"CUDA_MPS_PIPE_DIRECTORY": str(tmp_path)}
    with subprocess.Popen(["true"]) as gone:
        gone.wait()
    for content, runs in (
        (os.getpid(), True),
        (gone.pid, False),
        ("", False),
        ("no number", False),
        ("../self", False),
    ):
        (tmp_path / "nvidia-cuda-mps-control.pid").write_text(str(content))
        assert mps_is_running(environment) is runs, content


# --- the network ------------------------------------------------------------------------------------------------------


def log_of(*lines: str) -> NetworkProof:
    return read_proof("\n".join(f"host:4711:4712 [0] NCCL {line}" for line in lines))


def test_what_the_log_names() -> None:
    proof = log_of(
        "INFO NCCL_NET_PLUGIN set by environment to /opt/bagua/libnccl-net.so",
        "INFO NET/Plugin: Loaded net plugin BaguaNet (v11)",
        "INFO NET/BaguaNet : active, version 1.0.0, lo 127.0.0.1",
        "INFO Using network BaguaNet",
        "INFO comm 0x55 rank 0 nRanks 2 nNodes 2 localRanks 1 localRank 0 MNNVL 0",
        "INFO Channel 00/0 : 1[1] -> 0[0] [receive] via NET/BaguaNet/0",
        "INFO 8 coll channels, 0 collnet channels, 0 nvls channels, 8 p2p channels, 2 p2p channels per peer",
    )
    assert (proof.network, proof.table, proof.nodes, proof.warnings) == ("BaguaNet", "v11", 2, ())
    assert proof.transports == ("NET/BaguaNet/0",)
    assert "NET/BaguaNet : active, version 1.0.0, lo 127.0.0.1" in proof.plugin_lines
    assert not any("set by environment" in line for line in proof.plugin_lines)
    assert proof.summary().startswith("Using network BaguaNet, table v11, 8 coll channels")
    fallback = log_of(
        "INFO NET/Plugin: Loaded net plugin BaguaNet (v11)",
        "WARN BaguaNet: BAGUA_NET_NSTREAMS=0 is outside 1..64",
        "INFO Using network Socket",
    )
    assert (fallback.network, fallback.table) == ("Socket", None)
    assert fallback.warnings == ("BaguaNet: BAGUA_NET_NSTREAMS=0 is outside 1..64",)
    assert log_of("INFO Using network AWS Libfabric").network == "AWS Libfabric"
    assert read_proof_file(Path("/none")).network is None
    assert read_proof("").summary() == "no network named in the log"


def test_every_rank_that_used_another_network_is_named_and_ends_its_backend() -> None:
    right, wrong = NetworkProof(network="BaguaNet"), NetworkProof(network="Socket")
    assert network_error("bagua-net", "BaguaNet", [right, right]) is None
    assert network_error("NCCL default", "Socket", [right]) is not None
    said = str(network_error("bagua-net", "BaguaNet", [right, wrong, NetworkProof(), None]))
    assert "but rank 1 used Socket, rank 2 used none that its log names, rank 3 used none" in said
    stage = Stage()
    stage.worker(2, 1).network = "Socket"
    (error,) = prove(stage.sessions, 1.0)
    assert "bagua-net should have used network BaguaNet, but rank 1 used Socket" in error
    assert [session.is_alive for session in stage.sessions] == [True, True, False]
    assert stage.worker(2, 0).closed


# --- runs -------------------------------------------------------------------------------------------------------------


def results(stage: Stage) -> Results:
    return results_of(stage.run(), stage.sessions, 2)


def counts(run: PacedRun) -> dict[tuple[Case, str], int]:
    return {place: len(rounds) for place, rounds in run.turns.samples.items() if rounds}


def test_ratios_and_cpu_time() -> None:
    stage = Stage()
    stage.worker(2, 1).seconds = 0.002  # the slowest rank is the time of a turn
    found = results(stage)
    assert {(case.bytes, name): ratio.median for (case, name), ratio in found.ratios.items()} == {
        (size, name): pytest.approx(ratio)
        for size in (SMALL, LARGE)
        for name, ratio in (("NCCL default", 2.0), ("NCCL t2s2", 1.0), ("best tuned", 1.0))
    }
    rows = {(row.bytes, row.backend): row for row in found.rows.values()}
    assert rows[SMALL, "bagua-net"].cpu_s_per_gb is None, "launching would be all that is counted"
    # 50 iterations of 2 (W - 1) MiB took both ranks 0.5 s each.
    iterations = rows[LARGE, "bagua-net"].samples[0].iterations
    assert rows[LARGE, "bagua-net"].cpu_s_per_gb == pytest.approx(1.0 / (iterations * 2 * (1 << 20) / 1e9))


def test_the_best_setting_is_chosen_for_each_size_and_shared_memory_is_none_of_them() -> None:
    """t2s2 16ch is the best at the large size and the default at the small one, where ours is slower."""
    tuned = [(hand_tuned(text), {SMALL: 0.003, LARGE: 0.005}) for text in BEST_TUNED]
    tuned[-1] = (hand_tuned("2x2x16"), {SMALL: 0.009, LARGE: 0.004})
    ends = [(OURS, {SMALL: 0.0012, LARGE: 0.003}), (shared_memory(), 0.0005)]
    found = results(Stage([(own_transport(), {SMALL: 0.001, LARGE: 0.012}), *tuned, *ends]))
    ratios = found.ratios_to("best tuned", "all_reduce").values()
    assert [ratio.median for ratio in ratios] == pytest.approx([1 / 1.2, 4 / 3])
    assert [is_slower(ratio) for ratio in ratios] == [True, False]
    figures = figures_of(found, ranks=2, gpus=2)
    assert len({one.case["backend"] for one in figures if one.metric == "time"}) == 11 + 1
    best = [one.case for one in figures if (one.case["backend"], one.metric) == ("nccl_tuned_best", "time")]
    assert [(one["size_bytes"], one["setting"]) for one in best] == [(SMALL, "default"), (LARGE, "t2s2 16ch")]


def test_a_crash_in_a_turn_keeps_what_was_measured_and_cannot_be_the_best() -> None:
    stage = Stage()
    stage.worker(1, 1).dies_at = 6
    run = stage.run()
    (error,) = run.turns.errors
    assert "the network broke" in error
    assert stage.worker(1, 0).closed
    others = {(case, name): 3 for case in CASES for name in ("NCCL default", "bagua-net")}
    assert counts(run) == {**others, (CASES[0], "NCCL t2s2"): 1}
    found = results_of(run, stage.sessions, 2)
    assert (CASES[0], "NCCL t2s2") in found.rows
    assert set(found.best.values()) == {"NCCL default"}


@pytest.mark.parametrize(("at", "case"), [(2, 1), (3, 0)], ids=["before", "after the load"])
def test_wrong_data_is_told_with_rank_and_place(at: int, case: int) -> None:
    stage = Stage()
    stage.worker(1, 1).wrong_at = at
    run = stage.run()
    assert run.wrong == {(CASES[case], "NCCL t2s2"): "1 wrong elements on rank 1, the first at 17"}
    assert run.verified[CASES[case], "NCCL t2s2"] is False
    assert run.verified[CASES[1 - case], "NCCL t2s2"] is True
    assert run.faults() == [f"WRONG DATA: NCCL t2s2, {CASES[case]}: 1 wrong elements on rank 1, the first at 17"]


def test_a_run_that_is_too_long_has_fewer_rounds_of_every_case() -> None:
    stage = Stage()
    run = stage.run(iterations=100, time_limit_s=6.0)  # a round takes 2.2 s
    assert set(counts(run).values()) == {2}
    assert run.turns.notes[0].startswith("2 of 3 rounds ran: another takes 2 s")
    assert "more than is left of --time-limit 9 s; some will be missing" in stage.messages.getvalue()


def test_memory_is_asked_for_before_the_run_and_the_rank_that_lacks_it_is_named() -> None:
    stage = Stage()
    cases = make_cases(["all_reduce", "all_to_all"], [8, GIB], 2, 2)
    check_memory(stage.sessions, cases, 1.0)
    needed = needed_bytes(cases[-1], 2)
    assert 2 * GIB < needed < 3 * GIB, "two buffers of one backend, not of all"
    stage.worker(0, 1).free_bytes = needed - 1
    with pytest.raises(BenchError, match=r"all_to_all of 1 GiB needs 2\.5 GiB.*rank 1 has 2\.5 GiB left"):
        check_memory(stage.sessions, cases, 1.0)
    stage.worker(0, 1).free_bytes = 2 * needed - 1
    check_memory(stage.sessions, cases, 1.0)
    with pytest.raises(BenchError, match="needs 5 GiB"):
        check_memory(stage.sessions, cases, 1.0, ranks_per_gpu=2)


def test_sizes_hold_whole_elements_for_every_rank_and_are_measured_once() -> None:
    for collective, size, element, ranks, expected in (
        ("all_reduce", 9, 2, 4, 10),
        ("all_gather", 8, 4, 4, 16),
        ("reduce_scatter", 17, 4, 4, 32),
        ("all_to_all", 8, 2, 3, 12),
        ("send_recv", 1, 4, 2, 4),
        ("broadcast", 256 << 20, 2, 3, 256 << 20),
    ):
        assert effective_bytes(collective, size, element, ranks) == expected
    assert make_cases(["all_gather"], [8, 16, 32], 4, 4) == [Case("all_gather", 16), Case("all_gather", 32)]
