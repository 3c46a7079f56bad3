"""What an algorithm is: a recipe that users construct (Algorithm), what it becomes for one module (AlgorithmImpl), and
algorithms by name (GlobalAlgorithmRegistry).

An algorithm decides which tensors are communicated, how they are grouped, when each is ready, and what is done with a
group that is. Everything else is the engine's (bagua.engine.training_steps), which calls the extension points below.
docs/how-to/train/write-an-algorithm.md shows how to write one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from bagua.codecs import Codec, codec_names, dtype_names
from bagua.collectives.process_group import BaguaProcessGroup
from bagua.collectives.tensor import Getter, Setter, ensure_record, gradient_of, set_gradient
from bagua.comm_ops.public_bucket import BaguaBucket
from bagua.engine.algorithm_facade import AlgorithmFacade
from bagua.engine.training_plan import no_hook
from bagua.misuse import check_flags, nearest


class AlgorithmImpl:
    """An algorithm at work for one module. The methods here are those of plain gradient communication without any
    operation: override what differs.

    Args:
        process_group: the ranks that train together.

    Attributes:
        added_to_state: names in `state_dict()` that states of earlier versions lack. `load_state_dict` may get a state
            without them.
    """

    added_to_state: Collection[str] = ()

    def __init__(self, process_group: BaguaProcessGroup) -> None:
        self.process_group = process_group

    @property
    def ranks_in_step(self) -> bool:
        """Whether all ranks make their passes together, so that what surrounds the algorithm may communicate in each of
        them: about unused parameters, and buffers. False where each rank trains at a pace of its own."""
        return True

    @property
    def keeps_replicas_equal(self) -> bool:
        """Whether parameters and optimizer states are the same on all ranks between two steps, so that a checkpoint of
        one rank is that of all. False where each rank has to save its own."""
        return True

    @property
    def keeps_parameters_equal(self) -> bool:
        """Whether parameters are the same on all ranks between two steps, so that each of them may be stepped on one
        rank for all. By default as `keeps_replicas_equal`."""
        return self.keeps_replicas_equal

    @property
    def phase(self) -> Hashable:
        """Of the algorithm: what it communicates and how. Asked before every forward pass in training whose backward
        pass may communicate; when it has changed, the methods below are called anew, and nothing is broadcast. It must
        change on all ranks at once."""
        return None

    @property
    def kept_in_plan(self) -> Collection[str] | None:
        """Of an algorithm that exchanges weights after they were trained: the names of parameters that are communicated
        though they may be frozen now. To freeze a parameter changes nothing then; the algorithm leaves it out
        by `bagua_ddp.communicate` when its last training was exchanged. None: what is trained is communicated as it is
        trained."""
        return None

    @property
    def may_change(self) -> bool:
        """Whether it communicates something else in some steps than in others: its class defines one of `phase`,
        `ranks_in_step` and `need_reset`. Then ranks cannot `join`."""
        return self.defines("phase", "ranks_in_step", "need_reset")

    @classmethod
    def defines(cls, *names: str) -> bool:
        """Whether the class has a method or a property of one of these names that is not this base class's."""
        return any(getattr(cls, name) is not getattr(AlgorithmImpl, name) for name in names)

    def need_reset(self) -> bool:
        """Asked before every forward pass. True: in training, everything is initialized again, parameters and optimizer
        states broadcast, and the methods below called anew."""
        return False

    def start_from_broadcast(self) -> None:
        """Called when everything is initialized, after the broadcast: all ranks have the same parameters and optimizer
        states. What was derived from others is to be forgotten. Nothing by default."""

    def init_tensors(self, bagua_ddp: AlgorithmFacade) -> list[Tensor]:
        """The Bagua tensors to communicate, in the order in which they are expected to become ready: by default the
        gradients of all parameters, the last first."""
        return communicated(bagua_ddp, gradient_of, set_gradient)

    def tensors_to_buckets(self, tensors: Sequence[Sequence[Tensor]], do_flatten: bool) -> Sequence[BaguaBucket]:
        """A bucket for each group of tensors, in launch order.

        Args:
            tensors: groups of one dtype and device each.
            do_flatten: whether effective tensors become views of their bucket.
        """
        return [BaguaBucket(group, str(number), do_flatten) for number, group in enumerate(tensors)]

    def init_operations(self, bagua_ddp: AlgorithmFacade, bucket: BaguaBucket) -> None:
        """Append the operations that communicate `bucket`."""

    def options_without_effect(self, bagua_ddp: AlgorithmFacade) -> list[str]:
        """Options that have no effect on this module and these ranks, each with the reason: rank 0 logs them when the
        module is wrapped. Called after the buckets are made. None by default."""
        return []

    def settle(self, bagua_ddp: AlgorithmFacade) -> None:
        """Called before each forward pass in training, before parameters that were frozen or unfrozen are looked for:
        what the last step owes takes effect. Nothing by default."""

    def init_forward_pre_hook(self, bagua_ddp: AlgorithmFacade) -> Callable[[Any], None]:
        """A function of the positional arguments, called before each forward pass in training, unless all parameters
        are frozen."""
        return no_hook

    def init_backward_hook(self, bagua_ddp: AlgorithmFacade) -> Callable[[str, Tensor], None]:
        """A function of name and parameter, called when the parameter's gradient is complete. By default it marks the
        parameter's tensor as ready."""
        return bagua_ddp.mark_ready

    def init_post_backward_hook(self, bagua_ddp: AlgorithmFacade) -> Callable[[], None]:
        """A function called at the end of each backward pass that accumulates gradients of parameters. By default it
        waits for what has been launched."""
        return bagua_ddp.scheduler.wait_pending_comm_ops

    def init_pre_optimizer_step_hook(self, bagua_ddp: AlgorithmFacade) -> Callable[[torch.optim.Optimizer], None]:
        """A function of the optimizer, called before its step: the last moment before parameters change."""
        return no_hook

    def init_post_optimizer_step_hook(self, bagua_ddp: AlgorithmFacade) -> Callable[[torch.optim.Optimizer], None]:
        """A function of the optimizer, called after its step."""
        return no_hook

    def finish(self, bagua_ddp: AlgorithmFacade) -> None:
        """Called before the buckets are taken away, because everything is initialized again, or the module wrapped
        again. By default it waits for what has been launched. May be called several times."""
        bagua_ddp.scheduler.wait_pending_comm_ops()

    def complete_exchange(self, bagua_ddp: AlgorithmFacade) -> None:
        """Called on every rank before a state is saved, or the module wrapped again by with_bagua: communicate now what
        this rank owes its peers. Nothing by default."""

    def state_dict(self) -> dict[str, Any]:
        """What the next steps depend on beside the states of module and optimizers: of this rank, to be saved with
        theirs. Nothing by default. Tensors in it may be those at work, as in a module's."""
        return {}

    def load_state_dict(self, bagua_ddp: AlgorithmFacade, state: Mapping[str, Any]) -> None:
        """Go on as the algorithm that gave `state` would. Called after the module was wrapped, with a state that has
        the names of this one's `state_dict()`, `added_to_state` excepted. Nothing by default.

        Raises:
            ValueError: the state does not fit the module.
        """


class Algorithm:
    """A recipe: options, without state. One object may serve several modules.

    Attributes:
        is_interchangeable: it communicates gradients alone and keeps nothing from one step to the next, so that
            training may change from it to another such algorithm, and back, between two steps. Not inherited: a
            class says it of itself.
        follows_regroup: it follows when the job goes on without a rank that it lost (bagua.torch_api.Regroup): it
            communicates gradients alone, and all that depends on the ranks is made with the buckets. Not inherited.
        weighs_batches: it averages over all ranks what is linear in their gradients, and in nothing else that differs
            by rank, so that each may multiply its part by a weight (bagua.engine.batch_weights); or it asks for that
            weight when it exchanges replicas. Not inherited.
    """

    is_interchangeable = False
    follows_regroup = False
    weighs_batches = False

    @property
    def public_name(self) -> str:
        """The name under which it is registered, or else that of its class."""
        return GlobalAlgorithmRegistry.name_of(type(self)) or type(self).__name__

    @property
    def label(self) -> str:
        """The same with the options that are not their defaults, for people: "bytegrad(hierarchical=False)"."""
        name = self.public_name
        parameters = inspect.signature(type(self)).parameters
        settings = self.shared_settings()
        options = [
            f"{option}={settings[option]!r}"
            for option, one in parameters.items()
            if option in settings and settings[option] != one.default
        ]
        return f"{name}({', '.join(options)})" if options else name

    def equivalents(self, process_group: BaguaProcessGroup) -> Sequence[Algorithm]:
        """Others with the same result for the ranks of this group, up to the order in which values are added: tuning
        may choose them without being told. None by default."""
        return []

    def allowed(self, allow: Sequence[str | Algorithm]) -> list[Algorithm]:
        """Those that `allow` names, for tuning that begins with this one; see `allowed_algorithms`."""
        return allowed_algorithms(self, allow)

    def shared_settings(self) -> Mapping[str, object]:
        """What has to be the same on all ranks, by name: compared when a module is wrapped. By default the arguments
        of the constructor, as far as they are plain values and kept under their names. Override it if some may differ
        by rank."""
        return {
            name: vars(self)[name]
            for name in inspect.signature(type(self)).parameters
            if isinstance(vars(self).get(name), bool | int | float | str)
        }

    def reify(self, process_group: BaguaProcessGroup) -> AlgorithmImpl:
        """The algorithm for one module.

        Raises:
            NotImplementedError: the class does not define it.
        """
        raise NotImplementedError(f"{type(self).__name__} does not say how it works: define reify(process_group)")

    @classmethod
    def init(cls, name: str, **arguments: Any) -> Algorithm:
        """The algorithm that is registered as `name`, constructed with `arguments`.

        Raises:
            UnknownAlgorithmError: no such name; names the nearest one and all that are registered.
            TypeError: the algorithm has no such option, or one that it needs is missing; names the nearest one and all
                that it has.
        """
        return GlobalAlgorithmRegistry.make(name, **arguments)

    @classmethod
    def options_from(cls, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, Any]:  # noqa: ARG003
        """Options that follow from the optimizers of a module, for an algorithm that is given by its name alone. None
        by default.

        Raises:
            ValueError: the algorithm needs other optimizers.
        """
        return {}


def communicated(
    bagua_ddp: AlgorithmFacade, getter: Getter | None = None, setter: Setter | None = None
) -> list[Tensor]:
    """All parameters as Bagua tensors, the last first. By default, what is communicated is their weights."""
    tensors: list[Tensor] = []
    for name, parameter in reversed(bagua_ddp.synchronized_parameters):
        ensure_record(parameter, name, bagua_ddp.bagua_module_name, getter, setter)
        tensors.append(parameter)
    return tensors


def idle_codec(option: str, codec: Codec | None, bagua_ddp: AlgorithmFacade) -> list[str]:
    """For `options_without_effect`: a codec that compresses no dtype of the parameters.

    Args:
        option: its name.
        codec: None: there is none.
    """
    found = {parameter.dtype for _, parameter in bagua_ddp.synchronized_parameters}
    if codec is None or not found.isdisjoint(codec.dtypes):
        return []
    why = f"parameters are {dtype_names(found)}, and it compresses {dtype_names(codec.dtypes)}"
    return [f"{option}={codec.name!r} has no effect: {why}"]


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
            listed = f"Known algorithms: {', '.join(known)}."
            if str(name).lower() in codec_names():
                raise UnknownAlgorithmError(
                    f"{name!r} is a codec, not an algorithm. Pass Algorithm.init('bytegrad', codec={name.lower()!r})."
                    f" {listed}"
                )
            raise UnknownAlgorithmError(f"Unknown algorithm {name!r}.{nearest(name, known)} {listed}")
        return self._entries[name][0]

    def make(self, name: str, **options: Any) -> Algorithm:
        """The algorithm of this name, constructed with `options`.

        Raises:
            UnknownAlgorithmError: no such name.
            TypeError: the algorithm has no such option, one that it needs is missing, or one that is to be True or
                False is something else.
        """
        algorithm = self.get(name)
        self._check_options(name, algorithm, options)
        return algorithm(**options)

    def _check_options(self, name: str, algorithm: Callable[..., Algorithm], options: Mapping[str, Any]) -> None:
        # The errors are those of `make`.
        parameters = inspect.signature(algorithm).parameters
        if any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
            return
        has = f"Options of {name}: {', '.join(parameters) or 'none'}."
        for option, value in options.items():
            if option not in parameters:
                near = nearest(option, list(parameters)) or self._others_with(name, option, value)
                raise TypeError(f"{name} has no option {option!r}.{near} {has}")
            if parameters[option].annotation in (bool, "bool"):
                check_flags(**{option: value})
        for one in parameters.values():
            if one.default is one.empty and one.kind is not one.VAR_POSITIONAL and one.name not in options:
                raise TypeError(f"{name} needs the option {one.name!r}. {has}")

    def _is_interchangeable(self, name: str) -> bool:
        return bool(vars(self._entries[name][0]).get("is_interchangeable", False))

    def _others_with(self, name: str, option: str, value: object) -> str:
        """For an error: the algorithms that have an option that `name` lacks."""
        others = [
            other for other in self if option in inspect.signature(self._entries[other][0]).parameters and other != name
        ]
        if not others:
            return ""
        # What was meant: a variant of the one that was asked for, or one that may take its place.
        variant = next((other for other in others if name in other), None)
        if variant is None and self._is_interchangeable(name):
            variant = next(filter(self._is_interchangeable, others), None)
        call = "" if variant is None else f": Algorithm.init({variant!r}, {option}={value!r}, ...)"
        return f" {', '.join(others)} {'has' if len(others) == 1 else 'have'} it{call}."

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
