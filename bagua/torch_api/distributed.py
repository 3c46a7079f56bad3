"""BaguaModule: what Bagua gives to every torch.nn.Module, `with_bagua` first of all.

Importing this module (`import bagua.torch_api` does) puts the members of BaguaModule on torch.nn.Module. A module's own
attributes of the same names win over them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import nn

from bagua.engine.bucket import Bucket
from bagua.engine.data_parallel import DataParallelEngine
from bagua.regroup.job_step import WorldChange
from bagua.torch_api.wrapping import with_bagua

if TYPE_CHECKING:
    from bagua.torch_api.algorithms.base import AlgorithmImpl


_KEPT_APART = ("_parameters", "_buffers", "_modules")


class _OfEngine:
    """Reads an attribute of the module's engine. It has no `__set__`, so that a module's own attribute wins."""

    def __init__(self, read: Callable[[DataParallelEngine], Any]) -> None:
        self._read = read
        self.__doc__ = read.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, module: None, owner: type) -> _OfEngine: ...
    @overload
    def __get__(self, module: Any, owner: type) -> Any: ...
    def __get__(self, module: Any, owner: type) -> Any:
        if module is None:
            return self
        # nn.Module keeps these where only its __getattr__ looks, which comes after this.
        for kept in _KEPT_APART:
            if self._name in module.__dict__.get(kept, ()):
                return module.__dict__[kept][self._name]
        engine = module.__dict__.get("bagua_ddp")
        if engine is not None:
            return self._read(engine)
        raise AttributeError(f"{type(module).__name__} has no {self._name}: call its with_bagua(...) first")


class BaguaModule:
    """Data parallelism for torch.nn.Module. Never constructed: these are members of nn.Module.

    `model.with_bagua(optimizers, ...)` is the function `bagua.torch_api.with_bagua(model, optimizers, ...)`. After it,
    `bagua_ddp` is the module's engine (bagua.engine.data_parallel).
    """

    with_bagua = with_bagua

    def bagua_build_params(self) -> list[tuple[str, nn.Parameter]]:
        """(name, parameter) of all that are synchronized, in the module's order."""
        engine: DataParallelEngine = _engine(self)
        return engine.bagua_build_params()

    @_OfEngine
    def bagua_module_name(engine: DataParallelEngine) -> str:  # noqa: N805
        """The name by which the ranks know this module. May be set before with_bagua."""
        return engine.bagua_module_name

    @_OfEngine
    def bagua_algorithm(engine: DataParallelEngine) -> AlgorithmImpl:  # noqa: N805
        """The algorithm at work."""
        algorithm: AlgorithmImpl = engine.bagua_algorithm
        return algorithm

    @_OfEngine
    def bagua_optimizers(engine: DataParallelEngine) -> list[torch.optim.Optimizer]:  # noqa: N805
        """The optimizers given to with_bagua."""
        return engine.bagua_optimizers

    @_OfEngine
    def bagua_buckets(engine: DataParallelEngine) -> list[Bucket]:  # noqa: N805
        """The buckets, in launch order."""
        return engine.bagua_buckets

    @_OfEngine
    def parameters_to_ignore(engine: DataParallelEngine) -> list[str]:  # noqa: N805
        """Names of parameters that are not synchronized."""
        return engine.parameters_to_ignore

    @_OfEngine
    def bagua_train_step_counter(engine: DataParallelEngine) -> int:  # noqa: N805
        """Forward passes in training so far."""
        return engine.bagua_train_step_counter

    @_OfEngine
    def step_was_dropped(engine: DataParallelEngine) -> bool:  # noqa: N805
        """Whether the last step was dropped, because the job has lost a rank (bagua.torch_api.Regroup)."""
        return engine.step_was_dropped

    @_OfEngine
    def set_batch_weight(engine: DataParallelEngine) -> Callable[[float], None]:  # noqa: N805
        """`set_batch_weight(n)`: what this rank's batch counts for in the next backward pass."""
        return engine.set_batch_weight

    @_OfEngine
    def on_regroup(engine: DataParallelEngine) -> Callable[[Callable[[WorldChange], object]], None]:  # noqa: N805
        """`on_regroup(callback)`: call it each time that the job has lost ranks, or that ranks have joined."""
        return engine.on_regroup


def _engine(module: Any) -> DataParallelEngine:
    engine: DataParallelEngine | None = module.__dict__.get("bagua_ddp")
    if engine is None:
        raise RuntimeError(f"{type(module).__name__} is not wrapped. Call its with_bagua(...) first.")
    return engine


def _give_to_torch_module() -> None:
    for name, member in vars(BaguaModule).items():
        if not name.startswith("__"):
            setattr(nn.Module, name, member)
    list_names = nn.Module.__dir__

    def names_that_can_be_read(module: nn.Module) -> list[str]:
        """torch.compile reads all that `dir` names of modules that it makes itself."""
        names: list[str] = list_names(module)  # type: ignore[no-untyped-call]
        own = {*module.__dict__, *(name for kept in _KEPT_APART for name in module.__dict__.get(kept, ()))}
        if "bagua_ddp" in own:
            return names
        kind = type(module)
        return [name for name in names if name in own or not isinstance(getattr(kind, name, None), _OfEngine)]

    nn.Module.__dir__ = names_that_can_be_read  # type: ignore[method-assign]


_give_to_torch_module()
