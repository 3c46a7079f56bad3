"""The buffers of a module as they are now, wherever they have been registered, replaced or deleted meanwhile.

Owned by one BufferBroadcast; runs on the thread of forward, in every step. To walk through a module as `named_buffers`
does takes up to 2 % of a step, so it is done only when the tree of modules has changed. To see that, the dicts in which
modules keep children and buffers are compared with what they held, in a few calls of C.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import chain
from typing import Any

from torch import Tensor, nn

_children_of = operator.attrgetter("_modules")
_buffers_of = operator.attrgetter("_buffers")
_keys_of = operator.methodcaller("keys")
_values_of = operator.methodcaller("values")


class ModuleBuffers:
    def __init__(self, module: nn.Module, ignored: Collection[str]) -> None:
        self._module = module
        self._ignored = frozenset(ignored)
        self._buffers: list[Tensor | None] = []
        self._named: list[tuple[str, Tensor]] = []
        self._walk()

    def named(self) -> list[tuple[str, Tensor]]:
        """(name, buffer), each once, in the module's order. The same list again if nothing has changed."""
        if self._is_other_tree():
            self._walk()
        buffers = _flattened(_values_of, self._filled)
        if not _are_same(buffers, self._buffers):
            self._buffers = buffers
            found: dict[int, tuple[str, Tensor]] = {}
            for name, buffer in zip(self._names, buffers, strict=True):
                if buffer is not None:
                    found.setdefault(id(buffer), (name, buffer))
            # By the first name of each alone, as torch's DDP does.
            self._named = [one for one in found.values() if one[0] not in self._ignored]
        return self._named

    def _walk(self) -> None:
        named = list(self._module.named_modules())
        self._owners = [owner for _, owner in named]
        self._dicts = self._read()
        self._lengths = list(map(len, self._dicts))
        # Most are empty, of which the length says all.
        self._parents = [owner._modules for owner in self._owners if len(owner._modules)]
        self._children = _flattened(_values_of, self._parents)
        self._filled = [owner._buffers for owner in self._owners if len(owner._buffers)]
        self._keys = _flattened(_keys_of, chain(self._parents, self._filled))
        self._names = [f"{prefix}.{key}" if prefix else key for prefix, owner in named for key in owner._buffers.keys()]  # noqa: SIM118 - scripted modules have no dict
        self._buffers, self._named = [], []

    def _read(self) -> list[Mapping[str, Any]]:
        return [*map(_children_of, self._owners), *map(_buffers_of, self._owners)]

    def _is_other_tree(self) -> bool:
        """Whether there are other modules than before, or other names of theirs or of buffers."""
        dicts = self._read()
        return not (
            _are_same(dicts, self._dicts)
            and list(map(len, dicts)) == self._lengths
            and _are_same(_flattened(_values_of, self._parents), self._children)
            and _flattened(_keys_of, chain(self._parents, self._filled)) == self._keys
        )


def _are_same(these: list[Any], those: list[Any]) -> bool:
    return len(these) == len(those) and all(map(operator.is_, these, those))


def _flattened(part: Callable[[Mapping[str, Any]], Iterable[Any]], dicts: Iterable[Mapping[str, Any]]) -> list[Any]:
    return list(chain.from_iterable(map(part, dicts)))
