"""Which parameters of a module are synchronized, under which names."""

from __future__ import annotations

import difflib
import operator
import warnings
from collections.abc import Iterable

from torch import nn

from bagua.job.sharded_parameters import refuse_sharded

_IGNORE_LISTS = ("_bagua_params_and_buffers_to_ignore", "_ddp_params_and_buffers_to_ignore")

# Of devices for which there are a backend and operations. ROCm's devices are named cuda, too.
_DEVICE_TYPES = ("cpu", "cuda")

# Names that the warning about one that does not exist lists.
_MOST_NEAR = 3

_needs_gradient = operator.attrgetter("requires_grad")


def ignored_names(module: nn.Module) -> list[str]:
    """Names in the module's ignore lists, without the leading dot that old code writes for root-level parameters. One
    that nothing has is a warning and no error: torch takes it, too.

    Raises:
        TypeError: an ignore list is no list of names.
    """
    names: dict[str, None] = {}
    for ignore_list in _IGNORE_LISTS:
        given = getattr(module, ignore_list, None)
        if given is None:
            continue
        if isinstance(given, str) or not isinstance(given, Iterable):
            raise TypeError(f"{ignore_list} is {given!r}; give a list of names: ['head.weight', 'head.bias']")
        for name in given:
            if not isinstance(name, str):
                raise TypeError(f"{ignore_list} holds {name!r}; give names, as named_parameters() has them")
            names[name.removeprefix(".")] = None
    if names:
        _warn_of_unknown(module, names)
    return list(names)


def _warn_of_unknown(module: nn.Module, names: Iterable[str]) -> None:
    known = {
        f"{prefix}.{key}" if prefix else key
        for prefix, owner in module.named_modules(remove_duplicate=False)
        for key in (*owner._parameters, *owner._buffers)
    }
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=_MOST_NEAR)
            hint = f"names near it: {', '.join(near)}" if near else "give names as named_parameters() has them"
            warnings.warn(
                f"{type(module).__name__} has no parameter or buffer {name!r}, which is to be ignored; {hint}",
                stacklevel=2,
            )


def replicated_parameters(module: nn.Module, ignored: list[str]) -> list[tuple[str, nn.Parameter]]:
    """(name, parameter) in the module's order, each parameter once, under the first of its names.

    Left out are those in `ignored` (under any of their names), and experts of a mixture (`parameter.expert`), which
    differ by rank on purpose.
    """
    skip = set(ignored)
    excluded = {id(parameter) for name, parameter in module.named_parameters(remove_duplicate=False) if name in skip}
    return [
        (name, parameter)
        for name, parameter in module.named_parameters()
        if id(parameter) not in excluded and not getattr(parameter, "expert", False)
    ]


def left_out_parameters(module: nn.Module, ignored: list[str]) -> set[int]:
    """The ids of those that are none of `replicated_parameters`."""
    replicated = {id(parameter) for _, parameter in replicated_parameters(module, ignored)}
    return {id(parameter) for parameter in module.parameters()} - replicated


def trainable_parameters(module: nn.Module, ignored: list[str]) -> list[tuple[str, nn.Parameter]]:
    """Those of `replicated_parameters` that need a gradient.

    Raises:
        NotImplementedError: an embedding with sparse gradients, or a parameter, trained or not, on another device than
            a CPU or CUDA.
        ValueError: a parameter that FSDP or tensor parallelism has distributed.
    """
    replicated = replicated_parameters(module, ignored)
    _refuse_other_devices(module, replicated)
    parameters = [one for one in replicated if one[1].requires_grad]
    refuse_sharded(parameters, f"wrapping {type(module).__name__}")
    _refuse_sparse(module, {id(parameter) for _, parameter in parameters})
    return parameters


def _refuse_other_devices(module: nn.Module, parameters: list[tuple[str, nn.Parameter]]) -> None:
    """Operations would treat what is not CUDA as if it were on a CPU."""
    for name, parameter in parameters:
        if parameter.device.type not in _DEVICE_TYPES:
            how = "materialize it, for instance with to_empty(device=...)" if parameter.is_meta else "move the module"
            raise NotImplementedError(
                f"{name!r} is on device {str(parameter.device)!r}; Bagua trains on {' and '.join(_DEVICE_TYPES)}.\n"
                f"Found while wrapping {type(module).__name__}.\n"
                f"Before with_bagua, {how} to one of these, or put the name into the module's"
                " _bagua_params_and_buffers_to_ignore."
            )


def _refuse_sparse(module: nn.Module, listed: set[int]) -> None:
    for name, child in module.named_modules():
        if isinstance(child, nn.Embedding | nn.EmbeddingBag) and child.sparse and id(child.weight) in listed:
            raise NotImplementedError(
                f"{name or type(child).__name__}.weight has sparse gradients. Bagua communicates only dense ones.\n"
                "Use sparse=False, or put the name into the module's _bagua_params_and_buffers_to_ignore."
            )


class TrainableWatch:
    """Notices that one of `replicated_parameters` was frozen, unfrozen or replaced. It keeps them: finding them takes
    longer than looking at all of them.

    Attributes:
        named: (name, parameter) in the module's order, as they were found.
    """

    def __init__(self, module: nn.Module, ignored: list[str]) -> None:
        self._module = module
        self._ignored = ignored
        self.named = replicated_parameters(module, ignored)
        self._parameters = [parameter for _, parameter in self.named]
        self.remember()

    def remember(self) -> None:
        """`has_changed` means since now."""
        self._flags = self.flags()

    def flags(self) -> tuple[bool, ...]:
        """Which of them need a gradient now."""
        return tuple(map(_needs_gradient, self._parameters))

    def has_changed(self) -> bool:
        """Whether one was frozen or unfrozen."""
        return tuple(map(_needs_gradient, self._parameters)) != self._flags

    def all_frozen(self) -> bool:
        """Whether none needs a gradient now."""
        return not any(self.flags())

    def is_outdated(self) -> bool:
        """Whether parameters were added, removed, replaced or renamed since."""
        now = replicated_parameters(self._module, self._ignored)
        return [(name, id(one)) for name, one in now] != [(name, id(one)) for name, one in self.named]

    def unregistered(self) -> list[str]:
        """Names of parameters that need a gradient and were not there in the beginning.

        Raises:
            ValueError: FSDP or tensor parallelism has replaced them.
        """
        known = {id(parameter) for parameter in self._parameters}
        now = [one for one in replicated_parameters(self._module, self._ignored) if one[1].requires_grad]
        refuse_sharded(now, f"training {type(self._module).__name__}, which was wrapped before it was sharded")
        return [name for name, parameter in now if id(parameter) not in known]
