"""What compression has taken from a rank's gradients, to be added to the next ones (error feedback).

Stored as int8, as LoCo does (Xie et al., arXiv:2407.04480): a byte per element, and what this second rounding takes is
a 255th of the first. Rounding happens where a gradient is sent, so that a rank owes something to every shard: the
residual has the size of the gradients that the rank sends, not of its shard. Source of error feedback: Seide et al.,
"1-bit stochastic gradient descent" (Interspeech 2014).

Used by the thread and on the stream that reduce gradients.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from bagua.codecs import Codec, get_codec
from bagua.codecs.fused import REST_CODEC, compress_rest
from bagua.codecs.owed_scale import OwedScale


class Residual:
    """Of the gradients that one module's ranks reduce together.

    Args:
        trained: says which of its parameters are trained now; None: always the same ones.
        scaler: the GradScaler that scales the loss, or None.

    Attributes:
        scale: of the loss, that the residual is in.
    """

    def __init__(self, name: str, trained: Callable[[], Hashable] | None = None, scaler: Any = None) -> None:
        self.scale = OwedScale(scaler)
        self._name = name
        self._trained = trained
        self._codec = get_codec(REST_CODEC)
        self._stored: Tensor | None = None
        self._owner: Hashable = None  # of what is owed: the parameters that were trained; None: unknown

    def add_to(self, gradients: Tensor, chunks: int) -> None:
        """Adds what is owed to `gradients`, 1-D, in its dtype."""
        stored = self._stored
        former, self._owner = self._owner, None if self._trained is None else self._trained()
        change = self.scale.update(gradients.device)
        if stored is None:
            return
        shape = (chunks, self._codec.compressed_bytes(gradients.numel() // chunks))
        # Layers of one size, frozen in turn, have gradients of one size.
        if tuple(stored.shape) != shape or former not in (None, self._owner):
            warnings.warn(
                f"The gradients of {self._name!r} are of other parameters than in the last step, and what compression "
                "had taken from them is lost.\n"
                "This happens where parameters are frozen, unfrozen or unused in some steps.",
                RuntimeWarning,
                stacklevel=2,
            )
            self._stored = None
            return
        self._stored = stored.to(gradients.device)  # one that was loaded lies where it was saved
        if change is None:
            self._codec.decompress(self._stored, gradients, accumulate=True)
        else:
            owed = torch.empty_like(gradients, dtype=torch.float32)
            gradients.add_(self._codec.decompress(self._stored, owed).mul_(change))

    def keep(self, gradients: Tensor, sent: Tensor, codec: Codec, own: int) -> None:
        """Stores `gradients` minus `sent` decompressed.

        What is not finite is forgotten: it was sent as NaN, and the step is lost anyway.

        Args:
            gradients: 1-D, with what was owed.
            sent: uint8 [chunks, bytes], what `codec` made of it.
            own: the chunk that this rank keeps for itself, unrounded.
        """
        self._stored = compress_rest(codec, gradients, sent, own, out=self._stored)

    @property
    def stored(self) -> Tensor | None:
        """uint8 [ranks, bytes], or None while nothing is owed."""
        return self._stored

    def load(self, stored: Tensor | None, scale: Tensor | None) -> None:
        """Owe what a saved state says; None: nothing, or in an unknown scale."""
        self._stored, self._owner = None if stored is None else stored.clone(), None
        self.scale.value = scale
