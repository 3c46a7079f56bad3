"""Errors of calls and imports that cannot work, with those that would. Knows nothing of torch."""

from __future__ import annotations

import difflib
import functools
import importlib
import importlib.util
import inspect
import numbers
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def nearest(name: object, known: Sequence[str]) -> str:
    """A question to append to an error, with the one of `known` that was probably meant; "" if none is near."""
    near = difflib.get_close_matches(str(name), known, n=1)
    return f" Did you mean {near[0]!r}?" if near else ""


def shown(value: object) -> str:
    """A value that has the wrong type, for an error: "'sgd'", "a list", "the class SGD"."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    return repr(value) if isinstance(value, str | int | float | None) else f"a {type(value).__name__}"


def check_flags(**flags: object) -> None:
    """
    Args:
        **flags: by name. 0, 1 and those of numpy and torch are flags, too.

    Raises:
        TypeError: one is neither True nor False: "no" would count as True.
    """
    for name, value in flags.items():
        plain: object = value.item() if getattr(value, "shape", None) == () else value  # type: ignore[attr-defined]
        if not isinstance(plain, int) or plain not in (0, 1):
            raise TypeError(f"{name} is {shown(value)}. Pass True or False.")


def check_given_flags(**flags: object) -> None:
    """As `check_flags`, of those that are not None.

    Raises:
        TypeError: as there.
    """
    check_flags(**{name: value for name, value in flags.items() if value is not None})


def check_integers(**integers: object) -> None:
    """
    Args:
        **integers: by name, of Python or numpy.

    Raises:
        TypeError: one is something else, such as 8.0 or "8".
    """
    for name, value in integers.items():
        if isinstance(value, bool) or not isinstance(value, numbers.Integral):
            raise TypeError(f"{name} is {shown(value)}. Pass an integer.")


def missing_torch(module: str) -> ModuleNotFoundError | None:
    """The error of a module that needs torch, with what to install; None: torch is there."""
    if importlib.util.find_spec("torch") is not None:
        return None
    return ModuleNotFoundError(
        f"{module} needs torch, which is not installed.\n"
        "Install it in this environment: pip install torch. In a checkout of Bagua: pip install '.[torch]'.",
        name="torch",
    )


def explains_calls(right: str, **instead: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """For a function that people call as they would call another library's: the TypeError of a call that does not fit
    its signature also says what does. No argument changes its meaning.

    Args:
        right: a sentence with the right call.
        **instead: for a keyword of other libraries, a sentence that says what to do here.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return function(*args, **kwargs)
            except TypeError as error:
                # A frame below this one: the call did fit.
                if error.__traceback__ is None or error.__traceback__.tb_next is not None:
                    raise
                raise TypeError(_explained(str(error), function, kwargs, right, instead)) from None

        return checked

    return decorate


def _explained(
    error: str, function: Callable[..., object], keywords: Iterable[str], right: str, instead: dict[str, str]
) -> str:
    known = list(inspect.signature(function).parameters)
    unknown = next((name for name in keywords if name not in known), None)
    if unknown is None:
        return f"{error}.\n{right}"
    if unknown in instead:
        return f"{error}.\n{instead[unknown]}"
    # Newer versions of Python ask by themselves.
    meant = "" if "Did you mean" in error else "." + nearest(unknown, known)
    return f"{error}{meant}\n{right}"


def import_optional(package: str, purpose: str) -> Any:
    """
    Args:
        purpose: what needs it, e.g. "backend='lmdb'".

    Raises:
        ModuleNotFoundError: it is not installed.
    """
    name = package.split(".")[0]
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise ModuleNotFoundError(
            f"{purpose} needs the package {name}, which is not installed.\nInstall it: pip install {name}",
            name=package,
        ) from None
