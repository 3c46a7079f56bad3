"""All runs of all backends: round by round, each round beginning with another backend."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from bagua.net.bench.nccl_ab.backend import Backend
from bagua.net.bench.nccl_ab.log import NetworkProof, network_error
from ddp_comparison.training_run import RunError, Training, train_once


class Trainer(Protocol):
    def __call__(
        self,
        backend: Backend,
        round_number: int,
        arguments: argparse.Namespace,
        inherited: Mapping[str, str],
        *,
        timeout_s: float,
    ) -> Training: ...


@dataclass
class Rounds:
    """What ended well, and what did not."""

    trainings: list[Training] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def run_rounds(
    arguments: argparse.Namespace, train: Trainer = train_once, clock: Callable[[], float] = time.monotonic
) -> Rounds:
    """A backend that fails is left out from then on, and reported."""
    backends: list[Backend] = arguments.backends
    deadline = clock() + arguments.time_limit
    rounds = Rounds()
    failed: set[str] = set()
    longest = 0.0
    for number in range(arguments.rounds):
        began = clock()
        # A round that would be cut short had backends with a run more than others.
        if number and longest > deadline - began:
            rounds.notes.append(
                f"{number} of {arguments.rounds} rounds ran: another needs {longest:.0f} s, and of --time-limit"
                f" {arguments.time_limit:g} s {max(0.0, deadline - began):.0f} are left"
            )
            break
        for place in range(len(backends)):
            backend = backends[(place + number) % len(backends)]
            if backend.name in failed:
                continue
            remaining = deadline - clock()
            if remaining <= 0:
                rounds.errors.append(
                    f"--time-limit {arguments.time_limit:g} s: round {number} of {backend.name} not run"
                )
                continue
            timeout_s = min(arguments.run_timeout, remaining)
            try:
                training = train(backend, number, arguments, os.environ, timeout_s=timeout_s)
            except RunError as error:
                rounds.errors.append(str(error))
                failed.add(backend.name)
                continue
            print(
                f"round {number} {backend.name}: median step {training.step_ms:.2f} ms, loss"
                f" {training.losses[0]:.6f} -> {training.losses[-1]:.6f}, {training.wall_seconds:.0f} s in all",
                flush=True,
            )
            rounds.trainings.append(training)
            rounds.errors += _faults(training, backend, arguments)
        longest = max(longest, clock() - began)
    return rounds


def _faults(training: Training, backend: Backend, arguments: argparse.Namespace) -> list[str]:
    faults = []
    if not training.replicas_agree:
        faults.append(f"{backend.name}, round {training.round}: the ranks ended with different parameters")
    if arguments.backend != "gloo":
        proofs: list[NetworkProof | None] = [*training.proofs]
        proofs += [None] * (arguments.nproc_per_node - len(proofs))
        if error := network_error(backend.name, backend.network, proofs):
            faults.append(error)
    return faults
