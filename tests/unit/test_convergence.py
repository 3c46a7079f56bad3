"""`measure convergence` without ranks: tasks, sharding, the schedule, what is compared with what. Statistics are
in test_convergence_report.py, real ranks in tests/distributed/test_convergence.py."""

from __future__ import annotations

import functools
import inspect
import platform
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs PyTorch, which is what trains")
import torch

sys.path.append(str(Path(__file__).resolve().parents[2] / "tools"))

from measure.convergence import text
from measure.convergence.catalogue import (
    ADAM,
    BASELINE,
    BASELINE_ADAM,
    CASES,
    DEFAULT_CODEC,
    ERROR_FEEDBACK,
    FSDP,
    TASKS,
    baseline_of,
    cases_of,
    learning_rate_of,
    optimizer_of,
)
from measure.convergence.replicas import put_back, snapshot
from measure.convergence.sharding import evaluation_share, shard, steps_per_epoch
from measure.convergence.task import Split, Task, build_task
from measure.convergence.training import CURVE_POINTS, curve_steps, learning_rate_factor

from bagua.codecs import codec_names
from bagua.comm_hooks import ErrorFeedbackState
from bagua.fsdp import compress_communication
from bagua.torch_api.algorithms import GlobalAlgorithmRegistry


# "text-large" is "text" with a model that takes seconds for each step.
@pytest.fixture(params=[name for name in TASKS if name != "text-large"])
def task(request: pytest.FixtureRequest) -> Task:
    name: str = request.param
    if not name.startswith("text"):
        pytest.importorskip("sklearn", reason="needs scikit-learn, which brings the data: pip install scikit-learn")
    return built(name)


@functools.cache
def built(name: str) -> Task:
    return build_task(name)


class TestTasks:
    def test_it_is_the_same_in_every_process(self, task: Task) -> None:
        again = build_task(task.name)
        for ours, theirs in ((task.train, again.train), (task.test, again.test)):
            assert torch.equal(ours.inputs, theirs.inputs)
            assert torch.equal(ours.targets, theirs.targets)
        models = []
        for _ in range(2):
            torch.manual_seed(7)
            models.append(snapshot(task.build_model()))
        assert torch.equal(*models)

    def test_test_samples_are_not_trained_with(self, task: Task) -> None:
        def rows(split: Split) -> set[bytes]:
            return {row.numpy().tobytes() for row in split.inputs}

        # The same bytes may stand in two files.
        shared = len(rows(task.train) & rows(task.test))
        assert shared <= len(task.test) * (0.02 if task.name in ("text", "text-small") else 0)
        assert len(task.test) >= 500

    def test_loss_and_accuracy_of_perfect_outputs(self, task: Task) -> None:
        targets = task.test.targets[:8]
        if task.classifies:
            outputs = torch.nn.functional.one_hot(targets.long()).float() * 50
            assert task.right(outputs, targets) == targets.numel()
        else:
            outputs = targets.clone()
            assert task.right(outputs, targets) == 0
        assert float(task.loss(outputs, targets)) == pytest.approx(0, abs=1e-6)

    def test_the_model_takes_the_inputs(self, task: Task) -> None:
        batch = task.train.take(torch.arange(4))
        model = task.build_model()
        loss = task.training_loss(model, batch)
        loss.backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
        plain = float(task.loss(model(batch.inputs), batch.targets).detach())
        squares = float(snapshot(model).square().sum())
        assert float(loss.detach()) == pytest.approx(plain + task.penalty / 2 * squares, rel=1e-5)

    def test_an_epoch_has_a_batch_for_2_to_4_ranks(self, task: Task) -> None:
        batch_size = TASKS[task.name].batch_size
        assert steps_per_epoch(len(task.train), batch_size) > 10
        assert all(batch_size % ranks == 0 for ranks in (2, 3, 4))

    def test_patches_for_testing_share_no_pixel_with_those_for_training(self) -> None:
        pytest.importorskip("sklearn", reason="needs scikit-learn, which brings the photographs")
        from measure.convergence import photographs

        picture = torch.arange(200 * 300 * 3).reshape(200, 300, 3)
        noisy, _, is_test, is_train = photographs._patches(picture, torch.Generator())
        side, stride = photographs.SIDE, photographs.STRIDE
        across = (300 - side) // stride + 1
        used = {name: torch.zeros(200, 300, dtype=torch.bool) for name in ("test", "train")}
        for number in range(len(noisy)):
            y, x = number // across * stride, number % across * stride
            for name, chosen in (("test", is_test), ("train", is_train)):
                if chosen[number]:
                    used[name][y : y + side, x : x + side] = True
        assert used["test"].any()
        assert used["train"].any()
        assert not (used["test"] & used["train"]).any()

    def test_sources_are_split_by_file(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("a.py", "sub/b.py", "test/c.py", "site-packages/d.py", "_sysconfigdata_x.py", "e.txt"):
            path = tmp_path / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(name)
        assert text.source_files(tmp_path) == [Path("a.py"), Path("sub/b.py")]
        files = [Path(f"{number}.py") for number in range(1000)]
        assert 50 < sum(map(text.is_for_testing, files)) < 150
        monkeypatch.setattr(text.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
        with pytest.raises(RuntimeError, match="has 2 source files, too few to train with"):
            text.build()

    def test_the_text_has_a_name_of_its_own(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Another text under the same version, too: distributions change files."""
        sources = set()
        for changed in ("x", "y"):
            for number in range(40):
                (tmp_path / f"{number}.py").write_text((changed if number == 7 else "z") * 20_000)
            monkeypatch.setattr(text.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
            sources.add(text.build().source)
        assert len(sources) == 2
        assert all(one.startswith(f"Python {platform.python_version()}, 40 files, sha256 ") for one in sources)

    def test_a_byte_is_predicted_from_those_before_it(self) -> None:
        model = built("text").build_model()
        one = torch.arange(64, dtype=torch.uint8).view(1, 64)
        other = one.clone()
        other[0, 40] = 200
        same = (model(one) == model(other)).all(dim=2)[0]
        assert same[:40].all()
        assert not same[40:].any()

    def test_an_unknown_task_is_an_error(self) -> None:
        with pytest.raises(ValueError, match="unknown task 'letters'; choose of digits"):
            build_task("letters")


class TestSharding:
    @pytest.mark.parametrize("ranks", [1, 2, 3, 4])
    def test_ranks_share_the_batches_of_one(self, ranks: int) -> None:
        whole = shard(100, 12, 3, 5, 0, 1)
        parts = [shard(100, 12, 3, 5, rank, ranks) for rank in range(ranks)]
        assert torch.equal(torch.cat(parts, dim=1), whole)
        assert whole.shape == (8, 12)
        assert whole.unique().numel() == 96

    def test_epochs_and_seeds_have_orders_of_their_own(self) -> None:
        orders = [tuple(shard(50, 10, seed, epoch, 0, 1).flatten().tolist()) for seed in (1, 2) for epoch in (0, 1)]
        assert len(set(orders)) == 4
        assert orders[0] == tuple(shard(50, 10, 1, 0, 0, 1).flatten().tolist())

    def test_errors_name_value_and_remedy(self) -> None:
        with pytest.raises(ValueError, match="a batch of 10 samples cannot be shared by 3 ranks"):
            shard(50, 10, 1, 0, 0, 3)
        with pytest.raises(ValueError, match="5 samples are fewer than a batch of 10"):
            shard(5, 10, 1, 0, 0, 2)

    def test_evaluation_covers_everything_once(self) -> None:
        for ranks in (1, 2, 3, 4):
            found = [index for rank in range(ranks) for index in evaluation_share(103, rank, ranks)]
            assert found == list(range(103))


class TestSchedule:
    def test_it_rises_and_falls_to_zero(self) -> None:
        factors = [learning_rate_factor(step, 200) for step in range(200)]
        assert factors[0] == pytest.approx(0.1)
        assert max(factors) == factors[9] == pytest.approx(1)
        assert factors[:10] == sorted(factors[:10])
        assert factors[9:] == sorted(factors[9:], reverse=True)
        assert 0 < factors[-1] < 0.01

    @pytest.mark.parametrize("steps", [1, 2, 3])
    def test_short_ones_move_too(self, steps: int) -> None:
        assert all(0 < learning_rate_factor(step, steps) <= 1 for step in range(steps))

    def test_points_of_a_curve(self) -> None:
        assert curve_steps(2) == [0, 1, 2]
        found = curve_steps(1050)
        assert len(found) == CURVE_POINTS
        assert (found[0], found[-1]) == (0, 1050)


class TestReplicas:
    def test_a_snapshot_can_be_put_back(self) -> None:
        one, other = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
        copy = snapshot(one)
        put_back(copy, other)
        assert torch.equal(snapshot(other), copy)
        with torch.no_grad():
            one.weight.zero_()
        assert torch.equal(snapshot(other), copy)


def made_by(algorithm: str) -> Callable[..., object]:
    own = {ERROR_FEEDBACK: ErrorFeedbackState, FSDP: compress_communication}
    return own.get(algorithm) or GlobalAlgorithmRegistry.get(algorithm)


class TestCatalogue:
    def test_qadam_is_compared_with_adam(self) -> None:
        assert baseline_of("digits", "qadam") == BASELINE_ADAM
        assert optimizer_of("digits", BASELINE_ADAM) == ADAM
        assert learning_rate_of("digits", "qadam", 4) == learning_rate_of("digits", BASELINE_ADAM, 4)
        assert learning_rate_of("digits", "bytegrad", 4) == learning_rate_of("digits", BASELINE, 4)

    def test_where_adam_is_the_rule_one_baseline_does(self) -> None:
        assert baseline_of("text", "qadam") == BASELINE
        assert BASELINE_ADAM not in cases_of("text", tuple(CASES))
        assert learning_rate_of("text", "qadam", 4) == learning_rate_of("text", BASELINE, 4)
        assert cases_of("text", (BASELINE_ADAM,)) == (BASELINE,)

    def test_second_moments_of_a_rank_s_own_are_made_up_for(self) -> None:
        alike = learning_rate_of("text", BASELINE, 4)
        assert learning_rate_of("text", "bytegrad", 4) == alike
        assert learning_rate_of("text", "decentralized", 4) == 2 * alike
        assert learning_rate_of("text", "async", 4) == 2 * alike
        assert learning_rate_of("text", "diloco-started", 4) == alike
        assert learning_rate_of("digits", "decentralized", 4) == learning_rate_of("digits", BASELINE, 4)

    def test_baselines_come_on_top(self) -> None:
        assert cases_of("digits", ("bytegrad", "qadam")) == (BASELINE, "bytegrad", BASELINE_ADAM, "qadam")

    def test_nothing_is_reduced_within_a_node_without_being_said(self) -> None:
        for case in CASES.values():
            takes = inspect.signature(made_by(case.algorithm)).parameters
            if "hierarchical" in takes and case.algorithm != "gradient_allreduce":  # there it makes no difference
                assert case.options["hierarchical"] is False

    def test_every_algorithm_is_compared_and_every_codec(self) -> None:
        assert {case.algorithm for case in CASES.values()} == {*GlobalAlgorithmRegistry, ERROR_FEEDBACK, FSDP}
        for algorithm in ("bytegrad", ERROR_FEEDBACK, "low_precision_decentralized"):
            mine = [case for case in CASES.values() if case.algorithm == algorithm]
            assert [case.options.get("codec", DEFAULT_CODEC) for case in mine] == codec_names()
        for feedback in (False, True):
            mine = [
                case
                for case in CASES.values()
                if "gradients" in case.options
                and "weights" not in case.options
                and case.options.get("error_feedback", False) == feedback
            ]
            assert [case.options["gradients"] for case in mine] == codec_names()

    def test_compressed_fsdp_is_compared_with_fsdp(self) -> None:
        assert cases_of("text", ("fsdp_gradients-int4",)) == (FSDP, "fsdp_gradients-int4")
