"""What programs ask of the `reducer` of torch's wrapper, which is private to torch: Accelerate's
`trigger_sync_in_backward` does, for one."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


class Reducer:
    """Of a wrapper."""

    def prepare_for_backward(self, outputs: Sequence[Tensor]) -> None:
        """Expect a backward pass that communicates. Nothing has to be done: whether a backward pass communicates is
        decided when it begins, by `require_backward_grad_sync`, and not in the forward pass as in torch.

        Args:
            outputs: Of the forward pass.
        """
