"""Algorithms by name: the registry, and what an argument `algorithm` means wherever users may give one."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from bagua.torch_api.algorithms.base import Algorithm


class UnknownAlgorithmError(ValueError, KeyError):
    """No algorithm of this name is registered. It is also a KeyError, as in Bagua 0.9."""

    def __str__(self) -> str:
        return str(self.args[0])  # a KeyError would put it into quotation marks


class AlgorithmRegistry:
    """Algorithms by name, so that a configuration can choose one."""

    def __init__(self) -> None:
        self._entries: dict[str, tuple[Callable[..., Algorithm], str | None]] = {}

    def register(self, name: str, algorithm: Callable[..., Algorithm], description: str | None = None) -> None:
        """Make an algorithm available to `Algorithm.init`.

        Raises:
            TypeError: `name` is not a string.
            ValueError: `name` is taken.
        """
        if not isinstance(name, str):
            raise TypeError(f"An algorithm's name must be a string, not {type(name).__name__} ({name!r}).")
        if name in self._entries:
            raise ValueError(f"An algorithm {name!r} is already registered. Choose another name.")
        self._entries[name] = (algorithm, description)

    def get(self, name: str) -> Callable[..., Algorithm]:
        """What makes the algorithm of this name from its options.

        Raises:
            UnknownAlgorithmError: no such name; names the nearest one and all that are registered.
        """
        if name not in self._entries:
            known = self.available_algorithms()
            raise UnknownAlgorithmError(
                f"Unknown algorithm {name!r}.{_nearest(name, known)} Known algorithms: {', '.join(known)}."
            )
        return self._entries[name][0]

    def make(self, name: str, **options: Any) -> Algorithm:
        """The algorithm of this name, constructed with `options`.

        Raises:
            UnknownAlgorithmError: no such name.
            TypeError: the algorithm has no such option, or one that it needs is missing.
        """
        algorithm = self.get(name)
        _check_options(name, algorithm, options)
        return algorithm(**options)

    def name_of(self, algorithm: Callable[..., Algorithm]) -> str | None:
        """The name under which it is registered."""
        return next((name for name, (registered, _) in self._entries.items() if registered is algorithm), None)

    def description(self, name: str) -> str | None:
        """One line about the algorithm, if it was registered with one.

        Raises:
            UnknownAlgorithmError: no such name.
        """
        self.get(name)
        return self._entries[name][1]

    def available_algorithms(self) -> list[str]:
        """All names, sorted."""
        return sorted(self._entries)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self.available_algorithms())

    def __str__(self) -> str:
        return f"Registered Algorithms: {', '.join(self.available_algorithms())}"


GlobalAlgorithmRegistry = AlgorithmRegistry()


def resolve_algorithm(
    algorithm: str | Algorithm, optimizers: Sequence[torch.optim.Optimizer] = (), **options: Any
) -> Algorithm:
    """The Algorithm that an argument `algorithm` stands for.

    Args:
        algorithm: The name of a registered algorithm, or an Algorithm, which is returned as it is.
        optimizers: The module's optimizers. Some algorithms take an option from them (`Algorithm.options_from`).
        **options: Options of the algorithm, if it is given by name.

    Raises:
        UnknownAlgorithmError: No algorithm of this name is registered. It is a ValueError.
        ValueError: The algorithm needs other optimizers, or cannot have an option's value.
        TypeError: `algorithm` is something else, or the algorithm has no such option.
    """
    if isinstance(algorithm, str):
        make = GlobalAlgorithmRegistry.get(algorithm)
        if hasattr(make, "options_from"):  # what is registered may also be a function
            options = {**make.options_from(optimizers), **options}
        return GlobalAlgorithmRegistry.make(algorithm, **options)
    if isinstance(algorithm, type):
        raise TypeError(f"algorithm is the class {algorithm.__name__}. Pass an instance: {algorithm.__name__}().")
    if not callable(getattr(algorithm, "reify", None)):
        raise TypeError(
            f"algorithm is {algorithm!r}, which is not an Algorithm. Pass a name, for example 'gradient_allreduce', or"
            " an Algorithm."
        )
    return algorithm


def allowed_algorithms(algorithm: Algorithm, allow: Sequence[str | Algorithm]) -> list[Algorithm]:
    """What `with_bagua(..., allow=...)` names. Those given by name sum where `algorithm` sums, and average where it
    averages.

    Raises:
        UnknownAlgorithmError: an unknown name; names the nearest one and all that are registered.
        TypeError: `allow` is no list, has something else than names and algorithms, or an algorithm that needs options.
    """
    if isinstance(allow, str) or not isinstance(allow, Sequence):
        raise TypeError(f"allow is {allow!r}. Pass a list: ['bytegrad'].")
    found = []
    for one in allow:
        if isinstance(one, str):
            known = inspect.signature(GlobalAlgorithmRegistry.get(one)).parameters
            is_sum = "average" in known and getattr(algorithm, "average", True) is False
            found.append(GlobalAlgorithmRegistry.make(one, **({"average": False} if is_sum else {})))
        elif not isinstance(one, type) and callable(getattr(one, "reify", None)):
            found.append(one)
        else:
            raise TypeError(f"allow contains {one!r}. Each must be a name, or an Algorithm.")
    return found


def _check_options(name: str, algorithm: Callable[..., Algorithm], options: Mapping[str, Any]) -> None:
    # The errors are those of `AlgorithmRegistry.make`.
    parameters = inspect.signature(algorithm).parameters
    if any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
        return
    has = f"Options of {name}: {', '.join(parameters) or 'none'}."
    for option in options:
        if option not in parameters:
            raise TypeError(f"{name} has no option {option!r}.{_nearest(option, list(parameters))} {has}")
    for one in parameters.values():
        if one.default is one.empty and one.kind is not one.VAR_POSITIONAL and one.name not in options:
            raise TypeError(f"{name} needs the option {one.name!r}. {has}")


def _nearest(name: object, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(str(name), known, n=1)
    return f" Did you mean {near[0]!r}?" if near else ""
