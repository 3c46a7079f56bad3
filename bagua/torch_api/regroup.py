"""What a program asks where the job goes on without ranks that it loses."""

from __future__ import annotations

from bagua.regroup import coordinator


def regroup_step() -> int:
    """
    How many optimizer steps the job has made, those of lost ranks included; the same on all ranks between two steps.
    A step that was dropped does not count. A loop over a number of steps asks this instead of counting by itself.

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
