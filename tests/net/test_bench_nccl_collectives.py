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


def sent(salt: int = 1) -> Any:
    """By rank 1."""
    return gpu_collectives.pattern(1, 0, ELEMENTS, salt, MODULUS, CPU)


def swapped(distance: int) -> Callable[[Any], None]:
    """Two chunks are in each other's place."""

    def swap(tensor: Any) -> None:
        count = min(distance, ELEMENTS - distance)
        first = tensor[:count].clone()
        tensor[:count] = tensor[distance : distance + count]
        tensor[distance : distance + count] = first

    return swap


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_what_a_network_does_to_data_is_found(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = gpu_collectives.CollectiveRunner(0, 2, CPU, getattr(torch, dtype))
    size = ELEMENTS * runner._element_bytes

    def found(damage: Callable[[Any], object], salt: int = 1) -> Any:
        def all_reduce(tensor: Any) -> None:
            tensor += sent(salt).to(tensor.dtype)
            damage(tensor)

        monkeypatch.setattr(gpu_collectives.dist, "all_reduce", all_reduce)
        with runner.holding("all_reduce", size):
            return runner.verify("all_reduce", size, salt=1)

    assert found(lambda _: None) == gpu_collectives.Verification(0, None)
    assert found(lambda tensor: tensor[4321:4322].add_(1)) == gpu_collectives.Verification(1, 4321)
    for distance in (1, 64, 1024, 4096):
        assert found(swapped(distance)).wrong_elements > 0
    assert found(lambda _: None, salt=2).wrong_elements > ELEMENTS // 2, "the data of an earlier verification"
    assert found(lambda tensor: tensor.add_(sent().to(tensor.dtype))).wrong_elements > ELEMENTS // 2, "added twice"


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
