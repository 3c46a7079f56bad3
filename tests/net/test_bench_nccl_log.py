"""What is read from NCCL's log. The lines are those that NCCL 2.28 and 2.30 write at NCCL_DEBUG=INFO."""

from __future__ import annotations

from pathlib import Path

from bagua.net.bench.nccl_log import NetworkProof, network_error, read_proof, read_proof_file

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
