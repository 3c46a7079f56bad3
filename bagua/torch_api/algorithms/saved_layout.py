"""Whether tensors that were saved fit the module into which they are loaded."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import torch
from torch import Tensor

from bagua.engine.algorithm_facade import AlgorithmFacade

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
        f"The state is of {cause}.\n"
        "A state of an earlier version fits only where the same parameters are frozen as when it was saved."
    )


def check_names(bagua_ddp: AlgorithmFacade, names: Iterable[str], cause: str = "another model") -> None:
    """
    Args:
        names: of parameters, in the state.
        cause: "The state is of ...".

    Raises:
        ValueError: the module does not have one of them.
    """
    here = {name for name, _ in bagua_ddp.replicated_parameters}
    missing = [name for name in names if name not in here]
    if missing:
        raise ValueError(
            f"The state has {missing[0]!r}, which is not a parameter of {bagua_ddp.bagua_module_name}, or is left out"
            f" of training there.\nThe state is of {cause}."
        )


def restore_plan(bagua_ddp: AlgorithmFacade, names: Collection[str], others: Collection[str]) -> None:
    """Communicate what was communicated when a state was saved, whatever is frozen now, and what is trained now.

    Args:
        names: of parameters that were in the plan.
        others: of those that were in one before. What was in none has to be broadcast first.
    """
    unfrozen = {name for name, parameter in bagua_ddp.replicated_parameters if parameter.requires_grad}
    wanted = {*names, *unfrozen.intersection(others)}
    if wanted != {name for name, _ in bagua_ddp.synchronized_parameters}:
        bagua_ddp.communicate(wanted)


def split_flat(
    bagua_ddp: AlgorithmFacade, names: Sequence[str], flat: Tensor, cause: str = "another model"
) -> dict[str, Tensor]:
    """A bucket's memory in a state, by the names of its parameters.

    Raises:
        ValueError: parameters have another dtype, or other sizes, here.
    """
    here = dict(bagua_ddp.replicated_parameters)
    sizes = [here[name].numel() for name in names]
    if sum(sizes) != flat.numel() or any(here[name].dtype != flat.dtype for name in names):
        raise ValueError(
            f"The state has {flat.numel()} elements of {flat.dtype} for {names[0]!r} to {names[-1]!r}, this module has"
            f" {sum(sizes)} of {here[names[0]].dtype}.\nThe state is of {cause}."
        )
    return dict(zip(names, torch.split(flat, sizes), strict=True))
