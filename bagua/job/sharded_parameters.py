"""Parameters that torch itself distributes over the ranks: DTensors, as FSDP2 (`fully_shard`) and tensor parallelism
make them, and those that FullyShardedDataParallel (FSDP1) has put into a FlatParameter. Functions; any thread.

Bagua synchronizes whole replicas. It would send parts as if they were replicas, or fail in torch's dispatcher.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

from torch import Tensor

_GUIDE = "docs/how-to/train/use-fsdp.md"
_COMPRESSION = "docs/how-to/train/compress-fsdp.md"
_WITHOUT_BAGUA = (
    "Train it with FSDP or tensor parallelism alone, or leave it out: put its name into the module's"
    " _bagua_params_and_buffers_to_ignore"
)


def refuse_sharded(named: Iterable[tuple[str, Tensor]], doing: str, remedy: str = _WITHOUT_BAGUA) -> None:
    """
    Args:
        named: (name, tensor) of what is about to be synchronized or flattened.
        doing: what found them, for the message: "wrapping Linear".
        remedy: what to do instead, for the message.

    Raises:
        ValueError: one of them is distributed by torch.
    """
    for name, tensor in named:
        kind = _kind_of(tensor)
        if kind is not None:
            raise ValueError(
                f"{name!r} is {kind}: torch distributes it over the ranks. Bagua works on whole replicas.\n"
                f"Found while {doing}.\n"
                f"{remedy}; see {_GUIDE}. To compress what FSDP2 sends, see {_COMPRESSION}."
            )


def _kind_of(tensor: Tensor) -> str | None:
    # Looked up, not imported, which takes seconds: there is no DTensor where nobody has imported it.
    dtensor = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    if dtensor is not None and isinstance(tensor, dtensor):
        return "a DTensor"
    # FSDP1 marks its FlatParameters, and with use_orig_params=True the parameters that lie in them.
    return "a parameter of FullyShardedDataParallel" if getattr(tensor, "_fsdp_flattened", False) else None
