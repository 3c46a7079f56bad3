"""A mixture of experts in one process that has all of them, token by token, from the formulas of GShard and Switch."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn


def mixture(
    tokens: Tensor, gate: Tensor, experts: Sequence[nn.Module], k: int, factor: float, min_capacity: int
) -> tuple[Tensor, Tensor, list[int], int]:
    """
    What one rank computes in evaluation.

    Args:
        tokens: [S, M].
        gate: [E, M].

    Returns:
        output, auxiliary loss, tokens by preferred expert, and how many assignments did not fit.
    """
    probabilities = torch.softmax(tokens @ gate.t(), dim=1)
    count = len(experts)
    capacity = math.ceil(len(tokens) / count * factor) if k == 1 else math.ceil(2 * len(tokens) / count * factor)
    if k == 1:
        capacity = max(capacity, min_capacity)
    ranking = probabilities.argsort(dim=1, descending=True)
    load = [0] * count
    fits: dict[tuple[int, int], bool] = {}
    for choice in range(k):
        for token in range(len(tokens)):
            expert = int(ranking[token, choice])
            fits[token, choice] = load[expert] < capacity
            load[expert] += 1
    rows = []
    for token in range(len(tokens)):
        chosen = [int(ranking[token, choice]) for choice in range(k) if fits[token, choice]]
        total = sum(probabilities[token, expert] for expert in chosen) if k == 2 else 1
        row = torch.zeros_like(tokens[token])
        for expert in chosen:
            row = row + probabilities[token, expert] / total * experts[expert](tokens[token][None])[0]
        rows.append(row)
    preferred = [int((ranking[:, 0] == expert).sum()) for expert in range(count)]
    auxiliary = torch.zeros((), device=tokens.device)
    for expert in range(count):
        auxiliary = auxiliary + probabilities[:, expert].mean() * preferred[expert] / len(tokens)
    return torch.stack(rows), count * auxiliary, preferred, sum(not one for one in fits.values())
