"""The blocks of the transformers that tools train."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional


class Block(nn.Module):
    """Causal attention, then two linear layers; each after a LayerNorm, and added to its input.

    Args:
        approximate: Of GELU.
    """

    def __init__(self, width: int, heads: int, approximate: str = "none") -> None:
        super().__init__()
        self._heads = heads
        self.norm_attention, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.attended = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate), nn.Linear(4 * width, width))

    def forward(self, values: Tensor) -> Tensor:
        heads = self.queries_keys_values(self.norm_attention(values)).unflatten(2, (3, self._heads, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        values = values + self.attended(attended.transpose(1, 2).flatten(2))
        found: Tensor = values + self.mlp(self.norm_mlp(values))
        return found
