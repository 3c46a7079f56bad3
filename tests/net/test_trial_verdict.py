"""From turns to what `bagua-net test` says: made-up figures, one for each kind of network."""

from __future__ import annotations

import pytest

from bagua.net.bench.errors import BenchError
from bagua.net.compare.setting import Setting
from bagua.net.compare.traffic import NO_TRAFFIC, Traffic
from bagua.net.trial import records
from bagua.net.trial.plan import SIZES
from bagua.net.trial.records import Job, Turn
from bagua.net.trial.supervisor import job_of, turn_of
from bagua.net.trial.verdict import Results, conclude, rows

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


def test_ranks_on_one_host_end_after_a_round() -> None:
    assert results(1.0, 1.0, 1.0, rounds=1, transport="SHM", job=Job(2, 1, "nccl")).is_pointless()
    assert not results(1.0, 1.0, 1.0, rounds=1).is_pointless()


def test_a_saturated_network_is_the_limit() -> None:
    full = Traffic("eth0", 1 << 30, 3.0e9, 3.125e9)
    faster, same = conclude(results(2.0, 2.0, 2.0, traffic=full)), conclude(results(1.0, 1.0, 1.0, traffic=full))
    assert faster.reasons == ("The network is saturated: eth0 carried up to 24 Gb/s of its 25 Gb/s.",)
    assert same.reasons[0].startswith("The network is saturated: eth0 carried up to 24.0 of its 25 Gb/s.")
    assert same.use_plugin is False


def rank(host: str, gpus: int = 8, **values: object) -> dict[str, object]:
    return {"host": host, "identity": f"kernel of {host}", "gpus": gpus, **values}


def test_gpus_on_some_nodes_only_are_refused() -> None:
    assert job_of([rank("a"), rank("a"), rank("b")]) == Job(3, 2, "nccl")
    assert job_of([rank("a", 0), rank("b", 0)]) == Job(2, 2, "gloo", ("a", "b"))
    with pytest.raises(BenchError, match="no GPU that torch can use on b, where other ranks have one"):
        job_of([rank("a"), rank("b", 0)])


def test_a_turn_is_of_all_ranks() -> None:
    def said(network: str, peak: float) -> dict[str, object]:
        traffic = {"interface": f"eth{peak:.0f}", "nbytes": 1, "peak_bytes_per_s": peak, "speed_bytes_per_s": None}
        transports = [f"NET/{network}"]
        seconds = {str(size): 1.0 for size in SIZES}
        return {
            "seconds": seconds,
            "network": network,
            "transports": transports,
            "wrote_nccl_log": True,
            "traffic": traffic,
        }

    turn = turn_of(1, 2, [said("Socket", 1.0), said("BaguaNet", 2.0)])
    assert turn.networks == ("BaguaNet", "Socket")
    assert turn.traffic.interface == "eth2"
    assert set(turn.seconds) == set(SIZES)


def test_records_pass_through_launchers_that_label_lines(capsys: pytest.CaptureFixture[str]) -> None:
    turn = Turn(1, 0, {8: 0.5}, ("BaguaNet",), ("NET/BaguaNet",), True, NO_TRAFFIC)
    records.emit("turn", **turn.__dict__ | {"traffic": NO_TRAFFIC.__dict__})
    line = capsys.readouterr().out.strip()
    found = records.parse("[1,0]<stdout>:" + line)
    assert found is not None
    assert Turn.of_record(found) == turn
    assert records.parse("step 7 loss 0.5") is None
    assert records.parse(line[:-5]) is None
