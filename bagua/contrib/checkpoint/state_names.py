"""Names of states in files. Functions of modules, names and states.

They are plain, without those of wrappers: torch.compile's `_orig_mod.`, and the `module.` of data-parallel modules.
So a checkpoint does not depend on what a model was wrapped in.

Each rank has experts of a mixture under local numbers, and files have them under global ones: expert i of rank r is
expert r * n + i of all, where each rank has n.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from bagua.job.torch_internals import COMPILED, without_wrappers

_PARALLEL = "module"
_PARALLEL_KINDS = (nn.parallel.DistributedDataParallel, nn.DataParallel)


def unwrapped(model: nn.Module) -> nn.Module:
    """The user's module inside of all wrappers; a module without wrapper itself."""
    while (name := _inside(model)) is not None:
        model = model._modules[name]  # type: ignore[assignment]
    return model


def plain_state(module: nn.Module) -> dict[str, Any]:
    """Its state_dict, under plain names."""
    state = module.state_dict()
    plain = _Plain(module)
    if not plain.prefixes:
        return state
    renamed = type(state)((plain.of(name), value) for name, value in state.items())
    if hasattr(state, "_metadata"):  # by the names of modules
        renamed._metadata = {  # type: ignore[attr-defined]
            plain.of(f"{name}.").removesuffix("."): value for name, value in state._metadata.items()
        }
    return renamed


def plain_parameters(module: nn.Module) -> dict[int, str]:
    """The plain names of its parameters, by id."""
    plain = _Plain(module)
    return {id(parameter): plain.of(name) for name, parameter in module.named_parameters()}


def rename_for(module: nn.Module, state: dict[str, Any]) -> None:
    """In place: the names of a file become those of a module. What is unknown keeps its name, or its plain one."""
    own = module.state_dict()
    if all(name in own for name in state):
        return
    plain = _Plain(module)
    actual = {plain.of(name): name for name in own}
    # Bagua 0.9 wrote the names of its DistributedDataParallel.
    is_parallel = all(map(_is_parallel, map(without_wrappers, state))) and not any(map(_is_parallel, actual))
    prefix = f"{_PARALLEL}." if is_parallel else ""

    def renamed(written: str) -> str:
        name = without_wrappers(written).removeprefix(prefix)
        return written if written in own else actual.get(name, name)

    items = [(renamed(name), value) for name, value in state.items()]
    state.clear()
    state.update(items)
    if hasattr(state, "_metadata"):  # by the names of modules
        actual = {plain.of(f"{name}."): name for name, _ in module.named_modules()}
        state._metadata = {
            actual.get(f"{without_wrappers(name)}.".removeprefix(prefix), name): value
            for name, value in state._metadata.items()
        }


def _is_parallel(name: str) -> bool:
    return name.startswith(f"{_PARALLEL}.")


def _inside(module: nn.Module) -> str | None:
    """The name under which a wrapper has its module; None: it is not a wrapper."""
    if isinstance(module, _PARALLEL_KINDS) or getattr(type(module), "_bagua_is_parallel", False):
        return _PARALLEL
    return COMPILED if COMPILED in module._modules else None


class _Plain:
    """Plain names in a module.

    Attributes:
        prefixes: of what is in wrappers, and the plain one of each, the longest first.
    """

    def __init__(self, module: nn.Module) -> None:
        found = {
            f"{path}.{inside}.".removeprefix("."): f"{path}.".removeprefix(".")
            for path, one in module.named_modules(remove_duplicate=False)
            if (inside := _inside(one)) is not None
        }
        self.prefixes = sorted(found.items(), key=lambda pair: len(pair[0]), reverse=True)

    def of(self, name: str) -> str:
        for prefix, plain in self.prefixes:
            if name.startswith(prefix):
                name = plain + name.removeprefix(prefix)
        return name


_EXPERT = re.compile(r"^((?:.*\.)?bagua_moe\.experts\.bagua_experts\.)(\d+)(\..*)$")


def local_counts(names: Iterable[str]) -> dict[str, int]:
    """How many experts this rank has in each layer: by the layer's prefix, the part of the name in front of the
    number. Empty for other models."""
    counts: dict[str, int] = {}
    for name in names:
        match = _EXPERT.match(name)
        if match:
            counts[match[1]] = max(counts.get(match[1], 0), int(match[2]) + 1)
    return counts


def expert_of(name: str, rank: int, counts: Mapping[str, int]) -> int | None:
    """The global number of the expert that a local name belongs to; None: to none."""
    match = _EXPERT.match(name)
    return rank * counts[match[1]] + int(match[2]) if match else None


def global_name(name: str, rank: int, counts: Mapping[str, int]) -> str:
    """A local name as it is in files."""
    match = _EXPERT.match(name)
    return f"{match[1]}{rank * counts[match[1]] + int(match[2])}{match[3]}" if match else name


def owner_of(name: str, counts: Mapping[str, int]) -> int:
    """The rank that has the state of a global name, where ranks have these many experts. 0: all ranks have it."""
    match = _EXPERT.match(name)
    return int(match[2]) // counts[match[1]] if match else 0


def split(
    state: Mapping[str, Any], rank: int, counts: Mapping[str, int]
) -> tuple[dict[str, Any], dict[int, dict[str, Any]]]:
    """A model's state without experts, and that of each expert by its global number, under global names."""
    rest: dict[str, Any] = {}
    experts: dict[int, dict[str, Any]] = {}
    for name, value in state.items():
        expert = expert_of(name, rank, counts)
        if expert is None:
            rest[name] = value
        else:
            experts.setdefault(expert, {})[global_name(name, rank, counts)] = value
    return rest, experts
