"""The verification finds what a broken network would do. The collective itself is played; real ones run in
test_bench_nccl_processes.py (gloo) and tests/gpu (NCCL)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch, whose collectives are verified")

# After the check: it imports torch. A plain import, so that a broken module of ours fails and is not skipped.
from bagua.net.bench.nccl_ab import gpu_collectives  # noqa: E402

CPU = torch.device("cpu")
ELEMENTS = 5000
MODULUS = gpu_collectives.pattern_modulus(2)


@pytest.fixture(params=["bfloat16", "float32"])
def runner(request: pytest.FixtureRequest) -> Any:
    return gpu_collectives.CollectiveRunner(0, 2, CPU, getattr(torch, request.param))


def play(monkeypatch: pytest.MonkeyPatch, damage: Callable[[Any], None], salt: int = 1) -> None:
    """all_reduce that adds what rank 1 would send under `salt`, and then damages the sum."""

    def all_reduce(tensor: Any) -> None:
        tensor += gpu_collectives.pattern(1, 0, tensor.numel(), salt, MODULUS, CPU).to(tensor.dtype)
        damage(tensor)

    monkeypatch.setattr(gpu_collectives.dist, "all_reduce", all_reduce)


def verify(runner: Any) -> Any:
    size = ELEMENTS * runner._element_bytes
    with runner.holding("all_reduce", size):
        return runner.verify("all_reduce", size, salt=1)


def test_a_right_sum_is_right(runner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    play(monkeypatch, lambda _: None)
    assert verify(runner) == gpu_collectives.Verification(0, None)


def test_one_wrong_element_is_found_and_located(runner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    play(monkeypatch, lambda tensor: tensor[4321:4322].add_(1))
    assert verify(runner) == gpu_collectives.Verification(1, 4321)


@pytest.mark.parametrize("distance", [1, 64, 1024, 4096])
def test_chunks_in_each_others_place_are_found(runner: Any, monkeypatch: pytest.MonkeyPatch, distance: int) -> None:
    def swap(tensor: Any) -> None:
        count = min(distance, ELEMENTS - distance)
        first = tensor[:count].clone()
        tensor[:count] = tensor[distance : distance + count]
        tensor[distance : distance + count] = first

    play(monkeypatch, swap)
    assert verify(runner).wrong_elements > 0


def test_the_data_of_an_earlier_verification_is_found(runner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    play(monkeypatch, lambda _: None, salt=2)
    assert verify(runner).wrong_elements > ELEMENTS // 2


def test_data_that_was_added_twice_is_found(runner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    again = gpu_collectives.pattern(1, 0, ELEMENTS, 1, MODULUS, CPU)
    play(monkeypatch, lambda tensor: tensor.add_(again.to(tensor.dtype)))
    assert verify(runner).wrong_elements > ELEMENTS // 2


@pytest.mark.parametrize("ranks", [2, 3, 8, 64, 128])
def test_sums_over_all_ranks_are_exact_in_bfloat16(ranks: int) -> None:
    modulus = gpu_collectives.pattern_modulus(ranks)
    patterns = [gpu_collectives.pattern(rank, 0, 4096, 3, modulus, CPU) for rank in range(ranks)]
    exact = torch.stack(patterns).sum(0)
    for order in (patterns, patterns[::-1]):
        total = torch.zeros(4096, dtype=torch.bfloat16)
        for values in order:
            total += values.to(torch.bfloat16)
        assert torch.equal(total.to(torch.int64), exact)
