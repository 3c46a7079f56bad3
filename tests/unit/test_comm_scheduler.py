"""The launch order, whatever the order of marks; passes, errors, and the communication thread. Without a group."""

from __future__ import annotations

import gc
import random
import threading
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import bagua.torch_api.tensor  # noqa: F401 - gives tensors their methods
from bagua.collectives.tensor import ensure_record, gradient_of, set_gradient
from bagua.engine.bucket import Bucket, BucketOp, FunctionOp
from bagua.engine.comm_scheduler import CommScheduler
from bagua.engine.comm_thread import EarlierFailureError


class _TorchGroup:
    """Nothing but an object that a thread can belong to."""


def _alone() -> Any:
    """A group of this process, without a stream: what a machine without CUDA has."""
    return SimpleNamespace(ranks=[0], stream=None, torch_group=_TorchGroup())


def _bucket(name: str, size: int, *ops: BucketOp) -> Bucket:
    tensors: list[Any] = [torch.full((2,), float(number)) for number in range(size)]
    for number, tensor in enumerate(tensors):
        tensor.ensure_bagua_tensor(f"{name}.{number}", "module")
    bucket = Bucket(tensors, name)
    for op in ops:
        bucket.append_op(op)
    return bucket


def _recording(sizes: Sequence[int], inline: bool = True) -> tuple[list[Bucket], list[str]]:
    launched: list[str] = []
    buckets = [_bucket(str(number), size, FunctionOp(launched.append, inline)) for number, size in enumerate(sizes)]
    return buckets, launched


def _marks(buckets: Sequence[Bucket]) -> list[Callable[[], None]]:
    return [tensor.bagua_mark_communication_ready for bucket in buckets for tensor in bucket.tensors]


def _call_all(functions: Iterable[Callable[[], None]]) -> None:
    for function in functions:
        function()


@given(st.lists(st.integers(1, 4), min_size=1, max_size=6), st.integers(1, 4), st.booleans(), st.randoms())
def test_the_order_is_that_of_the_buckets(sizes: list[int], passes: int, inline: bool, draw: random.Random) -> None:
    buckets, launched = _recording(sizes, inline)
    scheduler = CommScheduler(buckets, _alone())
    marks = _marks(buckets)
    for _ in range(passes):
        draw.shuffle(marks)
        _call_all(marks)
        scheduler.wait_pending_comm_ops()
        assert scheduler.end_step() == []
    assert launched == [bucket.name for bucket in buckets] * passes
    scheduler.close()


@given(st.lists(st.integers(1, 3), min_size=1, max_size=5), st.randoms())
def test_a_bucket_is_launched_as_soon_as_it_and_all_before_it_are_ready(sizes: list[int], draw: random.Random) -> None:
    buckets, launched = _recording(sizes)
    scheduler = CommScheduler(buckets, _alone())
    order = [(number, index) for number, size in enumerate(sizes) for index in range(size)]
    draw.shuffle(order)
    missing = [set(range(size)) for size in sizes]
    for number, index in order:
        buckets[number].tensors[index].bagua_mark_communication_ready()
        missing[number].discard(index)
        complete = next((place for place, rest in enumerate(missing) if rest), len(sizes))
        assert launched == [str(place) for place in range(complete)]
    scheduler.close()


def test_buckets_whose_tensors_different_threads_make() -> None:
    buckets, launched = _recording([8] * 20)
    scheduler = CommScheduler(buckets, _alone())
    for _ in range(20):
        threads = [threading.Thread(target=_call_all, args=(_marks(buckets[number::4]),)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        scheduler.wait_pending_comm_ops()
    assert launched == [str(number) for number in range(20)] * 20
    scheduler.close()


# --- passes and steps ------------------------------------------------------------------------------------------------


def test_marks_of_two_passes_add_up_and_nothing_is_sent_before_the_second_ends() -> None:
    buckets, launched = _recording([2, 2])
    scheduler = CommScheduler(buckets, _alone())
    (a, b), (c, d) = ([tensor.bagua_mark_communication_ready for tensor in bucket.tensors] for bucket in buckets)
    _call_all((a, c, d))
    scheduler.wait_pending_comm_ops()
    assert launched == []
    # The second pass makes the gradient of `a` once more, after the bucket has all its marks.
    b()
    a()
    assert launched == []
    scheduler.wait_pending_comm_ops()
    assert launched == ["0", "1"]
    assert scheduler.end_step() == []
    # As ever after that.
    _call_all((a, b))
    assert launched == ["0", "1", "0"]
    scheduler.close()


def test_a_gradient_that_is_made_twice_in_one_pass_is_an_error() -> None:
    buckets, _ = _recording([1, 1])
    scheduler = CommScheduler(buckets, _alone())
    first = buckets[0].tensors[0].bagua_mark_communication_ready
    first()
    with pytest.raises(RuntimeError, match=r"'0\.0' became ready again.*use_reentrant=False"):
        first()
    # A later pass of the same step may, though: accumulation.
    scheduler.wait_pending_comm_ops()
    first()
    scheduler.close()


def _gradients(*values: float, scale: float) -> Bucket:
    """A bucket of two elements for each gradient, which were made just now; its operation wants them multiplied."""
    parameters: list[Any] = [nn.Parameter(torch.zeros(2)) for _ in values]
    for number, parameter in enumerate(parameters):
        ensure_record(parameter, f"p{number}", "module", gradient_of, set_gradient)
    bucket = Bucket(parameters, "gradients").append_op(FunctionOp(lambda _: None, inline=True, prescale=scale))
    for parameter, value in zip(parameters, values, strict=True):
        parameter.grad = torch.full((2,), value)
    return bucket


@pytest.mark.parametrize("large", [1, 1000])
def test_gradients_of_two_passes_are_added_before_they_are_scaled(large: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bagua.engine.bucket_memory._LARGE_GRADIENT", large)
    bucket = _gradients(4.0, 12.0, scale=0.25)
    scheduler = CommScheduler([bucket], _alone())
    first, second = bucket.tensors
    first.bagua_mark_communication_ready()
    scheduler.wait_pending_comm_ops()
    assert first.grad.tolist() == [4.0, 4.0]  # what users see between the passes
    first.grad += 8.0
    for parameter in (first, second):
        parameter.bagua_mark_communication_ready()
    scheduler.wait_pending_comm_ops()
    assert bucket.flattened_tensor().tolist() == [3.0] * 4
    scheduler.close()


@pytest.mark.parametrize(
    ("passes", "missing"),
    [
        ([[]], []),
        ([["0.0", "0.1", "1.0", "2.0"]], []),
        ([["0.0"]], ["0.1", "1.0", "2.0"]),
        ([["1.0"]], ["0.0", "0.1", "2.0"]),
        ([["0.0", "0.1"]], ["1.0", "2.0"]),  # a whole bucket was sent, and nothing of the others was marked
        ([["0.0", "0.1", "2.0"]], ["1.0"]),
        # Of the first pass nothing is missing, but what the second one made of another bucket would be lost.
        ([["0.0", "0.1", "1.0", "2.0"], ["1.0"]], ["0.0", "0.1"]),
    ],
)
def test_what_a_step_lacks(passes: list[list[str]], missing: list[str]) -> None:
    buckets, launched = _recording([2, 1, 1])
    scheduler = CommScheduler(buckets, _alone())
    for marked in passes:
        for bucket in buckets:
            for tensor in bucket.tensors:
                if tensor.bagua_tensor_name in marked:
                    tensor.bagua_mark_communication_ready()
        scheduler.wait_pending_comm_ops()
    assert scheduler.end_step() == missing
    # After an error everything begins anew, in the first order.
    scheduler.reset()
    assert scheduler.end_step() == []
    launched.clear()
    _call_all(_marks(buckets))
    assert launched == ["0", "1", "2"]
    scheduler.close()


def test_a_bucket_may_be_sent_more_often_than_others_in_a_step() -> None:
    buckets, launched = _recording([1, 1])
    scheduler = CommScheduler(buckets, _alone())
    first, second = _marks(buckets)
    for marks in ((first,), (first, second)):
        _call_all(marks)
        scheduler.wait_pending_comm_ops()
    assert scheduler.end_step() == []
    # The first waited for its turn.
    assert launched == ["0", "1", "0"]
    scheduler.close()


@pytest.mark.parametrize(("marked", "missing"), [(1, ["0.0", "1.0", "1.1"]), (2, ["0.0", "1.1"])])
def test_a_step_goes_on_with_other_buckets(marked: int, missing: list[str]) -> None:
    """The first tensor was sent in a bucket of its own, and is sent again with the others; the second one may have been
    made."""
    former, _ = _recording([1, 2])
    before = CommScheduler(former, _alone())
    _call_all(_marks(former)[:marked])
    before.wait_pending_comm_ops()
    before.close()
    launched: list[str] = []
    bucket = Bucket([tensor for one in former for tensor in one.tensors], "all")
    after = CommScheduler([bucket.append_op(FunctionOp(launched.append, inline=True))], _alone())
    after.continue_step_of(before)
    assert after.end_step() == missing
    # Another pass may add to what there is.
    _call_all(_marks([bucket]))
    assert launched == []
    after.wait_pending_comm_ops()
    assert launched == ["all"]
    assert after.end_step() == []
    after.close()


# --- the launch set of a step ----------------------------------------------------------------------------------------


def test_only_the_buckets_that_were_chosen_are_communicated_in_the_step() -> None:
    buckets, launched = _recording([2, 1, 2])
    scheduler = CommScheduler(buckets, _alone())
    scheduler.choose_buckets([buckets[2], buckets[1]])
    for mark in _marks(buckets):  # those of the other bucket mean nothing, however often they come
        mark()
        if mark in _marks(buckets[:1]):
            mark()
    scheduler.wait_pending_comm_ops()
    assert launched == ["1", "2"]
    assert scheduler.end_step() == []
    # The next step communicates all, unless others are chosen.
    launched.clear()
    _call_all(reversed(_marks(buckets)))
    scheduler.wait_pending_comm_ops()
    assert launched == ["0", "1", "2"]
    scheduler.close()


def test_what_a_step_lacks_is_of_the_launch_set() -> None:
    buckets, launched = _recording([2, 1, 1])
    scheduler = CommScheduler(buckets, _alone())
    scheduler.choose_buckets(buckets[:2])
    _call_all((_marks(buckets)[0], _marks(buckets)[3]))
    scheduler.wait_pending_comm_ops()
    assert launched == []
    assert scheduler.end_step() == ["0.1", "1.0"]
    scheduler.reset()
    scheduler.choose_buckets([])
    _call_all(_marks(buckets))
    scheduler.wait_pending_comm_ops()
    assert launched == []
    assert scheduler.end_step() == []
    scheduler.close()


def test_gradients_outside_of_the_launch_set_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bagua.engine.bucket_memory._LARGE_GRADIENT", 1)
    bucket = _gradients(4.0, 12.0, scale=0.25)
    scheduler = CommScheduler([bucket], _alone())
    scheduler.choose_buckets([])
    for parameter in bucket.tensors:
        parameter.bagua_mark_communication_ready()
    scheduler.wait_pending_comm_ops()
    assert [parameter.grad.tolist() for parameter in bucket.tensors] == [[4.0, 4.0], [12.0, 12.0]]
    scheduler.close()


def test_a_launch_set_is_chosen_at_the_beginning_of_a_step() -> None:
    buckets, _ = _recording([2, 1])
    scheduler = CommScheduler(buckets, _alone())
    _marks(buckets)[0]()
    with pytest.raises(RuntimeError, match="this step has begun to communicate"):
        scheduler.choose_buckets(buckets[:1])
    scheduler.close()


def test_buckets_are_launched_as_they_are_without_ready_flags() -> None:
    buckets, launched = _recording([2, 1, 2])
    scheduler = CommScheduler(buckets, _alone())
    scheduler.launch_buckets(buckets)
    scheduler.wait_pending_comm_ops()
    assert scheduler.end_step() == []
    for number in (2, 0, 1):
        scheduler.launch_buckets([buckets[number]])
        scheduler.wait_pending_comm_ops()
        assert scheduler.end_step() == []
    assert launched == ["0", "1", "2", "2", "0", "1"]
    scheduler.close()


# --- operations ------------------------------------------------------------------------------------------------------


def test_operations_run_in_their_order_and_see_the_results_of_those_before() -> None:
    seen: list[float] = []
    bucket = _bucket("b", 2)

    def double(_: str) -> None:
        bucket.flattened_tensor().mul_(2)

    bucket.append_python_op(double).append_python_op(lambda _: seen.append(float(bucket.flattened_tensor().sum())))
    bucket.append_python_op(double)
    scheduler = CommScheduler([bucket], _alone())
    _call_all(_marks([bucket]))
    scheduler.wait_pending_comm_ops()
    assert seen == [4.0]
    assert bucket.flattened_tensor().tolist() == [0, 0, 4, 4]
    scheduler.close()


def test_operations_that_block_run_on_one_thread_of_their_own() -> None:
    threads: list[threading.Thread] = []
    release = threading.Event()

    def block(_: str) -> None:
        threads.append(threading.current_thread())
        assert release.wait(30)

    buckets = [_bucket(str(number), 1, FunctionOp(block)) for number in range(3)]
    scheduler = CommScheduler(buckets, _alone())
    for mark in _marks(buckets):
        mark()  # returns while the operations wait
    release.set()
    scheduler.wait_pending_comm_ops()
    assert len(threads) == 3
    assert len(set(threads)) == 1
    assert threads[0] is not threading.current_thread()
    scheduler.close()
    assert not threads[0].is_alive()


def test_an_operation_that_could_start_at_once_does_not_overtake_one_that_blocks() -> None:
    ran: list[str] = []
    release = threading.Event()

    def block(name: str) -> None:
        assert release.wait(30)
        ran.append(name)

    buckets = [
        _bucket("0", 1, FunctionOp(ran.append, inline=True)),
        _bucket("1", 1, FunctionOp(block)),
        _bucket("2", 1, FunctionOp(ran.append, inline=True)),
    ]
    scheduler = CommScheduler(buckets, _alone())
    for runs_at_once in (True, False):  # from the second pass on, all goes through the thread
        _call_all(_marks(buckets))
        assert ran == ["0"] or (not runs_at_once and not ran)
        release.set()
        scheduler.wait_pending_comm_ops()
        assert ran == ["0", "1", "2"]
        ran.clear()
        release.clear()
    scheduler.close()


def test_without_its_scheduler_the_thread_ends() -> None:
    threads: list[threading.Thread] = []
    bucket = _bucket("b", 1, FunctionOp(lambda _: threads.append(threading.current_thread())))
    scheduler = CommScheduler([bucket], _alone())
    _marks([bucket])[0]()
    scheduler.wait_pending_comm_ops()
    del scheduler, bucket
    gc.collect()  # tensors and scheduler refer to each other
    threads[0].join(30)
    assert not threads[0].is_alive()


def _fail(name: str) -> None:
    raise KeyError(f"of bucket {name}")


def test_an_error_of_an_operation_surfaces_where_it_is_waited_for_and_stays() -> None:
    launched: list[str] = []
    buckets = [_bucket("0", 1, FunctionOp(_fail)), _bucket("1", 1, FunctionOp(launched.append))]
    scheduler = CommScheduler(buckets, _alone())
    _call_all(_marks(buckets))
    with pytest.raises(KeyError, match="of bucket 0"):
        scheduler.wait_pending_comm_ops()
    # The peers would not understand what came after it.
    _call_all(_marks(buckets))
    with pytest.raises(EarlierFailureError, match="of bucket 0"):
        scheduler.wait_pending_comm_ops()
    assert launched == []
    scheduler.close()


# --- registration ----------------------------------------------------------------------------------------------------


def test_tensors_are_in_one_bucket_until_it_is_closed() -> None:
    bucket, other = _bucket("b", 1), _bucket("b", 1)
    with pytest.raises(ValueError, match=r"'b\.0' of bucket 'b' is already in bucket 'b'"):
        CommScheduler([bucket, other], _alone())
    with pytest.raises(ValueError, match="already in bucket"):
        CommScheduler([bucket, Bucket(bucket.tensors, "again")], _alone())
    tensor: Any = bucket.tensors[0]
    CommScheduler([bucket], _alone()).close()
    with pytest.raises(RuntimeError, match=r"'b\.0' belongs to no bucket"):
        tensor.bagua_mark_communication_ready()
