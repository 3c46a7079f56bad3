"""BaguaModule: what Bagua gives to every torch.nn.Module, `with_bagua` first of all.

Importing this module (`import bagua.torch_api` does) puts the members of BaguaModule on torch.nn.Module. A module's own
attributes of the same names win over them.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, overload

import torch
import torch.distributed as dist
from torch import nn

from bagua.collectives.process_group import BaguaProcessGroup, to_bagua_process_group
from bagua.engine.bucket_plan import FIRST_BUCKET_BYTES
from bagua.engine.data_parallel import BaguaDistributedDataParallel
from bagua.engine.gradient_owners import engines_by_name, watch_torch_ddp
from bagua.env import read_text
from bagua.torch_api.algorithms.base import allowed_algorithms
from bagua.torch_api.env import get_autotune_level, get_default_bucket_size
from bagua.torch_api.wrap_summary import configure_logging, log_wrap

if TYPE_CHECKING:
    from bagua.engine.bucket import Bucket
    from bagua.torch_api.algorithms.base import Algorithm, AlgorithmImpl


_KEPT_APART = ("_parameters", "_buffers", "_modules")


class _OfEngine:
    """Reads an attribute of the module's engine. It has no `__set__`, so that a module's own attribute wins."""

    def __init__(self, read: Callable[[BaguaDistributedDataParallel], Any]) -> None:
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

    After `with_bagua`, `bagua_ddp` is the module's engine (bagua.engine.data_parallel).
    """

    def with_bagua(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        algorithm: Algorithm,
        process_group: BaguaProcessGroup | dist.ProcessGroup | None = None,
        do_flatten: bool = True,
        *,
        autotune: bool | None = None,
        allow: Sequence[str | Algorithm] = (),
    ) -> Any:
        """Train this module in parallel with the same module of the other ranks.

        Parameters and optimizer states are broadcast from group rank 0. From then on `forward`, `backward` and
        `step` of the listed optimizers communicate as `algorithm` says. Called again, it replaces what the last call
        set up.

        Args:
            optimizers: all that step parameters of this module; at least one.
            algorithm: what is communicated, and when; see bagua.torch_api.algorithms.
            process_group: Bagua's or torch's; None: the default group.
            do_flatten: what is communicated lies in the memory of its bucket, which saves copies.
            autotune: find the fastest way to communicate with the same results in the first steps; None: if
                BAGUA_AUTOTUNE is 1 or more.
            allow: algorithms that tuning may choose although results differ, by name or constructed:
                ["gradient_allreduce", "bytegrad"].

        Returns:
            This same module.

        Raises:
            RuntimeError: no process group is initialized, or the ranks' modules or optimizers differ.
            TypeError: `optimizers` is not a list of optimizers, `algorithm` is not an Algorithm, or `allow` not a list
                of names and Algorithms.
            KeyError: `allow` has a name that is not registered.
            ValueError: `optimizers` is empty, there is nothing to train, the state of an optimizer cannot be
                synchronized (LBFGS), or training cannot change to an algorithm of `allow`.
        """
        module: nn.Module = self  # type: ignore[assignment]
        engine_arguments = check_arguments(optimizers, algorithm)
        allowed = allowed_algorithms(algorithm, allow)
        group = to_bagua_process_group(process_group)
        configure_logging()  # before anything is sent: what it refuses, one rank alone may have in its environment
        previous: BaguaDistributedDataParallel | None = module.__dict__.get("bagua_ddp")

        def replace_previous() -> None:
            if not engine_arguments:  # only now: the ranks have compared their lists, so that all of them raise
                raise ValueError(
                    "optimizers is empty.\n"
                    f"with_bagua() on {type(module).__name__} needs every optimizer that steps its parameters, to"
                    " broadcast its state and to communicate around its steps.\n"
                    "Pass them: model.with_bagua([optimizer], algorithm)."
                )
            if previous is not None:
                module.__dict__.pop("bagua_ddp", None)
                previous.detach()

        if previous is not None:
            previous.wait_pending_comm_ops()
            # Before the ranks compare anything: those that do not owe an exchange may be waiting for it.
            previous.bagua_algorithm.complete_exchange(previous)
        _warn_of_same_name(module)
        bucket_bytes, first_bucket_bytes = _bucket_limits()
        engine = BaguaDistributedDataParallel(
            module,
            engine_arguments,
            algorithm,
            group,
            bagua_module_name=module.__dict__.get("bagua_module_name"),
            gradient_as_bucket_view=do_flatten,
            bucket_bytes=bucket_bytes,
            first_bucket_bytes=first_bucket_bytes,
            autotune=get_autotune_level() > 0 if autotune is None else autotune,
            allow=allowed,
            once_compared=replace_previous,
        )
        module.__dict__["bagua_ddp"] = engine
        log_wrap(engine)
        return self

    def bagua_build_params(self) -> list[tuple[str, nn.Parameter]]:
        """(name, parameter) of all that are synchronized, in the module's order."""
        engine: BaguaDistributedDataParallel = _engine(self)
        return engine.bagua_build_params()

    @_OfEngine
    def bagua_module_name(engine: BaguaDistributedDataParallel) -> str:  # noqa: N805
        """The name by which the ranks know this module. May be set before with_bagua."""
        return engine.bagua_module_name

    @_OfEngine
    def bagua_algorithm(engine: BaguaDistributedDataParallel) -> AlgorithmImpl:  # noqa: N805
        """The algorithm at work."""
        algorithm: AlgorithmImpl = engine.bagua_algorithm
        return algorithm

    @_OfEngine
    def bagua_optimizers(engine: BaguaDistributedDataParallel) -> list[torch.optim.Optimizer]:  # noqa: N805
        """The optimizers given to with_bagua."""
        return engine.bagua_optimizers

    @_OfEngine
    def bagua_buckets(engine: BaguaDistributedDataParallel) -> list[Bucket]:  # noqa: N805
        """The buckets, in launch order."""
        return engine.bagua_buckets

    @_OfEngine
    def parameters_to_ignore(engine: BaguaDistributedDataParallel) -> list[str]:  # noqa: N805
        """Names of parameters that are not synchronized."""
        return engine.parameters_to_ignore

    @_OfEngine
    def bagua_train_step_counter(engine: BaguaDistributedDataParallel) -> int:  # noqa: N805
        """Forward passes in training so far."""
        return engine.bagua_train_step_counter


def check_arguments(optimizers: Sequence[torch.optim.Optimizer], algorithm: Any) -> list[torch.optim.Optimizer]:
    """The optimizers as a list.

    Raises:
        TypeError: what is no list of optimizers, or no algorithm.
    """
    if isinstance(optimizers, torch.optim.Optimizer):
        raise TypeError(f"optimizers is a single {type(optimizers).__name__}. Pass a list: [optimizer].")
    if not isinstance(optimizers, Iterable):
        raise TypeError(f"optimizers is {optimizers!r}. Pass a list: [optimizer].")
    given = list(optimizers)
    for one in given:
        if not isinstance(one, torch.optim.Optimizer):
            raise TypeError(f"optimizers contains a {type(one).__name__}. Each must be a torch.optim.Optimizer.")
    if isinstance(algorithm, str):
        raise TypeError(f"algorithm is the string {algorithm!r}. Pass Algorithm.init({algorithm!r}).")
    if isinstance(algorithm, type):
        raise TypeError(f"algorithm is the class {algorithm.__name__}. Pass an instance: {algorithm.__name__}().")
    if not callable(getattr(algorithm, "reify", None)):
        raise TypeError(
            f"algorithm is {algorithm!r}, which is not an Algorithm."
            " Pass one, for example Algorithm.init('gradient_allreduce')."
        )
    return given


def _warn_of_same_name(module: nn.Module) -> None:
    name = module.__dict__.get("bagua_module_name")
    other = None if name is None else engines_by_name.get(name)
    # No error: a module that nobody uses any more may not have been collected yet.
    if other is not None and other.is_attached and other.module is not module:
        warnings.warn(
            f"Another wrapped module also has the bagua_module_name {name!r}; get_backend({name!r}) now returns this"
            " module's. Give each module a name of its own.",
            stacklevel=3,
        )


def _bucket_limits() -> tuple[int | None, int | None]:
    """Of all buckets, and of the first: the user's, if BAGUA_DEFAULT_BUCKET_SIZE is set; else the engine's."""
    if read_text(os.environ, "BAGUA_DEFAULT_BUCKET_SIZE") is None:
        return None, FIRST_BUCKET_BYTES
    return get_default_bucket_size(), None


def _engine(module: Any) -> BaguaDistributedDataParallel:
    engine: BaguaDistributedDataParallel | None = module.__dict__.get("bagua_ddp")
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
watch_torch_ddp()
