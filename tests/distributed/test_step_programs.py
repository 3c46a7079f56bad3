"""Random programs of training steps, of every algorithm: what an engine communicates is right or refused by its own
message, the ranks stay together, and nothing hangs (a rank that does not answer fails the test with the program)."""

from __future__ import annotations

import functools
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from support.algorithm_cases import Case
from support.branching import HEADS, PARTS, PLACES
from support.examples import examples, is_default_run
from support.rank_pool import RankPool
from support.step_programs import FOUND, OPTIMIZERS, BesideTorch, trainer_of
from support.sweeps import pool_of
from support.weight_exchanges import ALL_RANKS, HOWS, Turns
from support.weight_exchanges import PARTS as IN_TURN

# By default the same programs in every run.
PROGRAMS = settings(max_examples=examples(4), derandomize=is_default_run(), database=None)
MORE_PROGRAMS = settings(PROGRAMS, max_examples=examples(2))
SIZES = (None, 4, 80, 200)  # bytes of a bucket: one for all, one for each parameter, and some between
booleans = st.booleans()
heads = st.sampled_from((HEADS[0], *HEADS))


def calls(ranks: int) -> st.SearchStrategy[tuple[object, ...]]:
    def call(name: str, *arguments: st.SearchStrategy[object]) -> st.SearchStrategy[tuple[object, ...]]:
        return st.tuples(st.just(name), *arguments)

    rank = st.none() | st.integers(0, ranks - 1)
    return st.one_of(
        call("train", heads, rank),
        call("two_losses", heads, heads),
        call("forward", heads, booleans),
        call("backward", booleans, booleans),
        call("forward", heads, st.just(False)),
        call("backward", st.just(False), booleans),
        call("step", rank),
        call("step"),
        call("zero", booleans),
        call("freeze", st.sampled_from(PARTS), booleans),
        call("resize", st.sampled_from(SIZES), booleans),
        call("raising", heads, st.sampled_from(PLACES), booleans),
        call("evaluate", rank, booleans, booleans),
        call("save"),
        call("load"),
        call("wrap"),
    )


def options(*hows: str) -> st.SearchStrategy[dict[str, Any]]:
    how = st.sampled_from(("with_bagua", "with_bagua unflattened", "wrapper", "wrapper unflattened", *hows))
    return st.fixed_dictionaries({"zeroes": booleans, "how": how, "bytes": st.sampled_from(SIZES)})


def check(pool: RankPool, data: st.DataObject, cases: tuple[Case, ...], *hows: str) -> None:
    case = data.draw(st.sampled_from(cases), label="algorithm")
    chosen = data.draw(options(*hows), label="options")
    program = data.draw(st.lists(calls(pool.size), max_size=14), label="program")
    told = pool.play(functools.partial(trainer_of, case, chosen), program)
    assert not told, told


@pool_of(2)
@MORE_PROGRAMS
@given(st.data())
def test_gradients(pool: RankPool, data: st.DataObject) -> None:
    cases = (Case("gradient_allreduce"), Case("gradient_allreduce"), Case("bytegrad", {"hierarchical": False}))
    check(pool, data, cases, "wrapper finding unused")


@pool_of(3)
@PROGRAMS
@given(st.data())
def test_weights(pool: RankPool, data: st.DataObject) -> None:
    cases = [
        Case("decentralized"),
        Case("decentralized", {"communication_interval": 2}),
        Case("low_precision_decentralized"),
        Case("qadam"),
        Case("async", {"sync_interval_ms": 1}),
        Case("async", {"sync_interval_ms": 1, "warmup_steps": 3}),
    ]
    if pool.size % 2 == 0:
        cases.append(Case("decentralized", {"peer_selection_mode": "shift_one", "hierarchical": False}))
    check(pool, data, tuple(cases))


def calls_of_torch() -> st.SearchStrategy[tuple[object, ...]]:
    which = st.integers(0, len(HEADS) - 1)
    hows = st.sampled_from(
        (*("plain", "plain", "checkpointed", "reentrant"), *("two forward passes", "raising", "penalty"))
    )
    synchronized = st.tuples(st.just("passes"), which, booleans, hows | st.just("closure"), st.just(""))
    return st.one_of(
        st.tuples(st.just("train"), which, booleans),
        synchronized,
        synchronized,
        st.tuples(st.just("passes"), which, booleans, hows, st.sampled_from(("no_sync", "attribute"))),
        st.tuples(st.just("step")),
        st.tuples(st.just("zero"), st.sampled_from(("to none", "to zero", "by hand"))),
        st.tuples(st.just("schedule"), st.sampled_from((0.5, 2.0))),
        st.tuples(st.just("add_group")),
    )


wrapper_options = st.fixed_dictionaries(
    {
        "bytes": st.sampled_from(SIZES),
        "finds_unused": booleans,
        "views": booleans,
        "listed": booleans,
        "kind": st.sampled_from(["sgd", *OPTIMIZERS]),
    }
)


@pool_of(2)
@MORE_PROGRAMS
@given(wrapper_options, st.lists(calls_of_torch(), min_size=4, max_size=14))
def test_wrapper(pool: RankPool, options: dict[str, object], program: list[tuple[object, ...]]) -> None:
    """Beside torch's."""
    told = pool.play(functools.partial(BesideTorch, options), program)
    assert not told, told


def turns(ranks: int) -> st.SearchStrategy[tuple[object, ...]]:
    rank = st.none() | st.integers(0, ranks - 1)
    parts = st.lists(st.sampled_from(IN_TURN), min_size=1, max_size=2, unique=True)
    # Mostly one part, the others frozen.
    turn = st.tuples(st.just("turn"), parts)
    any_turn = st.tuples(st.just("turn"), parts, booleans, st.sampled_from(HOWS), rank, rank | st.just(ALL_RANKS))
    return st.one_of(
        turn,
        any_turn,
        any_turn,
        st.tuples(st.just("evaluate"), rank, booleans),
        st.tuples(st.just("rebuild"), st.sampled_from(SIZES)),
        st.tuples(st.just("wrap_again"), booleans),
        st.tuples(st.just("step_again")),
        st.tuples(st.just("save")),
        st.tuples(st.just("load"), parts | st.just(IN_TURN), booleans),
    )


@pool_of(3)
@PROGRAMS
@given(st.data())
def test_parts_in_turn(pool: RankPool, data: st.DataObject) -> None:
    """Optimizers in turn, parts frozen in turn, steps in hooks, late ranks, states of any moment."""
    cases = [
        ("local_sgd", {"sync_every": 3}),
        ("diloco", {"sync_every": 2}),
        ("streaming_diloco", {"sync_every": 4}),
        ("streaming_diloco", {"sync_every": 6, "fragments": 2, "delay": 2, "alpha": 0.25}),
        ("decentralized", {"hierarchical": False}),
        ("decentralized", {"hierarchical": False, "communication_interval": 3}),
        *[("decentralized", {"hierarchical": False, "peer_selection_mode": "shift_one"})] * (pool.size == 2),
        ("low_precision_decentralized", {"hierarchical": False}),
        ("low_precision_decentralized", {"hierarchical": False, "communication_interval": 2}),
    ]
    case = data.draw(st.sampled_from(cases), label="algorithm")
    program = data.draw(st.lists(turns(pool.size), min_size=6, max_size=20), label="program")
    told = pool.play(functools.partial(Turns, case), program)
    assert not told, told


@pool_of(3)
def test_programs_that_failed(pool: RankPool) -> None:
    told = {
        name: pool.play(functools.partial(trainer_of, found.case, found.options), found.calls)
        for name, found in FOUND.items()
    }
    assert not any(told.values()), "\n".join(f"{name}: {one}" for name, one in told.items())
