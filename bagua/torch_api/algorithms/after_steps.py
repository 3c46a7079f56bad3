"""What algorithms have in common that exchange weights after steps of the optimizers: when a rank has made its step.

After a backward pass, a rank must take part in one exchange with its peers, a step. It is made when all listed
optimizers have stepped that step parameters which need a gradient in that pass; or else, because a GradScaler skipped a
step or only some of them were stepped, at the beginning of the next forward pass, or when the module is wrapped again
or its state is saved or loaded. So each rank makes as many steps as its peers, whatever its gradients are. Optimizers
that step in hooks of the backward pass have stepped at its end.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bagua.collectives.process_group import BaguaProcessGroup
from bagua.engine.algorithm_facade import AlgorithmFacade
from bagua.error_text import listed
from bagua.torch_api.algorithms.base import AlgorithmImpl, communicated
from bagua.torch_api.algorithms.rounds import Round, RoundEvent, RoundState, Unexchanged, steppers

_MOST_NAMES = 10  # that an error lists
# Of the first steps of a module, in so many no optimizer stepped: more than a GradScaler skips until it has a scale.
_FIRST_STEPS, _MOST_SKIPPED = 50, 24
_logger = logging.getLogger("bagua")


class ExchangeAfterSteps(AlgorithmImpl):
    """See the head of this file. `after_step` is what a subclass overrides."""

    keeps_replicas_equal = False
    added_to_state: Collection[str] = ("unexchanged", "names")

    def __init__(self, process_group: BaguaProcessGroup) -> None:
        super().__init__(process_group)
        self._round = Round()
        self._unexchanged = Unexchanged()
        # Positions among the listed optimizers: by the name of what they step, of those that step what was trained
        # since the last step of the rank, and of those that did.
        self._stepper_of: dict[str, int] = {}
        self._steppers: set[int] = set()
        self._stepped: set[int] = set()
        # Steps of the rank, and how many of them followed no step of an optimizer.
        self._made = self._skipped = 0

    def after_step(self, bagua_ddp: AlgorithmFacade) -> None:
        """The rank has made a step, and its peers make theirs. A subclass exchanges here. Nothing by default."""

    def init_tensors(self, bagua_ddp: AlgorithmFacade) -> list[Tensor]:
        self._stepped.clear()
        self._find_steppers(bagua_ddp)
        return communicated(bagua_ddp)

    def _find_steppers(self, bagua_ddp: AlgorithmFacade) -> None:
        stepper_of = steppers(bagua_ddp)
        named = bagua_ddp.synchronized_parameters
        missing = [name for name, parameter in named if id(parameter) not in stepper_of]
        if missing:
            raise RuntimeError(
                f"{len(missing)} of {len(named)} parameters are in no optimizer that was given:"
                f" {listed(missing, _MOST_NAMES)}.\n"
                "This algorithm exchanges weights after the steps of the optimizers that the module was wrapped with.\n"
                "Pass the optimizers that step these parameters, freeze them (requires_grad_(False)), or put their"
                " names into the module's _bagua_params_and_buffers_to_ignore."
            )
        self._stepper_of = {name: stepper_of[id(parameter)] for name, parameter in named}

    def note_backward(self, trained: Collection[str]) -> None:
        """A backward pass is over of which no hook tells: whoever makes the gradients has hooks of its own.

        Args:
            trained: names of what it has trained.
        """
        if not self._round.is_due:
            self._round.note_gradient("", None)
            self._round.end_pass()
            self._unexchanged.note(trained)
            self._steppers.update(self._stepper_of[name] for name in trained)

    def init_backward_hook(self, bagua_ddp: AlgorithmFacade) -> Callable[[str, Tensor], None]:
        return self._round.note_gradient

    def init_post_backward_hook(self, bagua_ddp: AlgorithmFacade) -> Callable[[], None]:
        def end_pass() -> None:
            if self._round.end_pass():
                names = self._unexchanged.note_trained(bagua_ddp.synchronized_parameters)
                self._steppers.update(map(self._stepper_of.__getitem__, names))

        return end_pass

    def init_post_optimizer_step_hook(self, bagua_ddp: AlgorithmFacade) -> Callable[[torch.optim.Optimizer], None]:
        def note_step(optimizer: torch.optim.Optimizer) -> None:
            if self._round.is_due:
                self._stepped.add(next(i for i, one in enumerate(bagua_ddp.bagua_optimizers) if one is optimizer))
                if self._stepped >= self._steppers:
                    self._make_step(bagua_ddp)

        return note_step

    def settle(self, bagua_ddp: AlgorithmFacade) -> None:
        self._make_step_if_due(bagua_ddp)

    @torch.inference_mode(False)  # what an outer optimizer makes here is used in later steps
    def _make_step(self, bagua_ddp: AlgorithmFacade) -> None:
        self._round.on(RoundEvent.EXCHANGED)
        self._stepped.clear()
        self._steppers.clear()
        self._made += 1
        if self._made == _FIRST_STEPS and self._skipped > _MOST_SKIPPED:
            self._tell_of_accumulation(bagua_ddp.bagua_module_name)
        self.after_step(bagua_ddp)

    def _tell_of_accumulation(self, module_name: str) -> None:
        if dist.get_rank() == self.process_group.ranks[0]:
            _logger.warning(
                f"After {self._skipped} of the first {_FIRST_STEPS} backward passes of {module_name}, none of its"
                " optimizers stepped; each pass counts as a step.\n"
                "If it accumulates gradients, run all passes but the last of a step in no_sync()."
            )

    def _make_step_if_due(self, bagua_ddp: AlgorithmFacade) -> None:
        if self._round.is_due:
            self._skipped += not self._stepped
            self._make_step(bagua_ddp)

    def finish(self, bagua_ddp: AlgorithmFacade) -> None:
        self.complete_exchange(bagua_ddp)

    def complete_exchange(self, bagua_ddp: AlgorithmFacade) -> None:
        """A rank that skipped a step makes its exchange: its peers wait for it in theirs. They would not make it again
        after loading what they save then."""
        if self.process_group.is_alive:  # otherwise torch was shut down, and there are no peers
            self._make_step_if_due(bagua_ddp)

    def state_dict(self) -> dict[str, Any]:
        return {
            "round": self._round.state.name,
            "stepped": sorted(self._stepped),
            "unexchanged": self._unexchanged.saved,
        }

    @torch.no_grad()
    def make_step_before_load(self, bagua_ddp: AlgorithmFacade) -> None:
        """Peers that stepped may be waiting. The weights of a state were loaded already, and stay."""
        if self._round.is_due:
            weights: list[Tensor] = [parameter for _, parameter in bagua_ddp.synchronized_parameters]
            loaded = [weight.clone() for weight in weights]
            self._make_step(bagua_ddp)
            torch._foreach_copy_(weights, loaded)

    def load_state_dict(self, bagua_ddp: AlgorithmFacade, state: Mapping[str, Any]) -> None:
        self._round.state = RoundState[state["round"]]
        self._stepped = set(state["stepped"])
        self._steppers = set(self._stepper_of.values()) if self._round.is_due else set()
        # An earlier version kept in its plan what was trained alone.
        named = bagua_ddp.synchronized_parameters
        self._unexchanged.load(state.get("unexchanged", [name for name, _ in named]))
