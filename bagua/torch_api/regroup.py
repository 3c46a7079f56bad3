"""What a program asks where the job goes on without ranks that it loses."""

from __future__ import annotations

from bagua.regroup import coordinator


def regroup_step() -> int:
    """
    How many steps the job has made, those of lost ranks included; the same on all ranks between two steps. In a step,
    each optimizer of each wrapped model steps once. One that was dropped does not count, unless an optimizer had
    stepped before. A loop over a number of steps asks this instead of counting by itself.

    Raises:
        RuntimeError: `init_process_group` was called without `regroup`.
    """
    regrouping = coordinator.current()
    if regrouping is None:
        raise RuntimeError(
            "regroup_step: this job does not regroup.\n"
            "Call init_process_group(regroup=Regroup()) of bagua.torch_api first."
        )
    return regrouping.step
