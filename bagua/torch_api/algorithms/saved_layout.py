"""Whether tensors that were saved fit the module into which they are loaded."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

Groups = Sequence[Sequence[Tensor]]


def check_layout(what: str, saved: Groups, here: Groups, cause: str = "another model") -> None:
    """
    Args:
        what: for the message, in the plural: "peer weights".
        saved: of the state, in groups: buckets or fragments.
        here: likewise, of this module.
        cause: "The state is of ...".

    Raises:
        ValueError: groups, dtypes or shapes differ; the message names the first difference.
    """
    theirs, ours = (
        [f"{one.dtype} {list(one.shape)} in group {n}" for n, group in enumerate(groups) for one in group]
        for groups in (saved, here)
    )
    if theirs == ours:
        return
    pairs = zip(theirs, ours, strict=False)
    place = next((n for n, (one, other) in enumerate(pairs) if one != other), min(len(theirs), len(ours)))
    first = [one[place] if place < len(one) else "missing" for one in (theirs, ours)]
    raise ValueError(
        f"The state has {len(theirs)} {what}, this module has {len(ours)}. The first that differs is number {place}:"
        f" {first[0]} in the state, {first[1]} here.\n"
        f"The state is of {cause}."
    )
