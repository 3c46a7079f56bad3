"""The weights that all ranks of a module have, where only differences to them are sent.

A difference between two steps is much smaller than the weights, and so is its rounding error (SDP4Bit: Jia et al.,
arXiv:2410.15526). Every rank keeps all the module's weights as the last pass computed with them, and the owner of a
shard sends its difference to *those*, so that errors do not add up. What is not finite, after a step that diverged,
counts as 0: when the weights are restored, all of them are sent, and a few passes later they are as near as before.

Used by the thread and on the stream that gather weights.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from bagua.codecs import Codec
from bagua.codecs.fused import add_differences
from bagua.job.torch_internals import all_gather_flat


class WeightReference:
    """Of one module. It takes as much memory on each rank as all the module's weights in the dtype of the gather."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._full: Tensor | None = None
        self._own: Tensor | None = None  # from a saved state, until the others have theirs

    @property
    def is_known(self) -> bool:
        return self._full is not None or self._own is not None

    def follow(self, weights: Tensor) -> None:
        """The ranks now have `weights`, [ranks * elements]."""
        with torch.inference_mode(False):  # later passes change it in place
            self._full, self._own = weights.clone(), None

    def gather_difference(self, output: Tensor, weights: Tensor, codec: Codec) -> int:
        """Writes the reference, moved by the differences of all ranks, into `output`, [ranks * elements].

        Args:
            weights: [elements], this rank's shard; it may be a part of `output`.

        Returns:
            the bytes that this rank has sent to each other rank.
        """
        if self._own is not None:
            with torch.inference_mode(False):
                self._full = torch.empty_like(output)
            all_gather_flat(self._full, self._own.to(output.device), group=self._group)
            self._own = None
        full = self._full
        assert full is not None, "is_known"
        known = full.view(self._group.size(), -1)[self._group.rank()].nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
        own = codec.compress(weights.float() - known)
        gathered = own.new_empty((self._group.size(), own.shape[1]))
        all_gather_flat(gathered, own, group=self._group)
        add_differences(codec, gathered, full, output)
        return own.nbytes

    def own_part(self) -> Tensor | None:
        """This rank's part, to be saved: [elements]; None where nothing is known."""
        if self._full is None:
            return self._own
        return self._full.view(self._group.size(), -1)[self._group.rank()]

    def load_own_part(self, part: Tensor | None) -> None:
        self._full, self._own = None, part
