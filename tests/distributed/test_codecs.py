"""Every algorithm and hook that compresses, with every codec."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from support.ranks import run_ranks
from support.training import (
    batches,
    begin,
    check_ranks_equal,
    check_tensor_on_ranks,
    loss_of,
    message_of,
    mlp,
    torch_ddp,
)

import bagua.torch_api  # noqa: F401 (with_bagua)
from bagua.codecs import codec_names, get_codec
from bagua.comm_hooks import ByteGradState, ErrorFeedbackState, bytegrad, error_feedback_bytegrad
from bagua.torch_api.algorithms import Algorithm


def _trained(codec: str, name: str, rank: int, device: torch.device) -> Any:
    model: Any = mlp(0, device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    model = model.with_bagua([optimizer], Algorithm.init(name, hierarchical=False, codec=codec))
    for batch in batches(rank, 3, device):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
    return model


def _every_codec() -> None:
    rank, device = begin()
    for codec in codec_names():
        check_ranks_equal(_trained(codec, "bytegrad", rank, device), f"bytegrad with {codec}")
        for parameter in _trained(codec, "low_precision_decentralized", rank, device).parameters():
            assert parameter.isfinite().all()
        for state, hook in ((ByteGradState, bytegrad), (ErrorFeedbackState, error_feedback_bytegrad)):
            model = torch_ddp(mlp(0, device))
            model.register_comm_hook(state(codec=codec), hook)
            plain = mlp(0, device)
            batch = batches(rank, 1, device)[0]
            loss_of(model, batch).backward()
            loss_of(plain, batch).backward()
            for got, alone in zip(model.parameters(), plain.parameters(), strict=True):
                assert got.grad is not None
                assert alone.grad is not None
                check_tensor_on_ranks(got.grad, f"{hook.__name__} with {codec}")
                dist.all_reduce(alone.grad)
                assert float((got.grad - alone.grad / 2).abs().max()) < 0.2 * float(alone.grad.abs().max()) + 0.02


def test_two_ranks_train_with_every_codec() -> None:
    run_ranks(2, _every_codec, reuse=True, timeout=120)


def _refused() -> None:
    rank, device = begin()
    for name in ("bytegrad", "low_precision_decentralized"):
        text = message_of(ValueError, lambda name=name: Algorithm.init(name, codec="int9"))
        assert f"Known codecs: {', '.join(codec_names())}" in text
        assert Algorithm.init(name, codec=get_codec("int4")).label == f"{name}(codec='int4')"
        assert Algorithm.init(name, codec="MinMaxUInt8").label == name
        text = message_of(RuntimeError, lambda name=name: _trained(("int8", "int4")[rank], name, rank, device))
        assert "codec=int8" in text
        assert "codec=int4" in text


def test_unknown_codecs_and_those_that_differ_between_ranks_are_refused() -> None:
    run_ranks(2, _refused, reuse=True)
