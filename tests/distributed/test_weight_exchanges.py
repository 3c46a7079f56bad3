"""Algorithms that exchange weights, on ranks and emulated nodes, compared with the same loops by hand. Programs of what
else a loop may do: test_step_programs.py; parts that are trained in turn: test_parts_in_turn.py."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.ranks import run_ranks
from support.sweeps import rest_is_deep
from support.training import NODES_OF_TWO_AND_ONE, TWO_NODES_OF_TWO, begin, check_tensor_on_ranks, gathered, launched_on
from support.weight_exchanges import (
    ALL_RANKS,
    PARTS,
    Case,
    MeansByHand,
    Nodes,
    RoundsByHand,
    Turns,
    partner_of,
)
from support.weight_exchanges import HOWS as HOWS_OF_ROUNDS

HOWS = ("with_bagua", "with_bagua unflattened", "wrapper", "wrapper unflattened")
DTYPES = (torch.float32, torch.bfloat16, torch.float32, torch.float16)
STEPS = 13

# name -> environment of each rank, and the ranks of each node, if there is a hierarchy.
JOBS: dict[str, tuple[list[dict[str, str]], Nodes | None]] = {
    "a rank": (launched_on(1), None),
    "two ranks": (launched_on(2), None),
    "three ranks": (launched_on(3), None),
    "four ranks": (launched_on(4), None),
    "a node of one": (launched_on(1), [[0]]),
    "a node of three": (launched_on(3), [[0, 1, 2]]),
    "two nodes of two": (TWO_NODES_OF_TWO, [[0, 1], [2, 3]]),
    "nodes of two and one": (NODES_OF_TWO_AND_ONE, [[0, 1], [2]]),
    "four nodes": (launched_on(1, 1, 1, 1), [[0], [1], [2], [3]]),
}


def outer_adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.05)


LOCAL_STEPS: tuple[Case, ...] = (
    ("local_sgd", {"sync_every": 1}),
    ("local_sgd", {"sync_every": 4}),
    ("diloco", {"sync_every": 3}),
    ("diloco", {"sync_every": 3, "outer_optimizer": outer_adam}),
    ("diloco", {"sync_every": 2, "momentum_rounds": 3}),
    ("streaming_diloco", {"sync_every": 2, "momentum_rounds": 3}),
    ("streaming_diloco", {"sync_every": 4}),
    ("streaming_diloco", {"sync_every": 6, "fragments": 3, "delay": 1, "alpha": 0.25}),
    ("streaming_diloco", {"sync_every": 3, "fragments": 1, "delay": 2, "alpha": 0.5}),
    ("streaming_diloco", {"sync_every": 6, "delay": 1, "alpha": 1.0}),
)


def _cases(nodes: Nodes | None, ranks: int) -> Iterator[tuple[Case, dict[str, Any]]]:
    """With what each is made."""
    options: dict[str, Any] = {"hierarchical": nodes is not None}
    modes = ["all"] if (len(nodes) if nodes else ranks) % 2 and ranks > 1 else ["all", "shift_one"]
    if nodes is not None and len(nodes) == 1:
        modes = ["all", "shift_one"]
    hows = itertools.cycle((*HOWS, "wrapper unlisted", "wrapper unlisted unflattened"))
    for mode, interval, dtype in zip(
        itertools.cycle(modes), (1, 2, 3, 1, 2, 1)[: 3 if nodes else 6], itertools.cycle(DTYPES), strict=False
    ):
        how = next(hows)
        case = ("decentralized", {**options, "peer_selection_mode": mode, "communication_interval": interval})
        yield case, {"how": how, "dtype": dtype, "nodes": nodes}
    for how, interval, dtype in list(zip(HOWS, (1, 3, 2, 1), DTYPES, strict=True))[: 2 if nodes else 4]:
        case = ("low_precision_decentralized", {**options, "communication_interval": interval})
        yield case, {"how": how, "dtype": dtype, "nodes": nodes}
    if ranks == 2:
        for case, how in zip(LOCAL_STEPS, itertools.cycle(HOWS), strict=False):
            yield case, {"how": how}


def _train(job: str) -> None:
    begin()
    for case, options in _cases(JOBS[job][1], len(JOBS[job][0])):
        turns = Turns(case, **options)
        if case[0] == "low_precision_decentralized":
            turns.rebuild(50)
            assert len(turns.net.bagua_ddp.bagua_buckets) > 1
        try:
            for _ in range(STEPS if isinstance(turns.hand, RoundsByHand) else 7):
                turns.turn(PARTS)
                _check_exchange(turns)
            if isinstance(turns.hand, RoundsByHand):
                _check_rounds(turns, turns.hand)
            if job == "two ranks" and "unlisted" not in turns.how and turns.dtype == torch.float32:
                _vary(turns)
            if job == "four ranks":  # who have other partners in each exchange
                turns.rebuild(80)
                turns.turn(PARTS)
        except AssertionError as error:
            error.add_note(f"{case} {options}")
            raise
        turns.net.bagua_ddp.detach()
    if job == "two ranks":
        _unfreeze()


def _unfreeze() -> None:
    """Buckets are made anew within a round, and what the outer optimizer has is kept."""
    for options in ({"sync_every": 3}, {"sync_every": 3, "momentum_rounds": 4}):
        turns = Turns(("diloco", options), frozen=PARTS[:1])
        for parts in (PARTS[1:],) * 5 + (PARTS,) * 7:
            turns.turn(parts)
        turns.net.bagua_ddp.detach()


def _vary(turns: Turns) -> None:
    """Each call of the programs once. Of unlisted optimizers steps are not seen."""
    for how in HOWS_OF_ROUNDS:
        turns.turn(PARTS, how=how)
        turns.step_again()
    last = turns.ranks - 1
    for parts, freezes, skips, trial in (
        (PARTS, True, last, None),
        (PARTS[:1], True, None, ALL_RANKS),
        (PARTS[2:], True, None, last),
        (PARTS[:2], False, None, None),
    ):
        turns.turn(parts, freezes, "plain", skips, trial)
    turns.rebuild(80)
    turns.save()
    turns.turn(PARTS)
    for is_same in (False, True):
        turns.wrap_again(is_same)
        turns.evaluate(last, True)
        turns.turn(PARTS[1:])
    turns.load()
    turns.finish()


def _check_exchange(turns: Turns) -> None:
    """Ranks that have taken a mean together have the same bits of it."""
    hand = turns.hand
    if not isinstance(hand, MeansByHand) or (hand.passes - 1) % hand.interval:
        return
    (bucket,) = turns.net.bagua_ddp.bagua_buckets
    assert bucket.operation.exchanges == hand.exchanges
    if hand.mode == "all":
        check_tensor_on_ranks(bucket._peer_weight, "peer weight")
        return
    every, nodes = gathered(bucket._peer_weight), hand.nodes
    mine = next(place for place, node in enumerate(nodes) if turns.rank in node)
    for other in (*nodes[mine], *nodes[partner_of(mine, len(nodes), hand.exchanges - 1)]):
        assert torch.equal(every[other], bucket._peer_weight), (turns.rank, other)


def _check_rounds(turns: Turns, hand: RoundsByHand) -> None:
    assert hand.fragments is not None
    named = [name for name, _ in reversed(list(turns.net.named_parameters()))]
    assert [*itertools.chain(*hand.fragments)] == named, "fragments follow the order of the parameters"
    last = hand.fragments[(hand.rounds - 1) % len(hand.fragments)]
    if hand.steps == hand.delay == hand.alpha == 0:
        for name in last:
            check_tensor_on_ranks(turns.net.get_parameter(name), name)
    stats = turns.net.bagua_ddp.stats()
    assert stats.steps == hand.rounds
    timed = {bucket.name.partition(".")[0] for bucket in stats.buckets}
    assert timed == {str((hand.rounds - 1) % len(hand.fragments))}, "each exchange is timed, the last one too"
    assert stats.nbytes in [sum(4 * turns.net.get_parameter(name).numel() for name in part) for part in hand.fragments]


@pytest.mark.parametrize("job", rest_is_deep([*JOBS], 0, 1, 2, 3, 5, 6, 7))
def test_weights_are_those_of_the_loops(job: str) -> None:
    env, _ = JOBS[job]
    run_ranks(len(env), _train, job, env=env)
