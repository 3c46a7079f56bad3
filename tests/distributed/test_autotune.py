"""Communication that is tuned while training goes on. Time is played: some settings make faster steps."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.rank_tests import on_ranks
from support.ranks import run_ranks
from support.sweeps import rest_is_deep
from support.training import TWO_NODES_OF_TWO, batches, begin, check_ranks_equal, loss_of, message_of, mlp, momentum

from bagua.engine import plan_tuner
from bagua.job.failure_report import CollectiveError
from bagua.torch_api.algorithms import Algorithm
from bagua.torch_api.algorithms.base import resolve_algorithm
from bagua.torch_api.algorithms.bytegrad import ByteGradAlgorithm
from bagua.torch_api.algorithms.q_adam import QAdamAlgorithm, QAdamOptimizer
from bagua.torch_api.data_parallel import DistributedDataParallel
from bagua.tuning import memory, search, setting

STEPS = 300


@contextlib.contextmanager
def played(engine: Any, folder: str, fast: tuple[str | None, int | None], rank: int) -> Iterator[None]:
    """Steps with this algorithm and bucket size, None: any, take half the time. The module has 3 KiB: sizes are those
    of 256 bytes instead of 1 MiB. On another rank everything is slower: rank 0 decides."""

    class Clock:
        now = 0.0

        def perf_counter(self) -> float:
            is_fast = fast[0] in (None, engine.setup.algorithm.label) and fast[1] in (None, engine.setup.bucket_bytes)
            self.now += (0.5 if is_fast else 1.0) * (1 + 100 * rank)
            return self.now

        def __getattr__(self, name: str) -> Any:
            return getattr(time, name)

    os.environ["XDG_CACHE_HOME"] = folder
    before = setting.MIB, setting.SIZES, search.HIDDEN
    setting.MIB = search.MIB = 256
    setting.SIZES = (1, 2, 4)
    search.HIDDEN = -1.0  # what is exposed takes real time
    plan_tuner.time = Clock()  # type: ignore[assignment]
    try:
        yield
    finally:
        setting.MIB, setting.SIZES, search.HIDDEN = before
        search.MIB = setting.MIB
        plan_tuner.time = time
        del os.environ["XDG_CACHE_HOME"]


def begin_tuning() -> tuple[Any, torch.optim.Optimizer, Any, int]:
    """A module, its optimizer, and a twin that is not wrapped yet."""
    rank, device = begin()
    net: Any = mlp(rank, device)
    twin = copy.deepcopy(net)
    return net, momentum(net), twin, rank


def _tuned(
    name: str, allow: list[str], fast: tuple[str | None, int | None], folder: str
) -> tuple[tuple[str, int | None], int]:
    """What was chosen, and after how many steps. A twin repeats the same plans by hand."""
    net, optimizer, twin, rank = begin_tuning()
    allowed = [one if ":" not in one else ByteGradAlgorithm(codec=one.split(":")[1]) for one in allow]
    rivals = {one.label: one for one in map(resolve_algorithm, allowed)}
    twin_optimizer = momentum(twin)
    data = batches(rank, STEPS, next(net.parameters()).device)
    with contextlib.ExitStack() as stack:
        net_engine: list[Any] = []

        class Late:
            def __getattr__(self, attribute: str) -> Any:
                return getattr(net_engine[0], attribute)

        stack.enter_context(played(Late(), folder, fast, rank))
        net.with_bagua([optimizer], Algorithm.init(name), autotune=True, allow=allowed)
        net_engine.append(net.bagua_ddp)
        engine = net.bagua_ddp
        twin.with_bagua([twin_optimizer], Algorithm.init(name))
        rivals[name] = twin.bagua_ddp.setup.algorithm
        done = 0
        for step, batch in enumerate(data):
            if engine.tuner is None:
                break
            done = step + 1
            with engine.no_sync():
                net(batch[0]).sum().backward()  # one that accumulates is no step
            optimizer.zero_grad()
            loss = loss_of(net, batch)
            chosen, present = engine.setup, twin.bagua_ddp.setup
            setup = dataclasses.replace(
                present,
                algorithm=rivals[chosen.algorithm.label],
                bucket_bytes=chosen.bucket_bytes,
                first_bucket_bytes=chosen.first_bucket_bytes,
            )
            if setup.communication != present.communication:
                twin.bagua_ddp.replan(setup)
            twin_optimizer.zero_grad()
            twin_loss = loss_of(twin, batch)
            assert torch.equal(loss, twin_loss), step
            loss.backward()
            twin_loss.backward()
            optimizer.step()
            twin_optimizer.step()
            if step == 20:
                net.eval()
                net(batch[0])  # does not count
                net.train()
    assert engine.tuner is None, "at most so many steps"
    check_ranks_equal(net)
    return (engine.setup.algorithm.label, engine.setup.bucket_bytes), done


CASES = [
    ("gradient_allreduce", [], (None, 1024), ("gradient_allreduce", 1024)),
    ("gradient_allreduce", ["bytegrad"], ("bytegrad", 1024), ("bytegrad", 1024)),
    ("gradient_allreduce", ["bytegrad"], ("gradient_allreduce", None), ("gradient_allreduce", None)),
    ("bytegrad", ["gradient_allreduce"], ("none", None), ("bytegrad", None)),
]


@pytest.mark.parametrize(("name", "allow", "fast", "expected"), rest_is_deep(CASES, 1, 3))
def test_the_fastest_is_found_with_the_losses_of_the_same_plans_by_hand(
    name: str, allow: list[str], fast: Any, expected: Any, tmp_path: Path
) -> None:
    results = run_ranks(3, _tuned, name, allow, fast, str(tmp_path), reuse=True)
    assert {result[0] for result in results} == {expected}
    assert len({result[1] for result in results}) == 1
    (file,) = tmp_path.rglob("*.json")
    answer = memory.read(file)
    assert answer is not None
    assert (answer.setting.algorithm, answer.setting.bucket_bytes) == expected
    if "none" in fast or fast[0] == name:
        return
    # Another run finds it there, and only checks it; as does one that was restarted with fewer ranks.
    again = run_ranks(3 if allow else 2, _tuned, name, allow, fast, str(tmp_path), reuse=True)
    assert {result[0] for result in again} == {expected}
    assert again[0][1] < min(60, results[0][1])


@pytest.mark.deep
def test_codecs_are_chosen_where_they_are_allowed(tmp_path: Path) -> None:
    allow, fast = ["bytegrad", "bytegrad:fp8_e4m3", "bytegrad:int4"], "bytegrad(codec='int4')"
    results = run_ranks(3, _tuned, "gradient_allreduce", allow, (fast, None), str(tmp_path), reuse=True)
    assert {result[0][0] for result in results} == {fast}


def _tuned_on_nodes(fast: str, folder: str) -> str:
    net, optimizer, _, rank = begin_tuning()
    net.with_bagua([optimizer], Algorithm.init("gradient_allreduce"))
    with played(net.bagua_ddp, folder, (fast, None), rank):
        net.bagua_ddp.autotune()
        for batch in batches(rank, STEPS, next(net.parameters()).device):
            if net.bagua_ddp.tuner is None:
                break
            optimizer.zero_grad()
            loss_of(net, batch).backward()
            optimizer.step()
    check_ranks_equal(net)
    return str(net.bagua_ddp.setup.algorithm.label)


def test_the_hierarchy_of_nodes_needs_no_permission(tmp_path: Path) -> None:
    fast = "gradient_allreduce(hierarchical=True)"
    assert run_ranks(4, _tuned_on_nodes, fast, str(tmp_path), env=TWO_NODES_OF_TWO) == [fast] * 4
    assert len(list(tmp_path.rglob("*.json"))) == 1


def _refused() -> list[str]:
    rank, device = begin()
    messages = []
    for name, allow in (("decentralized", ["bytegrad"]), ("gradient_allreduce", ["async"])):
        net: Any = mlp(rank, device)
        optimizer = momentum(net)
        algorithm = Algorithm.init(name)

        def wrap(net: Any = net, optimizer: Any = optimizer, algorithm: Any = algorithm, allow: Any = allow) -> None:
            net.with_bagua([optimizer], algorithm, autotune=True, allow=allow)

        messages.append(message_of(ValueError, wrap))
        assert "bagua_ddp" not in net.__dict__
        messages.append(message_of(TypeError, lambda wrap=wrap: wrap(allow="bytegrad")))
    net = mlp(rank, device)
    net.with_bagua([momentum(net)], "gradient_allreduce")
    assert message_of(ValueError, lambda: net.bagua_ddp.autotune(["async"])) == messages[2]
    assert "Did you mean 'bytegrad'?" in message_of(ValueError, lambda: net.bagua_ddp.autotune(["bytegrat"]))
    assert "Pass a list" in message_of(TypeError, lambda: net.bagua_ddp.autotune("bytegrad"))
    assert net.bagua_ddp.tuner is None
    net.bagua_ddp.autotune(["bytegrad"])
    assert net.bagua_ddp.tuner is not None
    return messages


def test_algorithms_with_state_are_refused_by_name() -> None:
    ((of_module, no_list, of_list, _),) = run_ranks(1, _refused)
    assert "from or to decentralized" in of_module
    assert "from or to async" in of_list
    assert "Pass a list" in no_list


def test_the_variable_switches_it_on(tmp_path: Path) -> None:
    assert run_ranks(1, _is_tuning, env={"BAGUA_AUTOTUNE": "1", "XDG_CACHE_HOME": str(tmp_path)}) == [True]
    assert run_ranks(1, _is_tuning) == [False]


def _is_tuning() -> bool:
    rank, device = begin()
    net: Any = mlp(rank, device)
    net.with_bagua([torch.optim.SGD(net.parameters(), lr=0.1)], Algorithm.init("gradient_allreduce"))
    return net.bagua_ddp.tuner is not None


def _differently(autotune: list[bool], allow: list[list[str]]) -> str:
    rank, device = begin()
    net: Any = mlp(rank, device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    algorithm = Algorithm.init("gradient_allreduce")
    return message_of(
        RuntimeError, lambda: net.with_bagua([optimizer], algorithm, autotune=autotune[rank], allow=allow[rank])
    )


def test_one_rank_alone_may_not_tune() -> None:
    for message in run_ranks(2, _differently, [False, True], [[], []], reuse=True):
        assert "rank 0 has autotune=False; rank 1 has autotune=True" in message
    for message in run_ranks(2, _differently, [True, True], [[], ["bytegrad"]], reuse=True):
        assert "rank 1 has autotune may choose gradient_allreduce, bytegrad" in message


# --- what one rank does alone -----------------------------------------------------------------------------------------


def _alone(name: str, folder: str) -> tuple[str, int | None, int]:
    """Rank 0 looks at its model, for instance to log something, while the other waits."""
    rank, device = begin()
    net: Any = mlp(rank, device)
    is_qadam = name == "qadam"
    optimizer = QAdamOptimizer(net.parameters(), lr=0.01, warmup_steps=9) if is_qadam else momentum(net)
    algorithm = QAdamAlgorithm(optimizer) if isinstance(optimizer, QAdamOptimizer) else Algorithm.init(name)
    settings = SimpleNamespace(algorithm=algorithm, bucket_bytes=0)
    with played(SimpleNamespace(setup=settings), folder, ("none", None), rank):
        net.with_bagua([optimizer], algorithm, autotune=True, allow=[] if is_qadam else ["bytegrad"])
        engine = net.bagua_ddp
        for step, batch in enumerate(batches(rank, 60, device)):
            if rank == 0:
                x = batch[0]
                with torch.no_grad():
                    net(x)
                if step % 3 == 0:
                    net.eval()
                    torch.autograd.grad(net(x).sum(), net[0].weight)
                    net.train()
                if step % 3 == 1 and not is_qadam:
                    torch.autograd.grad(net(x).sum(), net[0].weight)
                    net(x)
                with engine.no_sync():
                    (0 * net(x).sum()).backward()
            dist.barrier()
            optimizer.zero_grad()
            loss_of(net, batch).backward()
            optimizer.step()
    check_ranks_equal(net)
    steps = 0 if engine.tuner is None else engine.tuner._steps
    return engine.setup.algorithm.label, engine.setup.bucket_bytes, steps


@pytest.mark.parametrize("name", ["gradient_allreduce", "qadam"])
def test_a_rank_may_make_passes_of_its_own(name: str, tmp_path: Path) -> None:
    assert len(set(run_ranks(2, _alone, name, str(tmp_path), reuse=True))) == 1


# --- ranks that die, pause or leave ----------------------------------------------------------------------------------


def _disturbed(how: str, folder: str, who: int = 1) -> str:
    """That rank is disturbed in step 10, in the middle of a repetition."""
    os.environ["XDG_CACHE_HOME"] = folder
    search.HIDDEN = -1.0  # it does not end before
    rank, device = begin()
    net: Any = mlp(rank, device)
    optimizer = momentum(net)
    net.with_bagua([optimizer], Algorithm.init("gradient_allreduce"), autotune=True, allow=["bytegrad"])
    try:
        for step, batch in enumerate(batches(rank, STEPS, device)):
            if step == 10 and rank == who:
                assert net.bagua_ddp.tuner is not None
                if how == "dies":
                    os.kill(os.getpid(), signal.SIGKILL)
                if how == "pauses":
                    _stop_for_a_while()
            optimizer.zero_grad()
            loss_of(net, batch).backward()
            optimizer.step()
    except CollectiveError as error:
        return str(error)
    check_ranks_equal(net)
    return net.bagua_ddp.setup.algorithm.label


def _stop_for_a_while() -> None:
    """Until a child has seen that this process is stopped."""
    stopped = os.getpid()
    if os.fork() == 0:
        while Path(f"/proc/{stopped}/stat").read_text().rsplit(")", 1)[1].split()[0] != "T":
            os.sched_yield()
        os.kill(stopped, signal.SIGCONT)
        os._exit(0)
    os.kill(stopped, signal.SIGSTOP)
    os.wait()


@pytest.mark.parametrize("who", [1, 0])
def test_a_rank_that_is_gone_is_an_error(who: int, tmp_path: Path) -> None:
    """Rank 0 as well, which says what is tried next."""
    messages = run_ranks(3, _disturbed, "dies", str(tmp_path), who, expect_death=[who])
    assert ["Operation on rank" in message for rank, message in enumerate(messages) if rank != who] == [True, True]


def test_a_rank_that_pauses_delays_the_others(tmp_path: Path) -> None:
    assert len(set(run_ranks(2, _disturbed, "pauses", str(tmp_path)))) == 1


@on_ranks(2)
def test_uneven_inputs_are_not_tuned(rank: int, device: torch.device, tmp_path: Path) -> None:
    folder = str(tmp_path)
    os.environ["XDG_CACHE_HOME"] = folder
    net = mlp(rank, device)
    model = DistributedDataParallel(net, optimizers=[momentum(net)])
    model.inner.autotune([ByteGradAlgorithm()])
    with model.join():
        for batch in batches(rank, 20 + 20 * rank, device):
            loss_of(model, batch).backward()
    assert model.inner.tuner is not None
    assert model.inner.tuner._steps == 0


def test_a_file_that_is_no_answer_is_a_miss(tmp_path: Path, monkeypatch: Any, caplog: Any) -> None:
    """Each with one warning."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert memory.folder() == tmp_path / "bagua" / "tuning"
    chosen = setting.Setting("bytegrad", 1 << 20, None)
    fingerprint = memory.Fingerprint("Net", "2 ranks on 1 node", "cpu", "gloo", "all")
    tried = (setting.Tried(chosen, 0.1, 0.05, float("nan"), 1.0, 3),)
    answer = memory.Answer.of(setting.Outcome(chosen, 1.5, "faster", tried), fingerprint, 100)
    assert memory.look_up(fingerprint) is None
    path = memory.store(answer)
    assert path is not None
    found = memory.look_up(fingerprint)
    assert found is not None
    assert json.dumps(found.as_json()) == json.dumps(answer.as_json())
    other_world = memory.Fingerprint("Net", "4 ranks on 1 node", "cpu", "gloo", "all")
    assert memory.look_up(other_world) is not None, "what was learned with another number of ranks"
    assert memory.look_up(memory.Fingerprint("Net", "2 ranks on 1 node", "cpu", "nccl", "all")) is None
    good = path.read_text()
    for text in (
        good[:-5],
        good.replace('"speedup": 1.5', '"speedup": "fast"'),
        good.replace('"schema": 2', '"schema": 1'),
        good.replace("1048576", "-1"),
        good.replace("bytegrad", "byte\\u001bgrad"),
        good.replace('"speedup": 1.5', '"speedup": 1' + "0" * 400),
        good.replace('"steps": 100', '"steps": 1e300'),
        good.replace('"step_s": 0.1', '"step_s": 0'),
        good.replace('"ratio": 1.0', '"ratio": null'),
        re.sub(r'"found_at": [^,}\s]+', '"found_at": 1e14', good),
        "[" * 100_000,
        "\x00",
    ):
        assert text != good
        path.write_text(text)
        caplog.clear()
        assert memory.look_up(fingerprint) is None
        assert len(caplog.records) == 1
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    caplog.clear()
    assert memory.store(answer) is None
    assert len(caplog.records) == 1
