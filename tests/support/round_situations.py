"""Rounds of decentralized training that are not one forward, one backward and one step: what is the same for all such
algorithms. Each takes a job after a round that is as all are, and checks what it did.
"""

from __future__ import annotations

from typing import Any

import torch
from support.replicas import SideBySide, loss_of, train_step
from torch import Tensor, nn


def finish(job: SideBySide, what: str) -> None:
    """Steps after backward passes on both sides, and compares."""
    job.step()
    job.reference.update()
    job.check(what)


def accumulation(job: SideBySide) -> None:
    """In no_sync all gradients are those of the same weights, and there is one exchange."""
    for _ in range(4):
        job.zero_grad()
        passes = [job.data() for _ in range(3)]
        with job.engine.no_sync():
            for data in passes[:2]:
                job.loss(data).backward()
        job.loss(passes[2]).backward()
        for data in passes:
            job.reference.backward(data)
        finish(job, "three passes")


def local_steps(job: SideBySide) -> None:
    """All of it in no_sync: nothing is exchanged, and nothing is counted. The next exchange tells the neighbors."""
    with job.engine.no_sync():
        for _ in range(3):
            data = job.data()
            train_step(job.model, job.optimizers, data[job.rank])
            job.reference.round(data, exchange=False)
            job.reference.check(job.net, job.rank, "a local step")


def two_losses(job: SideBySide) -> None:
    for _ in range(3):
        job.zero_grad()
        data = job.data()
        loss = job.loss(data)
        loss.backward(retain_graph=True)
        (2 * loss).backward()
        for scale in (1, 2):
            for net, batch in zip(job.reference.nets, data, strict=True):
                (scale * loss_of(net, batch)).backward()
        finish(job, "two losses")


def gradient_penalty(job: SideBySide) -> None:
    """With a forward pass after the inner backward pass."""

    def penalised(net: Any, batch: Any) -> Tensor:
        x = batch[0].clone().requires_grad_()
        output = net(x)
        (gradient,) = torch.autograd.grad(output.square().sum(), x, create_graph=True)
        return nn.functional.mse_loss(output + net(batch[0]), batch[1]) + gradient.square().mean()

    for _ in range(3):
        job.zero_grad()
        data = job.data()
        penalised(job.model, data[job.rank]).backward()
        for net, batch in zip(job.reference.nets, data, strict=True):
            penalised(net, batch).backward()
        finish(job, "gradient penalty")


def forward_without_backward(job: SideBySide) -> None:
    """An exchange that a forward pass begins waits for the round."""
    data = job.data()
    job.loss(data)
    job.normal_round("after a forward pass alone")
    with torch.no_grad():
        job.loss(data)
    job.model.eval()
    job.loss(data)
    job.model.train()
    job.normal_round("after forward passes without gradients")
    job.loss(data)
    job.loss(data)
    job.normal_round("after two forward passes alone")


def skipped_steps(job: SideBySide) -> None:
    """A GradScaler skips the steps of one rank: all still exchange equally often, with the next forward pass at the
    latest."""
    scaler = torch.amp.GradScaler(job.device.type, init_scale=4.0, growth_interval=1000)
    for number in range(6):
        data = job.data()
        skip = {number % 3} & {0, 1} if number else {0, 1}
        job.zero_grad()
        scaler.scale(job.loss(data)).backward()
        if job.rank in skip:
            for parameter in job.net.parameters():
                parameter.grad.view(-1)[0] = torch.inf
        for optimizer in job.optimizers:
            scaler.step(optimizer)
        scaler.update()
        with torch.no_grad():
            job.loss(data)
        job.reference.round(data, skip=tuple(skip))
        job.check(f"round {number}, skipped on {skip}")


def closures(job: SideBySide) -> None:
    for _ in range(3):
        data = job.data()

        def closure(data: Any = data) -> Tensor:
            job.net.zero_grad()
            loss = job.loss(data)
            loss.backward()
            return loss

        (optimizer,) = job.optimizers
        optimizer.step(closure)
        job.reference.round(data)
        job.check("closure")


def clipping(job: SideBySide) -> None:
    for _ in range(3):
        data = job.data()
        job.zero_grad()
        job.loss(data).backward()
        job.reference.backward(data)
        for net in (job.net, *job.reference.nets):
            nn.utils.clip_grad_norm_(net.parameters(), 0.01)
        finish(job, "clipped")


SITUATIONS = (
    accumulation,
    local_steps,
    two_losses,
    gradient_penalty,
    forward_without_backward,
    skipped_steps,
    closures,
    clipping,
)
