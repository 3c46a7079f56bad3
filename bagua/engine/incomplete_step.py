"""What the engine says where ranks would grow apart: which parameters were not communicated, why, and what to do.

Pure functions: names in, text out.
"""

from __future__ import annotations

from collections.abc import Sequence

# Names that a message lists.
_MOST_NAMES = 10


def incomplete_step(
    missing: Sequence[str],
    synchronised: Sequence[str],
    frozen: Sequence[str],
    ended_with_exception: bool,
    has_other_parameters: bool,
) -> str:
    """
    Args:
        missing: that got no gradient in the last backward pass; none if all was sent, but not waited for.
        synchronised: all names.
        frozen: of the missing ones.
        ended_with_exception: the pass.
        has_other_parameters: the module, than when it was wrapped.
    """
    if missing:
        what = (
            f"{len(missing)} of {len(synchronised)} parameters got no gradient in the last backward pass, so that their"
            f" buckets were not communicated: {_listed(missing)}"
        )
    else:
        what = "the communication of the last backward pass was not waited for"
    if ended_with_exception:
        remedy = (
            "It ended with an exception. If that was so on every rank, training can go on with another forward"
            " pass; otherwise the ranks are out of step, start all of them again from the last checkpoint"
        )
    elif has_other_parameters:
        remedy = "The module has other parameters now than when it was wrapped: wrap it again"
    elif frozen:
        remedy = (
            f"{_listed(frozen)}: frozen since the module was wrapped, or last called in training mode, and that is"
            " taken up by the next such call, not in eval() mode, nor by calling another method of the module. Wrap"
            " it again, or call it once in train() mode (under torch.no_grad(), if need be), on all ranks"
        )
    else:
        remedy = (
            "If the loss does not depend on them in every step, use find_unused_parameters=True; if it never does,"
            " freeze them (requires_grad_(False))"
        )
    return f"{what}. {remedy}"


def unregistered_parameters(names: Sequence[str]) -> str:
    """Of parameters that the module did not have when it was wrapped."""
    return (
        f"{len(names)} parameters are not synchronised, since the module did not have them when it was wrapped:"
        f" {_listed(names)}. Wrap it again, on all ranks, after layers or parameters were added or replaced (as"
        " load_state_dict(..., assign=True) does)"
    )


def failed_reinitialization(module: str, error: BaseException) -> str:
    """Of a module that could not be initialised again."""
    return (
        f"{module} is not synchronised any more: it could not be initialised again when parameters were frozen or"
        " unfrozen, or its algorithm asked for it; wrap it again, on all ranks. The cause was"
        f" {type(error).__name__}: {error}"
    )


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_NAMES} more" if names[_MOST_NAMES:] else ""
    return ", ".join(names[:_MOST_NAMES]) + more
