"""A communication hook of torch's DDP that compresses, and remembers what rounding took away, to send it later.

For each bucket, with C the compression, D its inverse, e_i what rank i owes and d_r what chunk r's owner owes:

    p_i   = g_i + e_i              c_i = C(p_i)        e_i := p_i - D(c_i)
    s_r   = d_r + 1/n * sum over ranks i of D(c_i[r])      (no 1/n: the sum)
    y_r   = C(s_r)                 d_r := s_r - D(y_r)
    g[r]  = D(y_r)                 on every rank the same bits

So over the steps the results add up to what the gradients add up to, but for one step's rounding. Keeping only e_i
would not do: what one rank sends late is divided by n, and the second rounding would lose it again.

Sources: error feedback in Seide et al., "1-bit stochastic gradient descent and its application to data-parallel
distributed training of speech DNNs" (Interspeech 2014); why it converges: Karimireddy et al., "Error feedback fixes
SignSGD and other gradient compression schemes" (ICML 2019, arXiv:1901.09847); on both sides: Tang et al.,
"DoubleSqueeze" (ICML 2019, arXiv:1905.05957); with 4 bits: Xie et al., "LoCo" (arXiv:2407.04480).

Called by autograd's thread; e and d are touched in the background only (bagua.comm_hooks.background).
"""

# No `from __future__ import annotations`: DDP compares the hook's annotations with classes, not with their names.

import warnings
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket

from bagua.codecs import Codec
from bagua.codecs.owed_scale import OwedScale
from bagua.collectives.process_group import BaguaProcessGroup, to_bagua_process_group
from bagua.comm_hooks.byte_hooks import ByteGradState, reduce_flat
from bagua.comm_ops.chunk_exchange import ChunkExchange
from bagua.comm_ops.compressed import DEFAULT_CODEC, CompressedAllReduce
from bagua.kernels.scratch_memory import scratch, scratch_like
from bagua.replicas.saved_rank import check_rank

# After so many backward passes DDP has its final buckets: it may make new ones after the first.
_PASSES_TO_SETTLE = 2


class ErrorFeedbackAllReduce(CompressedAllReduce):
    """The lines at the head of this file, for one bucket. With `hierarchical`, g_i are sums of nodes, and e and d are
    the leaders'.

    Attributes:
        residual: e, float32, of the bucket's length; None before the first call, and where a leader has it.
        chunk_residual: d, float32, of a chunk's length; likewise.
        scale: of the loss, that both are in.
    """

    rounds_alike = False

    def __init__(
        self, group: BaguaProcessGroup, average: bool, hierarchical: bool, codec: Codec, scaler: Any = None
    ) -> None:
        super().__init__(group, average, hierarchical, codec=codec)
        self.scale = OwedScale(scaler)
        self.residual: torch.Tensor | None = None
        self.chunk_residual: torch.Tensor | None = None

    @property
    def own_chunk(self) -> int:
        """That d is of."""
        return self._peers.rank()

    def _exchange(self, flat: torch.Tensor) -> None:
        if self.residual is None or self.chunk_residual is None:
            self.residual = torch.zeros_like(flat, dtype=torch.float32)
            self.chunk_residual = self.residual.new_zeros(flat.numel() // self.chunks)
        owed, total, codec = self.residual, self.chunk_residual, self.codec
        if (change := self.scale.update(flat.device)) is not None:
            owed.mul_(change)
            total.mul_(change)
        owed.add_(flat)
        size = codec.compressed_bytes(flat.numel() // self.chunks)
        outgoing = codec.compress(owed, self.chunks, scratch((self.chunks, size), torch.uint8, flat.device))
        # The gradients are in `owed` now, and the result is not here yet: their memory is free for what was sent.
        sent = flat if flat.dtype == torch.float32 else scratch_like(owed)
        _keep_rest(owed, codec.decompress(outgoing, sent))
        if self._average:
            total.mul_(self.chunks)
        exchange = ChunkExchange(outgoing, self._peers)
        for version in exchange.to_owners():
            codec.decompress(version.unsqueeze(0), total, accumulate=True)
        if self._average:
            total.mul_(1.0 / self.chunks)
        mine = codec.compress(total, out=scratch((1, size), torch.uint8, flat.device))
        _keep_rest(total, codec.decompress(mine, scratch_like(total)))
        exchange.to_all(mine.view(-1))
        codec.decompress(outgoing, flat)


def _keep_rest(owed: torch.Tensor, sent: torch.Tensor) -> None:
    """What is not finite is forgotten: it was sent as NaN, and the step is lost anyway."""
    owed.sub_(sent).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)


@dataclass
class _BucketState:
    """
    Attributes:
        parameters: in the bucket's order.
        shapes: theirs: how a saved state is recognized.
    """

    parameters: list[weakref.ref[torch.Tensor]]
    shapes: list[tuple[int, ...]]
    operation: ErrorFeedbackAllReduce

    def is_of(self, parameters: Sequence[torch.Tensor]) -> bool:
        return len(parameters) == len(self.parameters) and all(
            known() is one for known, one in zip(self.parameters, parameters, strict=True)
        )


class ErrorFeedbackState(ByteGradState):
    """Options and memory of `error_feedback_bytegrad`: one for each model. It takes four bytes for each parameter, and
    4/n more, beside those of `bytegrad`.

    Args:
        process_group: as of ByteGradState.
        average: as of ByteGradState.
        hierarchical: as of ByteGradState; the memory is the leaders' then.
        codec: as of ByteGradState. A saved state may go on with another one; where that shares buckets out in chunks of
            another length, a warning says how many elements of d are dropped at their ends.
        grad_scaler: the torch.amp.GradScaler that scales the loss, if there is one. The memory is multiplied when its
            scale changes. Copies have none.
    """

    def __init__(
        self,
        process_group: BaguaProcessGroup | dist.ProcessGroup | None = None,
        average: bool = True,
        hierarchical: bool = False,
        codec: str | Codec = DEFAULT_CODEC,
        grad_scaler: Any = None,
    ) -> None:
        super().__init__(process_group, average, hierarchical, codec)
        self.grad_scaler = grad_scaler
        self._buckets: dict[int, _BucketState] = {}
        self._parameters: dict[int, weakref.ref[torch.Tensor]] = {}  # of the model, by id
        self._loaded: dict[int, Mapping[str, Any]] = {}
        self._passes = 0

    def _portable(self) -> dict[str, Any]:
        """With what this rank owes, which is recognized by the shapes of the parameters, as that of a loaded state."""
        owed = {"_buckets": {}, "_parameters": {}, "_passes": 0, "_loaded": self.state_dict()["buckets"]}
        return {**super()._portable(), **owed, "grad_scaler": None}

    def start(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        flat = bucket.buffer()
        place = self.place(flat.device)
        operation = self._bucket_state(bucket).operation
        if bucket.is_last():
            self._end_pass(bucket.index())
        return place.background.run(partial(reduce_flat, flat, operation, place, self.average), flat.device)

    def _bucket_state(self, bucket: GradBucket) -> _BucketState:
        index, parameters = bucket.index(), bucket.parameters()
        known = self._buckets.get(index)
        if known is not None and known.is_of(parameters):
            return known
        if self._passes and not any(self._knows(one) for one in parameters):
            if any(one() is not None for one in self._parameters.values()):
                raise ValueError("an ErrorFeedbackState was given to two models; make one for each")
            self._forget()  # that model is gone
        references = [weakref.ref(one) for one in parameters]
        place = self.place(bucket.buffer().device)
        operation = ErrorFeedbackAllReduce(
            place.background.group, self.average, self.hierarchical, self.codec, self.grad_scaler
        )
        state = _BucketState(references, [tuple(one.shape) for one in parameters], operation)
        saved = self._loaded.get(index)
        if saved is not None and saved["shapes"] == state.shapes:
            elements = bucket.buffer().numel()
            _restore(operation, saved, elements + -elements % place.alignment, bucket.buffer().device)
        self._buckets[index] = state
        self._parameters.update((id(one), reference) for one, reference in zip(parameters, references, strict=True))
        return state

    def _knows(self, parameter: torch.Tensor) -> bool:
        reference = self._parameters.get(id(parameter))
        return reference is not None and reference() is parameter

    def _forget(self) -> None:
        self._buckets.clear()
        self._parameters.clear()
        self._passes = 0

    def _end_pass(self, last: int) -> None:
        self._passes += 1
        for index in [one for one in self._buckets if one > last]:
            del self._buckets[index]
        if not self._loaded or self._passes < _PASSES_TO_SETTLE:
            return
        saved = {index: one["shapes"] for index, one in self._loaded.items()}
        ours = {index: one.shapes for index, one in self._buckets.items()}
        self._loaded = {}
        if saved != ours:
            raise ValueError(
                f"The loaded state is of other buckets: its parameters have the shapes {saved}, here they are {ours}.\n"
                "Use the model and bucket_cap_mb with which it was saved, or continue without this state."
            )

    @property
    def _group(self) -> BaguaProcessGroup:
        return to_bagua_process_group(self.process_group)  # which may have been set by hand

    @property
    def _rank(self) -> int:
        """In the group."""
        return self._group.ranks.index(dist.get_rank())

    def state_dict(self) -> dict[str, Any]:
        """What this rank owes, to be saved with its model and optimizer. The tensors are those at work."""
        if not self._buckets:
            return {"rank": self._rank, "buckets": dict(self._loaded)}
        return {
            "rank": self._rank,
            "buckets": {
                index: {
                    "shapes": one.shapes,
                    "residual": one.operation.residual,
                    "chunk_residual": one.operation.chunk_residual,
                    "scale": one.operation.scale.value,
                }
                for index, one in self._buckets.items()
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Owe what the same rank owed when it gave `state`. To be called before training goes on.

        DDP may use other buckets in the first step than in all later ones, where gradients do not become ready in the
        reverse order of the parameters; what belongs to the later ones is taken up in the second step then.

        Raises:
            ValueError: `state` is none of an ErrorFeedbackState, or another rank's. One of another model, or of another
                number of ranks, shows in the first two backward passes.
        """
        if not {"buckets"} <= set(state) <= {"buckets", "rank"}:
            raise ValueError(f"a state of ErrorFeedbackState has ['buckets', 'rank'], this has {sorted(state)}")
        if state["buckets"]:
            check_rank(state, self._rank, self._group.size, "owes something else")
        self._loaded = dict(state["buckets"])
        self._forget()


def _restore(operation: ErrorFeedbackAllReduce, saved: Mapping[str, Any], elements: int, device: torch.device) -> None:
    """`elements`: of the padded bucket. Another codec may pad to another length, which moves the ends of chunks."""
    residual, chunk_residual = saved["residual"], saved["chunk_residual"]
    if residual is None:
        return
    chunks = operation.chunks
    if residual.numel() != chunk_residual.numel() * chunks:
        raise ValueError(
            "The loaded state was saved with another number of ranks or nodes than the"
            f" {chunks} that share a bucket now.\nContinue without it."
        )
    operation.residual = _at(residual, 0, elements, 0, device)
    operation.scale.value = saved.get("scale")
    before, now, chunk = chunk_residual.numel(), elements // chunks, operation.own_chunk
    operation.chunk_residual = _at(chunk_residual, chunk * before, now, chunk * now, device)
    dropped = int(chunk_residual.count_nonzero()) - int(operation.chunk_residual.count_nonzero())
    if dropped:
        warnings.warn(
            f"The loaded state has chunks of {before} elements, those of {operation.codec.name} have {now}: what"
            f" rounding took from {dropped} elements of the last mean is dropped.\nTo drop nothing, use the codec with"
            " which it was saved.",
            RuntimeWarning,
            stacklevel=2,
        )


def _at(owed: torch.Tensor, begin: int, elements: int, new_begin: int, device: torch.device) -> torch.Tensor:
    """What was owed to the elements from `begin` of a bucket on -> to `elements` from `new_begin` on."""
    result = torch.zeros(elements, dtype=torch.float32, device=device)
    first, end = max(begin, new_begin), min(begin + owed.numel(), new_begin + elements)
    if first < end:
        result[first - new_begin : end - new_begin].copy_(owed[first - begin : end - begin])
    return result


def error_feedback_bytegrad(state: ErrorFeedbackState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """As `bytegrad`, and what rounding takes away from a step's gradients is added to the next step's. For
    `register_comm_hook`.

    Args:
        state: one ErrorFeedbackState for each model.
        bucket: as for `bytegrad`.
    """
    if not isinstance(state, ErrorFeedbackState):
        raise TypeError(
            f"error_feedback_bytegrad was given {state!r} as its state; give it an ErrorFeedbackState(process_group)"
        )
    return state.start(bucket)
