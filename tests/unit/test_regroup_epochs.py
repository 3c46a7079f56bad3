"""The next epoch follows from reports and losses alone, and one proposal of it holds."""

from __future__ import annotations

import itertools
from collections.abc import Collection
from dataclasses import replace

import torch.distributed as dist

from bagua.job.places import Place
from bagua.job.presence import Door
from bagua.regroup.epochs import (
    LEFT,
    NOTHING,
    PASS,
    START,
    Epoch,
    EpochStore,
    Member,
    Ready,
    Report,
    decide,
    first_call,
    kept,
)


def _epoch(ranks: int, step: int = 0) -> Epoch:
    place = Place("host", None, None, None, 7, "boot", Door(("127.0.0.1",), 5, "t"))
    return Epoch(3, tuple(Member(f"m{rank}", place, rank) for rank in range(ranks)), step)


def _reports(*steps: int) -> dict[str, Report]:
    return {f"m{rank}": Report(step) for rank, step in enumerate(steps)}


def test_all_are_waited_for_that_are_not_lost() -> None:
    reports = _reports(5, 5, 5)
    for left_out in itertools.chain([()], itertools.combinations(reports, 1), itertools.combinations(reports, 2)):
        given = {token: one for token, one in reports.items() if token not in left_out}
        assert (decide(_epoch(3), given, (), None) is None) == bool(left_out)
    decision = decide(_epoch(3), _reports(5, 5), {"m2"}, None)
    assert decision is not None
    assert decision.epoch is not None
    assert (decision.epoch.tokens, decision.epoch.number) == (("m0", "m1"), 4)
    assert (decision.epoch.step, decision.epoch.is_behind) == (5, False)


def test_who_has_reported_and_is_lost_is_lost() -> None:
    decision = decide(_epoch(3), _reports(5, 6, 5), {"m1"}, None)
    assert decision is not None
    assert decision.epoch is not None
    assert decision.epoch.tokens == ("m0", "m2")
    assert (decision.epoch.step, decision.epoch.is_behind) == (5, False)


def test_one_that_has_made_the_step_comes_first() -> None:
    decision = decide(_epoch(4), _reports(5, 5, 6, 6), {"m3"}, None)
    assert decision is not None
    assert decision.epoch is not None
    assert decision.epoch.tokens == ("m2", "m0", "m1")
    assert (decision.epoch.step, decision.epoch.is_behind) == (6, True)


def test_a_step_counts_that_some_optimizers_have_made() -> None:
    reports = {"m0": Report(5), "m1": Report(5, made=1), "m2": Report(5, made=1)}
    decision = decide(_epoch(3), reports, (), None)
    assert decision is not None
    assert decision.epoch is not None
    assert (decision.epoch.tokens, decision.epoch.is_behind) == (("m1", "m0", "m2"), True)
    assert (decision.epoch.step, decision.epoch.position) == (6, (5, 1))
    decision = decide(_epoch(3), {**reports, "m0": Report(6)}, (), None)
    assert decision is not None
    assert decision.epoch is not None
    assert (decision.epoch.tokens, decision.epoch.is_behind) == (("m0", "m1", "m2"), True)
    assert (decision.epoch.step, decision.epoch.position) == (6, (6, 0))


def test_those_that_all_admit_come_last_and_one_without_state_is_never_first() -> None:
    members = {one.token: one for one in _epoch(5).members}

    def decided(reports: dict[str, Report], lost: Collection[str]) -> tuple[tuple[str, ...], tuple[str, ...], bool]:
        decision = decide(_epoch(3), reports, lost, 1, members)
        assert decision is not None
        assert decision.epoch is not None
        return decision.epoch.tokens, decision.epoch.newcomers, decision.epoch.is_agreed

    admits = {f"m{rank}": Report(5, admits=("m3", "m4")) for rank in range(3)}
    assert decided(admits, ()) == (("m0", "m1", "m2", "m3", "m4"), ("m3", "m4"), True)
    assert decided(admits, {"m0", "m3"}) == (("m1", "m2", "m4"), ("m4",), True)
    assert decided(admits, {"m3", "m4"}) == (("m0", "m1", "m2"), (), True)
    # One was told of a loss before it came to the step.
    assert decided({**admits, "m1": Report(5)}, {"m2"}) == (("m0", "m1"), (), False)
    assert decided({**admits, "m1": Report(4)}, {"m2"}) == (("m0", "m1"), (), False)
    joining = {"m0": Report(5, is_whole=False), "m1": Report(5), "m2": Report(5, is_whole=False)}
    assert decided(joining, ()) == (("m1", "m0", "m2"), ("m0", "m2"), False)
    decision = decide(_epoch(3), joining, {"m1"}, 1)
    assert decision is not None
    assert "all ranks are lost that had its state" in decision.problem


def test_too_few_and_models_that_differ_end_the_job() -> None:
    for ranks, left, min_ranks, goes_on in ((4, 2, None, False), (5, 3, None, True), (4, 1, 1, True), (4, 1, 2, False)):
        lost = {f"m{rank}" for rank in range(left, ranks)}
        decision = decide(_epoch(ranks), _reports(*[0] * left), lost, min_ranks)
        assert decision is not None
        assert (decision.epoch is not None, bool(decision.problem)) == (goes_on, not goes_on)
    decision = decide(_epoch(2), {"m0": Report(0, 1), "m1": Report(0, 0)}, (), None)
    assert decision is not None
    assert "while models were wrapped" in decision.problem


def test_the_first_proposal_holds() -> None:
    store = EpochStore(dist.HashStore())  # type: ignore[attr-defined]
    first = store.first(_epoch(3).members)
    assert store.first(_epoch(2).members) == first == store.current()
    one, other = Epoch(1, first.members[:2], 4), Epoch(1, first.members[1:], 4)
    assert store.propose(first, one) == one
    assert store.propose(first, other) == one == store.current()
    assert store.propose(one, Epoch(2, one.members)).number == 2


def test_losses_and_reports_are_read_as_they_were_written() -> None:
    server = dist.HashStore()  # type: ignore[attr-defined]
    store, reader = EpochStore(server), EpochStore(server)
    epoch = store.first(_epoch(3).members)
    assert reader.lost() == {}
    store.add_lost("m1", "exited")
    assert reader.lost() == {"m1": "exited"}
    store.add_lost("m2", LEFT)
    store.add_lost("m1", LEFT)
    assert reader.lost() == {"m1": "exited", "m2": LEFT}
    store.report(epoch, "m0", Report(7, 1, False, ("m5",)))
    assert reader.reports(epoch, {"m1"}) == {"m0": Report(7, 1, False, ("m5",))}
    readies = [Ready(PASS, 2, (7, 0), [{"rows": 3}, None]), Ready(START, 0, (7, 0)), Ready(NOTHING, 0, (6, 1))]
    store.set_ready(epoch, "m0", readies[0])
    assert [one.token for one in reader.not_ready(epoch)] == ["m1", "m2"]
    store.set_ready(epoch, "m1", readies[1])
    store.set_ready(epoch, "m2", readies[2])
    assert [(one.hold, one.calls, one.position, list(one.samplers)) for one in reader.readies(epoch)] == [
        (one.hold, one.calls, one.position, list(one.samplers)) for one in readies
    ]


def test_a_pass_is_kept_if_all_keep_theirs_and_repeated_from_where_the_last_one_is() -> None:
    epoch = replace(_epoch(3), step=7)

    def decided(*readies: Ready) -> tuple[list[bool], int]:
        return kept(epoch, readies), first_call(epoch, readies)

    here, before, start = Ready(PASS, 2, (7, 0)), Ready(PASS, 1, (7, 0)), Ready(START, 0, (7, 0))
    assert decided(here, here, here) == ([True] * 3, 2)
    assert decided(here, before, here) == ([True] * 3, 1)
    assert decided(here, start, before) == ([True] * 3, 0)
    assert decided(here, Ready(PASS, 2, (6, 0)), here) == ([True, False, True], 0)  # which has that step made for it
    assert decided(here, Ready(NOTHING, 0, (7, 0)), start)[0] == [False, False, True]
    # An optimizer has stepped, of two: the rest is dropped. One that is about to begin the next step does so.
    epoch = replace(epoch, step=8, made=1)
    assert decided(Ready(PASS, 4, (7, 1)), Ready(PASS, 2, (7, 0)), Ready(PASS, 4, (7, 1)), start)[0] == [
        *(False, False, False),
        True,
    ]


def test_one_that_has_left_is_missing_only_in_collectives_after_its_last() -> None:
    store, epoch = EpochStore(dist.HashStore()), _epoch(4)  # type: ignore[attr-defined]
    store.add_lost("m3", "exited")  # which all are told
    assert store.left_before(epoch, 100) == []
    store.leave(epoch, "m1", 7)
    assert store.left_before(epoch, 7) == []
    assert store.left_before(epoch, 8) == [epoch.members[1]]
    store.leave(replace(epoch, number=2), "m2", 9)  # in an epoch before
    assert store.left_before(epoch, 1) == [epoch.members[2]]
