"""`measure core` without ranks: options, statistics, the order of turns, models.
Real ranks are in tests/distributed/test_core_comparison.py."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs PyTorch, which is what trains")
import torch

sys.path.append(str(Path(__file__).resolve().parents[2] / "tools"))

from measure.core.agreement import Reference, parameters_on_host
from measure.core.catalogue import (
    DEFAULT_ALGORITHMS,
    MODELS,
    REFERENCE,
)
from measure.core.models import Gpt2, ModelSize, build, resnet50, tiny
from measure.core.report import fastest_line, legend, measured_lines, report_of
from measure.core.run import CoreRun
from measure.core.step_statistics import TurnResult, faults_of, rows_of, turn_result
from measure.core.tool import parse_options

from bagua.net.bench.errors import BenchError
from bagua.net.bench.progress import Progress
from bagua.net.bench.result_file import read_result

MIB = 1 << 20


def options(*words: str) -> argparse.Namespace:
    return parse_options(["--device", "cpu", *words])


class TestOptions:
    @pytest.mark.parametrize(
        ("words", "says"),
        [
            (["--algorithms", "with-bagua"], "has nothing to be compared with; add torch-ddp"),
            (["--algorithms", "core", "--baseline", "bytegrad"], "--baseline bytegrad is none of --algorithms"),
            (
                ["--algorithms", "all", "--warmup", "2"],
                "--warmup 2: ddp-powersgd compresses only after some steps; give 3",
            ),
        ],
    )
    def test_errors_name_value_and_remedy(
        self, words: list[str], says: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(SystemExit) as ended:
            options(*words)
        assert ended.value.code == 2
        assert says in capsys.readouterr().err


def turn(algorithm: str, number: int, steps_ms: list[float], **changes: Any) -> TurnResult:
    fields: dict[str, Any] = {
        "model": "mlp",
        "algorithm": algorithm,
        "round": number,
        "step_seconds": [ms / 1e3 for ms in steps_ms],
        "steps": len(steps_ms),
        "losses": [1.0],
        "parameters": 10,
        "gradients": 2,
        "peak_bytes": None,
        "steps_peak_bytes": None,
        "own_cores": 1.0,
        "machine_busy": None,
        "averagings": None,
        "replicas_agree": True,
        "largest_difference": 0.0,
        "relative_difference": 0.0,
        "kept": None,
    }
    return TurnResult(**{**fields, **changes})


def answer(seconds: list[float], **changes: Any) -> dict[str, Any]:
    fields = {
        "event": "turn",
        "step_seconds": seconds,
        "steps": len(seconds),
        "losses": [2.0],
        "parameters": 10,
        "gradients": 2,
        "peak_bytes": 3 * MIB,
        "steps_peak_bytes": MIB,
        "own_cores": 0.5,
        "machine_busy": 0.75,
        "averagings": None,
        "fingerprint": [1, 2],
        "difference": None,
        "kept": None,
    }
    return {**fields, **changes}


class TestStatistics:
    def test_a_step_is_as_long_as_on_its_slowest_rank(self) -> None:
        found = turn_result("mlp", REFERENCE, 0, [answer([1, 5, 2]), answer([3, 4, 2], peak_bytes=4 * MIB)])
        assert found.step_seconds == [3, 5, 2]
        assert found.peak_bytes == 4 * MIB
        assert (found.own_cores, found.machine_busy) == (0.5, 0.75)
        assert found.replicas_agree

    def test_one_bit_of_one_rank_is_seen(self) -> None:
        assert not turn_result("mlp", REFERENCE, 0, [answer([1]), answer([1], fingerprint=[1, 3])]).replicas_agree

    def test_ratios_are_taken_within_a_round(self) -> None:
        """The machine became three times slower in round 1, which is nobody's merit."""
        turns = [turn(REFERENCE, 0, [10, 10]), turn("with-bagua", 0, [8, 8])]
        turns += [turn("with-bagua", 1, [24, 24]), turn(REFERENCE, 1, [30, 30]), turn("with-bagua", 2, [1])]
        ddp, ours = rows_of(turns)
        assert ddp.speed_up is None
        assert ours.speed_up is not None
        assert (ours.speed_up.median, ours.speed_up.low, ours.speed_up.high) == pytest.approx((1.25, 1.25, 1.25))
        assert ours.rounds == 3
        assert ours.step_ms == pytest.approx(8)

    def test_extra_memory_is_counted_from_gradient_all_reduce_by_medians(self) -> None:
        """Ten elements. A turn in which the allocator kept a lot is not what an algorithm needs."""
        plain = [
            turn("with-bagua", number, [1], steps_peak_bytes=bytes_) for number, bytes_ in enumerate((100, 100, 900))
        ]
        mine = [turn("qadam", number, [1], steps_peak_bytes=bytes_) for number, bytes_ in enumerate((180, 140, 140))]
        rows = {row.algorithm: row.extra_bytes_per_parameter for row in rows_of([*plain, *mine])}
        assert rows == {"with-bagua": None, "qadam": pytest.approx(4)}
        (alone,) = rows_of(mine)
        assert alone.extra_bytes_per_parameter is None

    def test_averagings_that_are_not_in_each_step_are_counted(self) -> None:
        turns = [turn("async", 0, [1] * 3, averagings=3, steps=6), turn("async", 1, [1], averagings=1, steps=6)]
        turns += [turn("bytegrad", 0, [1]), turn("decentralized", 0, [1] * 3)]
        found = {row.algorithm: row.steps_per_averaging for row in rows_of(turns)}
        assert found == {"async": 3, "bytegrad": None, "decentralized": None}
        lines = [*legend(rows_of(turns), REFERENCE), *measured_lines(rows_of(turns), turns)]
        assert "async, mlp: parameters were averaged once in 3.0 steps" in lines

    @pytest.mark.parametrize(
        ("changes", "says"),
        [
            ({"replicas_agree": False}, "the ranks ended with different parameters"),
            ({"losses": [1.0, math.nan]}, "the loss became nan"),
            ({"relative_difference": 0.2}, "differ from torch-ddp's by 0.2 of the way from the start; allowed 0.1"),
            ({"relative_difference": math.inf}, "differ from torch-ddp's by inf"),
            ({"relative_difference": math.nan}, "differ from torch-ddp's by nan"),
        ],
    )
    def test_another_training_is_a_fault(self, changes: Mapping[str, Any], says: str) -> None:
        (fault,) = faults_of([turn(REFERENCE, 0, [1]), turn("bagua-ddp", 0, [1], **changes)], 0.1)
        assert "bagua-ddp with mlp" in fault
        assert says in fault

    @pytest.mark.parametrize(
        ("algorithm", "agree", "difference", "faults"),
        [
            ("bytegrad", True, 0.5, 0),
            ("bytegrad", False, 0.5, 1),
            ("async", False, 0.5, 0),
            ("with-bagua", False, 0.5, 2),
        ],
    )
    def test_algorithms_are_held_to_what_they_promise(
        self, algorithm: str, agree: bool, difference: float, faults: int
    ) -> None:
        turns = [turn(REFERENCE, 0, [1])]
        turns.append(turn(algorithm, 0, [1], replicas_agree=agree, relative_difference=difference))
        assert len(faults_of(turns, 0.1)) == faults

    def test_what_rounds_of_ddp_differ_by_is_allowed_to_others_thrice(self) -> None:
        turns = [turn(REFERENCE, 0, [1], relative_difference=None), turn(REFERENCE, 1, [1], relative_difference=0.1)]
        assert faults_of([*turns, turn("bagua-ddp", 0, [1], relative_difference=0.29)], 0.1) == []
        assert len(faults_of([*turns, turn("bagua-ddp", 0, [1], relative_difference=0.31)], 0.1)) == 1


class PlayedTeam:
    """Answers at once, fails where a test says, and lets the clock pass."""

    facts: Mapping[str, Any] = {"torch": "2", "unavailable": {}}

    def __init__(self, journal: list[str], fails: Callable[[str, str, str], bool], advance: Callable[[], None]) -> None:
        self._journal, self._fails, self._advance = journal, fails, advance
        journal.append("start")

    def ask(self, operation: str, timeout_s: float, **fields: Any) -> list[dict[str, Any]]:
        self._advance()
        self._journal.append(f"{operation} {fields['model']} {fields['algorithm']}")
        if self._fails(operation, fields["model"], fields["algorithm"]):
            raise BenchError("rank 1 failed")
        return [answer([0.01]), answer([0.01])]

    def close(self, *, failed: bool) -> None:
        self._journal.append("killed" if failed else "closed")


def play(
    settings: argparse.Namespace, fails: Callable[[str, str, str], bool] = lambda *_: False
) -> tuple[list[str], CoreRun]:
    """Every question takes a second."""
    journal: list[str] = []
    now = [0.0]

    def advance() -> None:
        now[0] += 1.0

    run = CoreRun(settings, lambda: PlayedTeam(journal, fails, advance), Progress(1, quiet=True), lambda: now[0])
    run.run()
    return journal, run


class TestRun:
    def test_every_round_begins_with_another_algorithm(self) -> None:
        journal, _ = play(options("--model", "mlp", "--rounds", "2"))
        first, second, third = (f"mlp {name}" for name in DEFAULT_ALGORITHMS)
        asked = [f"turn {name}" for name in (first, second, third, second, third, first)]
        assert journal == ["start", f"settle {first}", *asked, "closed"]

    def test_who_fails_is_left_out_of_that_model_and_ranks_start_anew(self) -> None:
        settings = options("--model", "mlp,convnet", "--rounds", "2", "--algorithms", "torch-ddp,with-bagua")
        journal, run = play(settings, lambda _, model, name: (model, name) == ("mlp", "with-bagua"))
        assert journal[2:5] == ["turn mlp torch-ddp", "turn mlp with-bagua", "killed"]
        assert journal[5:7] == ["start", "settle mlp torch-ddp"], "also what a new process does once is in no turn"
        assert journal.count("turn mlp with-bagua") == 1
        assert journal.count("turn mlp torch-ddp") == journal.count("turn convnet with-bagua") == 2
        assert run.turns.errors == ["with-bagua with mlp: rank 1 failed"]

    def test_what_the_installation_lacks_is_reported_once_and_costs_the_others_nothing(self) -> None:
        settings = options("--model", "mlp", "--rounds", "2", "--algorithms", "torch-ddp,async")
        journal: list[str] = []
        team = PlayedTeam(journal, lambda *_: False, lambda: None)
        team.facts = {"torch": "2", "unavailable": {"async": "no such algorithm"}}
        run = CoreRun(settings, lambda: team, Progress(1, quiet=True))
        run.run()
        assert run.turns.errors == ["async: no such algorithm"]
        assert journal == ["start", "settle mlp torch-ddp", *["turn mlp torch-ddp"] * 2, "closed"]

    def test_ranks_that_cannot_start_anew_cost_nothing_that_was_measured(self) -> None:
        settings = options("--model", "mlp", "--rounds", "2", "--algorithms", "torch-ddp,with-bagua")
        teams = [PlayedTeam([], lambda _, __, name: name == "with-bagua", lambda: None)]

        def start() -> PlayedTeam:
            if not teams:
                raise BenchError("no port is free")
            return teams.pop()

        run = CoreRun(settings, start, Progress(1, quiet=True))
        run.run()
        assert [turn.algorithm for turn in run.results] == [REFERENCE]
        assert run.turns.errors[1] == "the ranks could not be started anew: no port is free"
        with pytest.raises(BenchError, match="no port is free"):
            CoreRun(settings, start, Progress(1, quiet=True)).run()


def played_run(turns: list[TurnResult], settings: argparse.Namespace, **facts: Any) -> CoreRun:
    """That has measured these."""
    team = PlayedTeam([], lambda *_: False, lambda: None)
    run = CoreRun(settings, lambda: team, Progress(1, quiet=True))
    run._ranks.facts = facts
    for one in turns:
        run.turns.samples.setdefault((one.model, one.algorithm), {})[one.round] = one
    return run


class TestReport:
    def test_a_package_without_compiled_compression_is_named(self) -> None:
        settings = options()
        run = played_run([turn(REFERENCE, 0, [10])], settings, python_compression="/somewhere/bagua/__init__.py")
        (note,) = report_of([(settings.networks[0], run)], settings).notes
        assert note.startswith("/somewhere/bagua/__init__.py has no compiled bagua.kernels._minmax_uint8")

    def test_what_is_printed_and_written(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        path, details = tmp_path / "core.json", tmp_path / "details.json"
        settings = options("--json", str(path), "--details", str(details))
        turns = [turn(REFERENCE, number, [10 + number]) for number in (0, 1)]
        turns += [turn("with-bagua", number, [5], steps_peak_bytes=3 * MIB) for number in (0, 1)]
        run = played_run([*turns, turn("bagua-ddp", 0, [5], losses=[math.nan])], settings, torch="2.13.0", device="cpu")
        run.turns.notes.append("a note")
        assert report_of([(settings.networks[0], run)], settings).publish(settings) == 1
        printed = capsys.readouterr().out
        assert "note: a note\nERROR: bagua-ddp with mlp, round 0: the loss became nan\nwritten: " in printed
        result = read_result(path)
        step = result.find("step_time", algorithm="torch_ddp", model="mlp", ranks=2, gpus=0, rate_gbps=None)
        assert (step.median, step.low, step.high, step.unit) == pytest.approx((10.5, 10, 11, "ms"))
        assert result.find("speedup", algorithm="gradient_allreduce").median == pytest.approx(2.1)
        assert result.find("memory", algorithm="gradient_allreduce").median == 3
        assert (result.versions["torch"], result.notes[0]) == ("2.13.0", "a note")
        document = json.loads(details.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
        assert document["turns"][-1]["losses"] == [None]


class TestModels:
    @pytest.mark.parametrize(
        ("make", "parameters", "tensors"),
        [(resnet50, 25_557_032, 161), (Gpt2, 124_439_808, 148), (lambda: tiny(2000), 544_000, 4000)],
    )
    def test_they_are_the_published_ones(self, make: Callable[[], Any], parameters: int, tensors: int) -> None:
        with torch.device("meta"):
            # The rotations of `tiny` are made of numbers.
            model = make() if make in (resnet50, Gpt2) else None
        model = model or make()
        found = [parameter.numel() for parameter in model.parameters()]
        assert (sum(found), len(found)) == (parameters, tensors)

    @pytest.mark.parametrize("name", ["convnet", "mlp", "tiny-2000", "wide"])
    def test_they_learn_and_ranks_differ(self, name: str) -> None:
        size = ModelSize({"tiny-2000": 50, "wide": 16}.get(name, MODELS[name].length_on_cpu), 8, "float32")
        one, other = (build(name, size, torch.device("cpu"), seed=1, rank=rank) for rank in (0, 1))
        assert not torch.equal(one.inputs[0], other.inputs[0])
        assert not torch.equal(next(one.model.parameters()), next(other.model.parameters()))
        losses = []
        for _ in range(8):
            one.optimizer.zero_grad()
            loss = one.loss(one.model, 0)
            loss.backward()
            one.optimizer.step()
            losses.append(loss.item())
        assert losses[-1] < losses[0]

    def test_gpt2_cannot_see_what_comes(self) -> None:
        torch.manual_seed(0)
        model = Gpt2(layers=2, width=16, heads=2, vocabulary=11, tokens=8).eval()
        tokens = torch.randint(11, (1, 8))
        changed = tokens.clone()
        changed[0, 5] = (changed[0, 5] + 1) % 11
        before, after = model(tokens), model(changed)
        assert torch.equal(before[0, :5], after[0, :5])
        assert not torch.allclose(before[0, 5:], after[0, 5:])


class TestAgreement:
    def test_differences_are_measured_against_the_way_from_the_start(self) -> None:
        model = torch.nn.Linear(2, 1, bias=False)
        with torch.no_grad():
            model.weight.copy_(torch.tensor([[1.0, 2.0]]))
        reference = Reference([torch.zeros(1, 2)], [torch.tensor([[1.0, 2.5]])])
        difference = reference.compare(model)
        assert difference.largest == 0.5
        assert difference.relative == pytest.approx(0.5 / math.hypot(1.0, 2.5))
        assert Reference([torch.zeros(1, 2)], parameters_on_host(model)).compare(model).relative == 0.0

    def test_what_is_no_number_is_equal_to_nothing(self) -> None:
        model = torch.nn.Linear(1, 1, bias=False)
        with torch.no_grad():
            model.weight.fill_(math.nan)
        assert Reference([torch.zeros(1, 1)], [torch.zeros(1, 1)]).compare(model).relative == math.inf

    def test_the_fastest_is_faster_in_every_round_and_by_more_than_noise(self) -> None:
        times = {"with-bagua": (10, 10), "bytegrad": (5, 5), "qadam": (1, 11), "ddp-fp16": (9.8, 9.8), "async": (2, 2)}
        turns = [turn(name, number, [ms]) for name, rounds in times.items() for number, ms in enumerate(rounds)]
        line = fastest_line("mlp", rows_of(turns, "with-bagua"))
        assert line == "the fastest, mlp: with equal replicas bytegrad 2.00x, of all async 5.00x"
        slower = [one for one in rows_of(turns, "with-bagua") if one.algorithm in ("with-bagua", "ddp-fp16")]
        assert fastest_line("mlp", slower).endswith("gradient all-reduce, of all gradient all-reduce")
