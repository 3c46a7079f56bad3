"""MoE: a layer of experts that are spread over the ranks, with the interface of Bagua 0.9."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from bagua.contrib.moe import gating
from bagua.contrib.moe.exchange import Exchange, ScaledGradient, put, take
from bagua.contrib.moe.experts import Experts
from bagua.contrib.moe.gating import Routing

NOISE = (None, "Jitter", "RSample")


class MoE(nn.Module):
    """
    A mixture of experts: every token goes to `k` of the experts of all ranks. Make it after `init_process_group`; the
    ranks of the default group share the experts, expert i of rank r being number r * num_local_experts + i. All ranks
    call it equally often, with any number of tokens each.

    Parameters of experts have the attribute `expert`, and are not synchronized. Their gradients are those of the mean
    of the ranks' losses, as gradients averaged by the algorithm are. The gate is synchronized as other parameters are,
    and computed in float32.

    Sources: GShard (Lepikhin et al., 2020), Switch Transformers (Fedus et al., 2021).

    Args:
        hidden_size: of a token.
        expert: copied for each expert; [tokens, hidden_size] -> the same shape.
        num_local_experts: of each rank.
        k: 1 or 2, experts per token.
        output_dropout_prob: of the output.
        capacity_factor: in training; an expert takes as many tokens of each rank as a uniform distribution would give
            it, times this. Other tokens get zeros from it.
        eval_capacity_factor: likewise in evaluation.
        min_capacity: lower limit of that number, for k = 1.
        noisy_gate_policy: for k = 1 and in training: "Jitter" multiplies the gate's input by random numbers near 1,
            "RSample" draws the expert by its probability; None: neither.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(
        self,
        hidden_size: int,
        expert: nn.Module,
        num_local_experts: int = 1,
        k: int = 1,
        output_dropout_prob: float = 0.0,
        capacity_factor: float = 1.0,
        eval_capacity_factor: float = 1.0,
        min_capacity: int = 4,
        noisy_gate_policy: str | None = None,
    ) -> None:
        super().__init__()
        if k not in (1, 2):
            raise ValueError(f"k={k}: a token goes to 1 or 2 experts")
        if noisy_gate_policy not in NOISE:
            raise ValueError(f"noisy_gate_policy={noisy_gate_policy!r}: must be None, 'Jitter' or 'RSample'")
        if num_local_experts < 1:
            raise ValueError(f"num_local_experts={num_local_experts}: must be at least 1")
        if min_capacity < 0:
            raise ValueError(f"min_capacity={min_capacity}: must be at least 0")
        for name, factor in (("capacity_factor", capacity_factor), ("eval_capacity_factor", eval_capacity_factor)):
            if not factor > 0:
                raise ValueError(f"{name}={factor}: must be more than 0")
        self.num_experts = num_local_experts * Exchange().size
        if self.num_experts < k:
            raise ValueError(
                f"k={k}, but there is {self.num_experts} expert.\n"
                "Ranks count after init_process_group().\n"
                "Pass a larger num_local_experts, or run more ranks."
            )
        gate = _Gate(hidden_size, self.num_experts, k, capacity_factor, eval_capacity_factor, min_capacity)
        gate.noise = noisy_gate_policy
        self.bagua_moe = _ExpertParallel(gate, Experts(expert, num_local_experts))
        self.dropout = nn.Dropout(output_dropout_prob)

    def forward(self, hidden_states: Tensor, used_token: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """
        Args:
            hidden_states: [..., hidden_size], any floating-point dtype.
            used_token: [...], 0 or False for tokens that no expert is to see, such as padding; None: all are used.

        Returns:
            the output, in the shape and dtype of the input; l_aux, float32, to be added to the loss with a small
            factor: it is 1 where all experts have as many tokens, and larger otherwise; exp_counts, int64 on the CPU,
            how many of this rank's tokens prefer each expert.

        Raises:
            CollectiveError: a rank is gone; names it.
            RuntimeError: the process group has changed since the layer was made, or another rank has raised.
            ValueError: fewer tokens than `min_capacity` (k = 1), or another shape.
        """
        output, l_aux, exp_counts = self.bagua_moe(hidden_states, used_token)
        return self.dropout(output), l_aux, exp_counts


class _Gate(nn.Module):
    """Chooses experts for tokens."""

    def __init__(
        self, hidden_size: int, experts: int, k: int, factor: float, eval_factor: float, min_capacity: int
    ) -> None:
        super().__init__()
        self.wg = nn.Linear(hidden_size, experts, bias=False, dtype=torch.float32)
        self.k, self.factor, self.eval_factor, self.min_capacity = k, factor, eval_factor, min_capacity
        self.noise: str | None = None

    def capacity_of(self, tokens: int) -> int:
        factor = self.factor if self.training else self.eval_factor
        return gating.capacity_of(tokens, self.wg.out_features, self.k, factor, self.min_capacity)

    def forward(self, tokens: Tensor, capacity: int, used: Tensor | None) -> Routing:
        with torch.autocast(tokens.device.type, enabled=False):
            values = tokens.float()
            noise = self.noise if self.training else None
            if noise == "Jitter" and self.k == 1:
                values = gating.jittered(values)
            logits = nn.functional.linear(values, self.wg.weight.float())
            if self.k == 1:
                return gating.top_1(logits, capacity, used, noise == "RSample", is_random=self.training)
            return gating.top_2(logits, capacity, used, is_random=self.training)


class _ExpertParallel(nn.Module):
    """Sends tokens to experts and back."""

    def __init__(self, gate: _Gate, experts: Experts) -> None:
        super().__init__()
        self.gate = gate
        self.experts = experts

    def forward(self, hidden_states: Tensor, used_token: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        exchange = Exchange()
        try:
            self._check(exchange, hidden_states, used_token)
            tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
            capacity = self.gate.capacity_of(tokens.shape[0])
        except Exception:
            exchange.largest(None)
            raise
        # Room for as many tokens of each rank as the rank with the most needs.
        room = exchange.largest(capacity)
        used = None if used_token is None else used_token.reshape(-1) != 0
        routing: Routing = self.gate(tokens, capacity, used)
        exp_counts, wait = _copied_to_host(routing.exp_counts)

        size, local, hidden_size = exchange.size, len(self.experts.bagua_experts), tokens.shape[1]
        count = size * local * room
        placed = torch.where(routing.weight > 0, routing.expert * room + routing.position, count).flatten()
        rows = tokens if self.gate.k == 1 else tokens.repeat(self.gate.k, 1)
        sent = put(rows, placed, count).view(size, local, room, hidden_size)
        computed = self._compute(exchange.all_to_all(sent), size)
        returned = exchange.all_to_all(computed).reshape(count, hidden_size)
        taken = take(returned, placed).view(self.gate.k, tokens.shape[0], hidden_size)
        weighted = taken * routing.weight[..., None].to(taken.dtype)
        output = weighted.sum(dim=0).view(hidden_states.shape).to(hidden_states.dtype)
        wait()
        return output, routing.l_aux, exp_counts

    def _compute(self, arrived: Tensor, size: int) -> Tensor:
        """[ranks, experts, room, hidden] -> the same shape. The gradients of parameters are sums over the ranks'
        tokens, and are divided by the number of ranks; those of tokens remain."""
        by_expert = arrived.transpose(0, 1).flatten(1, 2)
        if size > 1:
            by_expert = _scaled(by_expert, size)
        result: Tensor = self.experts(by_expert)
        if size > 1:
            result = _scaled(result, 1 / size)
        return result.unflatten(1, (size, arrived.shape[2])).transpose(0, 1)  # type: ignore[no-any-return, no-untyped-call]

    def _check(self, exchange: Exchange, hidden_states: Tensor, used_token: Tensor | None) -> None:
        hidden_size = self.gate.wg.in_features
        if hidden_states.shape[-1:] != (hidden_size,):
            raise ValueError(f"the input has the shape {tuple(hidden_states.shape)}, must end in {hidden_size}")
        if used_token is not None and used_token.shape != hidden_states.shape[:-1]:
            raise ValueError(
                f"used_token has the shape {tuple(used_token.shape)}, must be {tuple(hidden_states.shape[:-1])}: one "
                "value for each token"
            )
        total = len(self.experts.bagua_experts) * exchange.size
        if total != self.gate.wg.out_features:
            raise RuntimeError(
                f"MoE was made for {self.gate.wg.out_features} experts, and the ranks have {total}.\n"
                "The process group has another size than when the layer was made.\n"
                "Call init_process_group() before you make the model."
            )


def _copied_to_host(counts: Tensor) -> tuple[Tensor, Callable[[], object]]:
    """The copy, and what waits for it: at the end of the layer, when the GPU has experts to compute while the host
    launches what comes next."""
    copy = counts.to("cpu", non_blocking=True)
    if counts.device.type != "cuda":
        return copy, _nothing
    return copy, torch.cuda.current_stream(counts.device).record_event().synchronize


def _nothing() -> None:
    return None


def _scaled(values: Tensor, factor: float) -> Tensor:
    result: Any = ScaledGradient.apply(values, factor)  # type: ignore[no-untyped-call]
    scaled: Tensor = result
    return scaled
