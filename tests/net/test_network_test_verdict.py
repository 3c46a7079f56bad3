"""From turns to what `bagua-net test` says: made-up figures, one for each kind of network."""

from __future__ import annotations

import pytest
from support.played_comparison import Stage

from bagua.net.bench.errors import BenchError
from bagua.net.bench.nccl_ab.backend import Backend
from bagua.net.bench.rendezvous import Member
from bagua.net.bench.traffic import Traffic
from bagua.net.compare.setting import Setting
from bagua.net.network_test import command
from bagua.net.network_test.command import Plan
from bagua.net.network_test.rank import job_of, measure
from bagua.net.network_test.verdict import SIZES, Job, Results, Turn, conclude, report, rows

SETTINGS = (Setting("NCCL's own network", {}, False), Setting("Bagua-Net", {}, True))
NETWORKS = ("Socket", "BaguaNet")
ETH0 = Traffic("eth0", 1 << 30, 1e9, 3.125e9)  # 8 of 25 Gb/s


def results(
    *gains: float,
    rounds: int = 3,
    networks: tuple[str, str] = NETWORKS,
    transport: str = "NET",
    traffic: Traffic = ETH0,
    job: Job = Job(2, 2, "nccl"),  # noqa: B008 - immutable
) -> Results:
    """`gains`: how many times as fast the plugin is, by size."""
    found = Results(job, SETTINGS)
    for number in range(rounds):
        for setting in (0, 1):
            seconds = {
                size: size / 1e9 * (1 + number / 100) / (gain if setting else 1.0)
                for size, gain in zip(SIZES, gains, strict=True)
            }
            via = f"{transport}/{networks[setting]}"
            found.turns.append(Turn(setting, number, seconds, (networks[setting],), (via,), True, traffic))
    return found


def test_a_faster_plugin_gives_the_line_for_the_job_script() -> None:
    found = conclude(results(1.25, 1.5, 2.0))
    assert found.headline == (
        "Bagua-Net is faster than NCCL's own network: 1.25x at 64 KiB, 1.50x at 1 MiB, 2.00x at 64 MiB."
    )
    assert found.advice == "Put into the job script:\n  export ENABLE_BAGUA_NET=1"
    assert found.use_plugin is True
    (reason,) = found.reasons
    assert reason.startswith("eth0 carried up to 8 Gb/s of its 25 Gb/s (32%): the NIC is not the limit.")
    assert rows(results(1.25, 1.5, 2.0))[2] == ("64 MiB", "0.990", "1.98", "2.00x (spread 2.00..2.00)")


@pytest.mark.parametrize(
    ("made", "headline", "use_plugin", "advice"),
    [
        (
            results(0.5, 0.8, 0.9),
            "slower than NCCL's own network: 0.50x at 64 KiB",
            False,
            "Leave ENABLE_BAGUA_NET unset.",
        ),
        (results(0.5, 1.5, 2.0), "slower than NCCL's own network: 0.50x at 64 KiB.", None, "bagua-net compare -- CMD"),
        (results(0.5, 1.5, 2.0), "faster", None, "bagua-net compare -- CMD"),  # the job's own question
        (
            results(1.0, 1.0, 1.0, networks=("IB", "BaguaNet")),
            "",
            False,
            "Leave ENABLE_BAGUA_NET unset, and keep RDMA.",
        ),
        (
            results(0.5, 0.5, 0.5, networks=("IB", "BaguaNet")),
            "",
            False,
            "Leave ENABLE_BAGUA_NET unset, and keep RDMA.",
        ),
        (
            results(2.0, 2.0, 2.0, networks=("Socket", "Socket")),
            "The plugin was not used: with Bagua-Net, NCCL used Socket.",
            None,
            "bagua-net doctor",
        ),
        (results(2.0, 2.0, 2.0, rounds=1), "No verdict: 1 of at least 3 rounds ran.", None, "--rounds 3"),
        (results(2.0, 2.0, 2.0, rounds=1, job=Job(2, 2, "gloo", ("a", "b"))), "gloo was used: nothing was", None, ""),
        (
            results(1.0, 1.0, 1.0, rounds=1, transport="SHM", job=Job(2, 1, "nccl")),
            "No traffic on the network: no plugin can change this job.",
            None,
            "Start this command on two nodes",
        ),
    ],
)
def test_what_is_advised(made: Results, headline: str, use_plugin: bool | None, advice: str) -> None:
    found = conclude(made)
    assert headline in found.headline
    assert found.use_plugin is use_plugin
    assert advice in found.advice
    uses_rdma = "IB" in made.turns[0].networks
    assert any("NCCL's own network is RDMA here" in one for one in found.reasons) == uses_rdma


def test_rdma_that_nccl_does_not_use_either() -> None:
    job = Job(2, 2, "nccl", (), ("host a: mlx5_0 (InfiniBand, 400 Gb/sec) is up",))
    (question, _) = conclude(results(2.0, 2.0, 2.0, job=job)).reasons
    assert question.startswith("host a: mlx5_0 (InfiniBand, 400 Gb/sec) is up, and NCCL does not use RDMA without")
    used = conclude(results(1.0, 1.0, 1.0, networks=("IB", "BaguaNet"), job=job)).reasons
    assert not any("is that wanted" in one for one in used)


def test_ranks_on_one_host_end_after_a_round() -> None:
    assert results(1.0, 1.0, 1.0, rounds=1, transport="SHM", job=Job(2, 1, "nccl")).is_pointless()
    assert not results(1.0, 1.0, 1.0, rounds=1).is_pointless()


def test_a_saturated_network_is_the_limit() -> None:
    full = Traffic("eth0", 1 << 30, 3.0e9, 3.125e9)
    faster, same = conclude(results(2.0, 2.0, 2.0, traffic=full)), conclude(results(1.0, 1.0, 1.0, traffic=full))
    assert faster.reasons == ("The network is saturated: eth0 carried up to 24 Gb/s of its 25 Gb/s.",)
    assert same.reasons[0].startswith("The network is saturated: eth0 carried up to 24.0 of its 25 Gb/s.")
    assert same.use_plugin is False


def member(rank: int, host: str, gpus: int = 8) -> Member:
    return Member(rank, host, f"kernel of {host}", host, None, {"gpus": gpus})


def test_gpus_on_some_nodes_only_are_refused() -> None:
    assert job_of([member(0, "a"), member(1, "a"), member(2, "b")]) == Job(3, 2, "nccl")
    up = Member(2, "b", "kernel of b", "b", None, {"gpus": 8, "unused_rdma": "mlx5_0 is up"})
    assert job_of([member(0, "a"), up, up]) == Job(3, 2, "nccl", (), ("host b: mlx5_0 is up",))
    assert job_of([member(0, "a", 0), member(1, "b", 0)]) == Job(2, 2, "gloo", ("a", "b"))
    with pytest.raises(BenchError, match="no GPU that torch can use on b, where other ranks have one"):
        job_of([member(0, "a"), member(1, "b", 0)])


@pytest.mark.parametrize(
    ("networks", "rounds", "headline"),
    [
        (NETWORKS, 3, "Bagua-Net is faster than NCCL's own network: 2.00x at 64 KiB, 2.00x at 1 MiB, 2.00x at 64 MiB."),
        (("Socket", "Socket"), 1, "The plugin was not used: with Bagua-Net, NCCL used Socket."),
    ],
)
def test_ranks_with_nccl(
    networks: tuple[str, str], rounds: int, headline: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Played, on the stage of the GPU comparison: all rounds, or one that shows that more are pointless."""
    backends = [Backend(one.name, network) for one, network in zip(SETTINGS, networks, strict=True)]
    stage = Stage([(backends[0], 0.002), (backends[1], 0.001)])
    found = measure(stage.sessions, Job(2, 2, "nccl"), SETTINGS, Plan(3, 0.05, 1.0), clock=lambda: stage.now)
    assert [(turn.round, turn.setting) for turn in found.turns] == [(n, one) for n in range(rounds) for one in (0, 1)]
    assert {turn.networks[0] for turn in found.turns if turn.setting} == {networks[1]}
    assert found.turns[0].traffic.interface == "eth0"
    assert report(found)["headline"] == headline
    assert "round 1 of 3: done" in capsys.readouterr().out


def test_records_pass_through_launchers_that_label_lines(capsys: pytest.CaptureFixture[str]) -> None:
    command.emit("result", report=report(results(1.0, 1.0, 1.0)))
    line = capsys.readouterr().out.strip()
    found = command.parse("[1,0]<stdout>:" + line)
    assert found is not None
    assert found["report"]["headline"] == "No difference between Bagua-Net and NCCL's own network at any size."
    assert command.parse("step 7 loss 0.5") is None
    assert command.parse(line[:-5]) is None
