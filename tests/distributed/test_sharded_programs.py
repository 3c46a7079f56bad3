"""Random programs of training steps under FSDP2 and hybrid sharding, beside plain FSDP2: what is rounded, when, and how
far it is off is known, whatever is frozen, checkpointed, compiled, saved, loaded or evaluated in between."""

from __future__ import annotations

import functools

from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples, is_default_run
from support.rank_pool import RankPool
from support.sharded_programs import MESHES, PARTS, WAYS, Twins
from support.sweeps import pool_of

# By default the same programs in every run.
PROGRAMS = settings(max_examples=examples(5), derandomize=is_default_run(), database=None)
booleans, ways = st.booleans(), st.sampled_from(WAYS)


def call(name: str, *arguments: st.SearchStrategy[object]) -> st.SearchStrategy[tuple[object, ...]]:
    return st.tuples(st.just(name), *arguments)


train = call("train", ways, booleans)
calls = st.one_of(
    train,
    train,
    call("accumulate", ways),
    call("forward", ways),
    call("look"),
    call("evaluate"),
    call("freeze", st.sampled_from(PARTS), booleans),
    call("save"),
    call("load"),
    call("compress_again"),
)
options = st.fixed_dictionaries(
    {
        "mesh": st.sampled_from(("shards", *MESHES)),
        "is_rooted": booleans,
        "keeps": booleans,
        "rounds": booleans,
        "every": st.sampled_from((0, 2, 3)),
        "feeds_back": booleans,
        "is_compiled": st.sampled_from((False, False, True)),
        "on_meta": booleans,
        "in_backward": st.sampled_from((False, False, True)),
    }
)


@pool_of(2)
@PROGRAMS
@given(st.data())
def test_sharded_training(pool: RankPool, data: st.DataObject) -> None:
    chosen = data.draw(options, label="options")
    program = data.draw(st.lists(calls, min_size=4, max_size=14), label="program")
    told = pool.play(functools.partial(Twins, **chosen), program)
    assert not told, told
