"""Compressed FSDP2 over several nodes: what leaves a node, by the kernel's counters, and what is said of nodes that
cannot reduce among themselves first."""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.labs import Lab, enter_namespace, needs_lab
from support.logged import Lines
from support.ranks import run_ranks
from support.sharded import check_near, train_sharded, twins, weights_of
from support.sweeps import rest_is_deep
from support.training import NODES_OF_TWO_AND_ONE, TWO_NODES_OF_TWO, batches, begin, message_of
from torch.distributed.fsdp import fully_shard

from bagua.fsdp import compress_communication

# Ranks of a host, and the codec.
CASES = [(1, "int8"), (2, "int4"), (2, "int8"), (4, "int8"), (4, "int4")]


def _measured_on_hosts(namespaces: list[str], codec: str) -> dict[str, dict[str, int]]:
    """What this rank and, if it is the first of its host, the host has sent for one purpose."""
    enter_namespace(namespaces[int(os.environ["RANK"])])
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(2)))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    handle = compress_communication(model, gradients=codec, weights=codec)
    batch = torch.randn(4, 1024)

    def gradients() -> None:
        model(batch).sum().backward()

    def weights() -> None:
        with torch.no_grad():
            for layer in model:
                layer.unshard()  # type: ignore[operator]
                layer.reshard()  # type: ignore[operator]

    def sent_by_host() -> int:
        dist.barrier()
        (line,) = (line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("eth0:"))
        dist.barrier()  # nobody sends more before all have read
        return int(line.partition(":")[2].split()[8])

    def measured(purpose: str, work: Callable[[], None]) -> dict[str, int]:
        work()
        before, counted = sent_by_host(), handle.statistics[purpose]["sent"]
        for _ in range(3):
            work()
        counted = handle.statistics[purpose]["sent"] - counted
        return {"counted": counted, "host": sent_by_host() - before}

    found = {"weights": measured("weights", weights)}
    model.set_reshard_after_forward(False)  # type: ignore[operator]
    model.set_reshard_after_backward(False)  # type: ignore[operator]  # and no optimizer: weights are gathered once
    found["gradients"] = measured("gradients", gradients)
    return found


@needs_lab
@pytest.mark.parametrize(("ranks", "codec"), rest_is_deep(CASES, 2))
def test_what_leaves_a_node_is_what_the_codec_makes_of_one_gradient(ranks: int, codec: str) -> None:
    """Of plain fp32 a ring of all ranks sends the whole once, but for one rank's part."""
    with Lab(ip_versions=(4,), mtu=9000) as lab:
        places = list(itertools.product(range(2), range(ranks)))
        found = run_ranks(
            2 * ranks,
            _measured_on_hosts,
            [str(lab.hosts[host].namespace.path) for host, _ in places],
            codec,
            env=[lab.rank_environment(host, local_rank, ranks) for host, local_rank in places],
        )
    plain = 3 * 4 * 2 * 1024 * 1025 * (2 * ranks - 1) / (2 * ranks)
    for purpose in ("gradients", "weights"):
        for first in (0, ranks):
            host = found[first][purpose]["host"]
            counted = sum(one[purpose]["counted"] for one in found[first : first + ranks])
            assert host == pytest.approx(counted, rel=0.05), purpose
            assert host <= {"int8": 0.3, "int4": 0.16}[codec] * plain, purpose


def _trained(caplog_lines: list[str]) -> Any:
    _, device = begin()
    model, plain = twins(device)
    heard = Lines()
    handle = compress_communication(model, error_feedback=True)
    logging.getLogger("bagua").removeHandler(heard)
    caplog_lines += heard.lines
    for one in (model, plain):
        train_sharded(one, [torch.optim.SGD(one.parameters(), lr=0.1)], batches(dist.get_rank(), 4, device))
    check_near(weights_of(model), weights_of(plain), 0.02, "trained")
    return handle


def _on_two_nodes() -> None:
    lines: list[str] = []
    handle = _trained(lines)
    assert lines == []
    state = handle.state_dict()
    assert state["settings"]["nodes"] == ((0, 1), (2, 3))
    # What a rank owes is of the sum of its node, for the ranks that share its position.
    assert {len(one) for one in state["residuals"].values()} == {2}
    handle.load_state_dict(state)
    state["settings"]["nodes"] = ((0, 2), (1, 3))
    assert "nodes was ((0, 2), (1, 3)) and is ((0, 1), (2, 3))" in message_of(
        ValueError, lambda: handle.load_state_dict(state)
    )


def test_a_model_on_two_nodes_trains_like_a_plain_one() -> None:
    run_ranks(4, _on_two_nodes, env=TWO_NODES_OF_TWO)


def _with_one_hop(words: str) -> None:
    lines: list[str] = []
    handle = _trained(lines)
    expected = [words] if words and dist.get_rank() == 0 else []
    assert len(lines) == len(expected)
    assert all(words in line for words, line in zip(expected, lines, strict=True))
    assert handle.state_dict()["settings"]["nodes"] is None


def test_nodes_with_different_numbers_of_ranks_are_named() -> None:
    run_ranks(3, _with_one_hop, "because the nodes have 2, 1 ranks", env=NODES_OF_TWO_AND_ONE)


def test_variables_that_contradict_each_other_are_named_and_others_are_one_node() -> None:
    both_first = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0"}
    run_ranks(2, _with_one_hop, "cannot tell which ranks share a node", env=[both_first, both_first])
    run_ranks(2, _with_one_hop, "")  # nothing lost, nothing to say
