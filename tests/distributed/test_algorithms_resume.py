"""Training that was saved goes on bit for bit, on each rank, whose weights may be its own."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from support.algorithm_cases import CASES, WARMUP_STEPS, Case, pulling, step
from support.rank_tests import on_ranks
from support.ranks import run_ranks
from support.sweeps import each_value_once
from support.training import TWO_NODES_OF_TWO, begin, check_equal, engine_of, loss_of, message_of, mlp
from torch import nn

SMALL_BUCKETS = {"BAGUA_DEFAULT_BUCKET_SIZE": "1000"}  # of which these models have several
AFTER = 5  # more than the interval, and enough for shift_one to meet all partners

DETERMINISTIC = [
    *(case for case in CASES if case.deterministic),
    Case("decentralized", {"communication_interval": 3, "peer_selection_mode": "shift_one", "hierarchical": False}),
    Case("low_precision_decentralized", {"communication_interval": 3}),
    Case("local_sgd", {"sync_every": 3, "warmup_steps": 2}),
]
every_algorithm = pytest.mark.parametrize("case", DETERMINISTIC, ids=str)


def _made(case: Case, rank: int, device: torch.device, how: str, seed: int = 0) -> tuple[Any, Any]:
    net = mlp(seed + rank, device)
    optimizer = case.optimizer(net)
    return case.wrap(net, optimizer, how), optimizer


def _state(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "engine": engine_of(model).state_dict()}


def _load(model: Any, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    engine_of(model).load_state_dict(state["engine"])


def _save(case: Case, steps: int, how: str, folder: str) -> None:
    """Trains, saves in the middle, and at the end what is to be arrived at."""
    rank, device = begin()
    model, optimizer = _made(case, rank, device, how)
    data = pulling(rank, steps + AFTER, device)
    for batch in data[:steps]:
        step(model, optimizer, batch)
    torch.save(_state(model, optimizer), Path(folder, f"{rank}.middle"))
    for batch in data[steps:]:
        step(model, optimizer, batch)
    torch.save(_state(model, optimizer), Path(folder, f"{rank}.end"))


def _go_on(case: Case, steps: int, how: str, folder: str) -> None:
    """Other processes, which began with other weights."""
    rank, device = begin()
    model, optimizer = _made(case, rank, device, how, seed=50)
    middle = torch.load(Path(folder, f"{rank}.middle"), weights_only=True, map_location=device)
    end = torch.load(Path(folder, f"{rank}.end"), weights_only=True, map_location=device)
    loss_of(model, pulling(rank, 1, device)[0])  # may begin an exchange, which is none of the state's
    _load(model, optimizer, middle)
    for batch in pulling(rank, steps + AFTER, device)[steps:]:
        step(model, optimizer, batch)
    reached = _state(model, optimizer)
    _check_same(reached["model"], end["model"], f"{case}: model")
    _check_same(reached["optimizer"]["state"], end["optimizer"]["state"], f"{case}: optimizer")
    _check_same(reached["engine"], end["engine"], f"{case}: engine")


def _check_same(one: Any, other: Any, what: str) -> None:
    assert type(one) is type(other), what
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other), f"{what} is {(one.double() - other.double()).abs().max()} away"
    elif isinstance(one, dict):
        assert list(one) == list(other), what
        for name in one:
            _check_same(one[name], other[name], f"{what}: {name}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), what
        for number, pair in enumerate(zip(one, other, strict=True)):
            _check_same(*pair, f"{what}: {number}")
    else:
        assert one == other, what


@every_algorithm
def test_other_processes_go_on(case: Case, tmp_path: Path) -> None:
    ranks = 4 if case.even else 2  # so that there are several partners
    for play in (_save, _go_on):
        run_ranks(ranks, play, case, 7, "with_bagua", str(tmp_path), env=SMALL_BUCKETS, reuse=True)


@pytest.mark.parametrize(
    ("case", "how"), each_value_once(DETERMINISTIC, ["with_bagua unflattened", "wrapper"]), ids=str
)
def test_other_ways_to_wrap(case: Case, how: str, tmp_path: Path) -> None:
    for play in (_save, _go_on):
        run_ranks(2, play, case, 3, how, str(tmp_path), reuse=True)


@pytest.mark.parametrize("case", [case.on_nodes() for case in DETERMINISTIC[1:] if case.on_nodes() != case], ids=str)
def test_on_nodes(case: Case, tmp_path: Path) -> None:
    for play in (_save, _go_on):
        run_ranks(4, play, case, 3, "with_bagua", str(tmp_path), env=TWO_NODES_OF_TWO, reuse=True)


@every_algorithm
@on_ranks(2)
def test_fresh_objects_go_on_from_any_step(rank: int, device: torch.device, case: Case) -> None:
    """Saved before each step of an interval and within it, or about the end of a warm-up; loaded by fresh objects."""
    model, optimizer = _made(case, rank, device, "with_bagua")
    warm_up = WARMUP_STEPS if case.name == "qadam" else case.options.get("warmup_steps", 0)
    for number, batch in enumerate(pulling(rank, warm_up + 3, device)):
        # An optimizer works on with the tensors that it is given.
        states = [copy.deepcopy(_state(model, optimizer))]
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        states.append(copy.deepcopy(_state(model, optimizer)))
        loss.backward()
        optimizer.step()
        for state in states if number == 0 or number >= warm_up - 1 else ():
            other, another = _made(case, rank, device, "with_bagua", seed=70)
            _load(other, another, state)
            step(other, another, batch)
            check_equal(other, model, f"{case} after {number} steps")


@pytest.mark.parametrize("case", CASES, ids=str)
@on_ranks(2)
def test_the_state_of_another_algorithm_is_refused(rank: int, device: torch.device, case: Case) -> None:
    model, optimizer = _made(case, rank, device, "with_bagua")
    step(model, optimizer, pulling(rank, 1, device)[0])
    saved = engine_of(model).state_dict()
    assert saved["train_step_counter"] == 1
    for name in {other.name for other in CASES}:
        other = next(one for one in CASES if one.name == name)
        wrong, _ = _made(other, rank, device, "with_bagua")
        if list(engine_of(wrong).state_dict()["algorithm"]) != list(saved["algorithm"]):
            message_of(ValueError, lambda: engine_of(wrong).load_state_dict(saved))  # noqa: B023
        other.stop(wrong)
    message_of(ValueError, lambda: engine_of(model).load_state_dict({"algorithm": {}}))


@on_ranks(2)
def test_the_state_of_another_model_is_refused(rank: int, device: torch.device) -> None:
    texts = {
        "decentralized": "The state is of another model.",
        "low_precision_decentralized": "another model, or of buckets of another size (BAGUA_DEFAULT_BUCKET_SIZE",
        "streaming_diloco": "another model, or has another number of fragments",
    }
    for case in CASES:
        if case.name in texts and not case.even:
            model, _ = _made(case, rank, device, "with_bagua")
            other = nn.Sequential(nn.Linear(2, 5), nn.Linear(5, 4)).to(device)
            wrong = engine_of(case.wrap(other, case.optimizer(other))).state_dict()
            told = message_of(ValueError, lambda: engine_of(model).load_state_dict(wrong))  # noqa: B023
            assert texts[case.name] in told
