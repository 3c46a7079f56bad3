"""An all-gather of compressed weights: torch's interface AllGather, for one FSDP module.

Every rank compresses its shard; all ranks, its owner included, compute with the decompressed weights, so that they
compute with the same. The shards themselves, which the optimizer updates and checkpoints save, stay exact.

Weights are exact in evaluation mode, in every forward pass that `exact_weights_every` chooses, where torch gathers
bytes of several dtypes, and where a backward pass gathers from fewer ranks (`reshard_after_forward` is a number). Where
FSDP has kept rounded weights and a pass needs exact ones, they are freed and gathered anew. A backward pass computes
with weights as its forward pass had them.

Runs in the threads of forward and of autograd. On CUDA all of it is put on the current stream, FSDP's all-gather
stream.
"""

from __future__ import annotations

import contextlib
import datetime
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bagua.codecs import Codec
from bagua.codecs.fused import add_differences
from bagua.fsdp.collective_errors import named_errors
from bagua.fsdp.model import ShardedModel
from bagua.fsdp.nodes import Nodes, Traffic
from bagua.fsdp.torch_internals import ShardedModule
from bagua.job.torch_internals import all_gather_flat, is_in_backward


class WeightReference:
    """The weights that all ranks of a module have, where only differences to them are sent.

    A difference between two steps is much smaller than the weights, and so is its rounding error (SDP4Bit: Jia et al.,
    arXiv:2410.15526). Every rank keeps all the module's weights as the last pass computed with them, and the owner of
    a shard sends its difference to *those*, so that errors do not add up. What is not finite, after a step that
    diverged, counts as 0: when the weights are restored, all of them are sent, and a few passes later they are as near
    as before.

    Of one module. It takes as much memory on each rank as all the module's weights in the dtype of the gather. Used by
    the thread and on the stream that gather weights.
    """

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


class CompressedAllGather:
    """
    Args:
        sharded: whose weights; its mode decides whether they are compressed.
        plain: torch's all-gather that stood here before, for exact weights.
        model: the module's; it counts the passes.
        exact_every: every so many passes have exact weights; None: none in training.
        nodes: of the group over which they are sharded.
        reference: the weights that all ranks have, where differences are sent; None: weights are sent.
        told: dtypes that a warning has named, of all modules of the model.
    """

    def __init__(
        self,
        sharded: ShardedModule,
        codec: Codec,
        plain: Any,
        model: ShardedModel,
        exact_every: int | None,
        nodes: Nodes,
        traffic: Traffic,
        reference: WeightReference | None,
        told: set[torch.dtype],
    ) -> None:
        self._sharded = sharded
        self._codec = codec
        self._plain = plain
        self._model = model
        self._exact_every = exact_every
        self._has_rounded = False  # in the last gather over all ranks
        self._was_exact = True  # in the last forward pass that a backward pass may follow
        self._nodes = nodes
        self._traffic = traffic
        self.reference = reference
        self._told = told

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        memory: Tensor = self._plain.allocate(size, dtype=dtype, device=device)
        return memory

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """
        Args:
            output_tensor: [ranks * elements].
            input_tensor: [elements], this rank's part of `output_tensor`.
            async_op: return at once; the result waits for the gathered bytes and decompresses them.

        Raises:
            CollectiveError: a rank or the network failed; the result's `wait` raises it, too.
        """
        plain = self._leaving(input_tensor.nbytes, group)
        if not self._is_compressed(input_tensor, group):
            self._traffic.count(plain, plain)
            self._has_rounded &= group is not self._sharded.shard_group
            return self._gather_exactly(output_tensor, input_tensor, group, async_op)
        self._has_rounded = True
        if self.reference is not None:
            with self._named(group):
                sent = self.reference.gather_difference(output_tensor, input_tensor, self._codec)
            self._traffic.count(self._leaving(sent, group), plain)
            return None
        own = self._codec.compress(input_tensor)
        gathered = own.new_empty((group.size(), own.shape[1]))
        with self._named(group):
            work = all_gather_flat(gathered, own, group=group, async_op=async_op)
        self._traffic.count(self._leaving(own.nbytes, group), plain)
        if work is not None:
            return _Decompression(
                work, partial(self._named, group), partial(self._codec.decompress, gathered, output_tensor)
            )
        self._codec.decompress(gathered, output_tensor)
        return None

    def _leaving(self, each: int, group: dist.ProcessGroup) -> int:
        """The bytes that leave this rank's node, its part of them, if all ranks gather `each`."""
        if group is not self._sharded.shard_group:  # reshard_after_forward is a number
            return (group.size() - 1) * each
        return self._nodes.leaving_ring(group.size() * each)

    def renew(self, run: Callable[[], Any], _: Any) -> Any:
        """Around the step that gathers weights where there are none. A forward pass in training may as well use exact
        ones that are there."""
        is_backward, needs_exact = is_in_backward(), self._needs_exact
        if needs_exact == self._has_rounded and (needs_exact or is_backward):
            self._free()
        result = run()
        if not is_backward and (self._sharded.module.training or torch.is_grad_enabled()):
            self._was_exact = not self._has_rounded
        return result

    def end(self) -> None:
        """The module holds no rounded weights any more."""
        if self._has_rounded:
            self._free()

    def _free(self) -> None:
        if self._sharded.holds_weights:
            self._sharded.free_weights()

    @property
    def _needs_exact(self) -> bool:
        if is_in_backward():
            return self._was_exact
        is_due = self._exact_every is not None and self._model.passes % self._exact_every == 0
        return is_due or not self._sharded.module.training

    def _is_compressed(self, weights: Tensor, group: dist.ProcessGroup) -> bool:
        if self._needs_exact or group is not self._sharded.shard_group or not weights.numel():
            return False
        if weights.dtype not in self._codec.dtypes:
            self._say_once(weights.dtype)
            return False
        return self.reference is None or self.reference.is_known

    def _gather_exactly(
        self, output: Tensor, weights: Tensor, group: dist.ProcessGroup, async_op: bool
    ) -> dist.Work | None:
        is_of_all = group is self._sharded.shard_group
        reference = self.reference if is_of_all and self._sharded.module.training else None
        with self._named(group, "exact"):
            work: dist.Work | None = self._plain(output, weights, group, async_op and reference is None)
        if reference is not None:
            reference.follow(output)
        return work

    def _named(self, group: dist.ProcessGroup, kind: str = "") -> contextlib.AbstractContextManager[None]:
        what = f"The all-gather of {kind or self._codec.name} weights of {self._sharded.title}"
        return named_errors(what, group)

    def _say_once(self, dtype: torch.dtype) -> None:
        if dtype in self._told:
            return
        self._told.add(dtype)
        gathered = "bytes of several dtypes" if dtype == torch.uint8 else str(dtype)
        warnings.warn(
            f"The weights of {self._sharded.name!r} are gathered as {gathered}, which {self._codec.name} cannot "
            "compress. They are sent uncompressed, and so are those of other modules that are gathered so.\nGive the "
            "module's parameters one dtype, or set param_dtype in its MixedPrecisionPolicy.",
            RuntimeWarning,
            stacklevel=4,
        )


class _Decompression(dist.Work):
    """A gather of bytes that is under way, and what is done with them: on the stream that waits."""

    def __init__(
        self,
        gather: dist.Work,
        named: Callable[[], contextlib.AbstractContextManager[None]],
        decompress: Callable[[], object],
    ) -> None:
        super().__init__()
        self._gather = gather
        self._named = named
        self._decompress: Callable[[], object] | None = decompress

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        with self._named():
            done = self._gather.wait() if timeout is None else self._gather.wait(timeout)
        decompress, self._decompress = self._decompress, None
        if decompress is not None:
            decompress()
        return done
