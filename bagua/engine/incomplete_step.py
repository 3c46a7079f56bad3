"""What the engine says where ranks would grow apart: which parameters were not communicated, why, and what to do.

Pure functions: names in, text out.
"""

from __future__ import annotations

from collections.abc import Sequence

from bagua.error_text import listed

# Names that a message lists.
_MOST_NAMES = 10


def incomplete_step(
    missing: Sequence[str],
    synchronized: Sequence[str],
    frozen: Sequence[str],
    ended_with_exception: bool,
    has_other_parameters: bool,
) -> str:
    """
    Args:
        missing: that got no gradient in the last backward pass; none if all was sent, but not waited for.
        synchronized: all names.
        frozen: of the missing ones.
        ended_with_exception: the pass.
        has_other_parameters: the module, than when it was wrapped.
    """
    if missing:
        what = (
            f"{len(missing)} of {len(synchronized)} parameters got no gradient in the last backward pass:"
            f" {listed(missing, _MOST_NAMES)}.\nTheir buckets were not communicated."
        )
    else:
        what = "the communication of the last backward pass was not waited for."
    if ended_with_exception:
        remedy = (
            "The pass ended with an exception. If it did so on every rank, continue with the next forward pass;"
            " otherwise restart all ranks from the last checkpoint."
        )
    elif has_other_parameters:
        remedy = "The module has other parameters now than when it was wrapped: wrap it again."
    elif frozen:
        remedy = (
            f"{listed(frozen, _MOST_NAMES)}: frozen since the module was wrapped or last called in training mode."
            " Only a call of the module in train() mode notices that.\n"
            "On all ranks, call the module once in train() mode (torch.no_grad() is enough), or wrap it again."
        )
    else:
        remedy = (
            "If the loss does not depend on them in every step, pass find_unused_parameters=True to with_bagua() or to"
            " DistributedDataParallel(). If it never does, freeze them (requires_grad_(False))."
        )
    return f"{what}\n{remedy}"


def unregistered_parameters(names: Sequence[str]) -> str:
    """Of parameters that the module did not have when it was wrapped."""
    return (
        f"{len(names)} parameters are not synchronized, since the module did not have them when it was wrapped:"
        f" {listed(names, _MOST_NAMES)}.\n"
        "Wrap it again, on all ranks, after you add or replace layers or parameters (load_state_dict(..., assign=True)"
        " replaces them)."
    )


def unsynchronized_gradient(name: str, module: str) -> str:
    """Of a parameter that was frozen when buckets were made."""
    return (
        f"{name!r} got a gradient, but is not synchronized.\n"
        f"It was frozen when {module} was wrapped or last called in training mode. Only a call of the module"
        " in train() mode notices that it was unfrozen.\n"
        "On all ranks, call the module once in train() mode (torch.no_grad() is enough), or wrap it again. To"
        " train this parameter on each rank separately, put its name into the module's"
        " _bagua_params_and_buffers_to_ignore."
    )


def left_out_gradient(name: str) -> str:
    """Of a parameter that no rank used in the first backward pass, see `leave_out`."""
    return (
        f"{name!r} got a gradient, but is not synchronized.\n"
        "No rank used it in the first backward pass, so that skip_all_reduce_unused_params=True left it out.\n"
        "If the loss does not depend on it in every step, use find_unused_parameters=True alone."
    )


def step_in_backward(module: str) -> str:
    """Of an optimizer that steps in a hook, while gradients are communicated."""
    return (
        "An optimizer stepped within the backward pass, before its gradients had been communicated.\n"
        f"Found in the backward pass of {module}, in optimizer.step() of a hook.\n"
        "Step after backward(). Or use DistributedDataParallel, and apply_optimizer_in_backward before it: it steps"
        " such optimizers at the end of the pass. Algorithms that exchange weights instead of gradients allow steps in"
        " hooks."
    )


def partly_weighted(module: str) -> str:
    """Of a backward pass with batch weights whose buckets have to wait for gradients of another pass."""
    return (
        "A backward pass with batch weights has reached only some of the parameters.\n"
        f"Module: {module}. Its other gradients would come in a pass with another weight, in the same bucket.\n"
        "Pass find_unused_parameters=True, or make one backward pass of the whole loss."
    )


def compiled_autograd(module: str) -> str:
    """Of a backward pass whose end nobody tells."""
    return (
        "Compiled autograd is not supported: it does not tell when a backward pass ends.\n"
        f"Found in the backward pass of {module}.\n"
        "Set torch._dynamo.config.compiled_autograd = False. torch.compile of the module, or of a step that calls"
        " backward(), works without it."
    )


def failed_reinitialization(module: str, error: BaseException) -> str:
    """Of a module that could not be initialized again."""
    return (
        f"{module} is not synchronized any more: it could not be initialized again after parameters were frozen or"
        " unfrozen, or its algorithm asked for it.\n"
        f"Cause: {type(error).__name__}: {error}\n"
        "Remove the cause, and wrap the module again on all ranks."
    )
