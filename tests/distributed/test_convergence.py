"""`measure convergence` with real ranks: how models are averaged and evaluated, and a few steps of the digits. What
needs no ranks is in tests/unit/test_convergence*.py."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs PyTorch, which is what trains")
import torch
from support.ranks import device_for, run_ranks

from bagua.net.bench.result_file import read_result

# Found, not imported: every worker of pytest would spend seconds on it.
pytestmark = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("sklearn", "matplotlib"))),
    reason="needs scikit-learn, which brings the digits, and matplotlib: pip install scikit-learn matplotlib",
)

sys.path.append(str(Path(__file__).resolve().parents[2] / "tools"))


DIGITS_PARAMETERS = 9610
# That a rank of two sends in a step. Compression adds lengths, ranges and padding.
BYTES_PER_PARAMETER = {
    "gradient_allreduce": (4, 4),
    "bytegrad": (1, 1.05),
    "decentralized": (4, 4),
    # 18 of 60 steps are those of gradient all-reduce; then two rounds.
    "diloco-started": (1.3, 1.4),
}


def averaged_and_evaluated() -> dict[str, Any]:
    """Each rank has a linear model of its own, of ten samples all evaluate their part."""
    from measure.convergence.evaluation import evaluate, evaluate_alone, mean_over_ranks
    from measure.convergence.replicas import average
    from measure.convergence.task import Split, Task

    import bagua.torch_api as bagua

    rank, device = bagua.get_rank(), device_for(bagua.get_rank())
    bagua.init_process_group()
    generator = torch.Generator().manual_seed(1)
    inputs, labels = torch.randn(10, 4, generator=generator), torch.arange(10) % 3
    split = Split(inputs, labels).to(device)
    task = Task("test", split, split, lambda: torch.nn.Linear(4, 3), classifies=True, source="")
    replicas = torch.randn(bagua.get_world_size(), 15, generator=generator)
    found = average(replicas[rank].to(device))
    judge = task.build_model().to(device)
    worth = evaluate(task, judge, found.mean, split)
    alone = evaluate_alone(task, judge, found.mean, split)

    mean = replicas.mean(dim=0)
    outputs = inputs @ mean[:12].view(3, 4).T + mean[12:]
    torch.testing.assert_close(found.mean.cpu(), mean)
    loss = float(torch.nn.functional.cross_entropy(outputs, labels))
    right = float((outputs.argmax(dim=1) == labels).float().mean())
    for one in (worth, alone):
        assert (one.loss, one.accuracy) == pytest.approx((loss, right), rel=1e-5)
    largest = (replicas - mean).norm(dim=1).max() / mean.norm()
    assert found.spread == pytest.approx(float(largest), rel=1e-5)
    same = average(replicas[0].to(device))
    assert same.spread == 0.0
    assert torch.equal(same.mean.cpu(), replicas[0])
    assert mean_over_ranks(float(rank), device) == (bagua.get_world_size() - 1) / 2
    return {"loss": worth.loss, "mean": found.mean.tolist()}


def test_what_is_evaluated_is_the_mean_of_the_replicas() -> None:
    results = run_ranks(3, averaged_and_evaluated)
    assert all(result == results[0] for result in results)


def counted_bytes() -> list[float]:
    import torch.distributed as dist
    from measure.convergence.traffic import counted

    import bagua.torch_api as bagua
    from bagua.job.torch_internals import all_gather_flat

    rank, ranks = bagua.get_rank(), bagua.get_world_size()
    bagua.init_process_group()
    values = torch.zeros(3 * 8, device=device_for(rank))
    plain = dist.ProcessGroup.allreduce
    # The name that torch 2.13 has deprecated is that of 2.11.
    reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    found = []

    def sent_by(operation: Callable[[], object]) -> None:
        with counted() as sent:
            operation()
        found.append(sent.read())

    sent_by(lambda: dist.all_reduce(values))
    sent_by(lambda: all_gather_flat(values, values[:8].clone()))
    sent_by(lambda: dist.all_to_all_single(values.clone(), values))
    sent_by(lambda: reduce_scatter(values[:8].clone(), values))
    sent_by(lambda: dist.broadcast(values, 0))
    sent_by(lambda: dist.reduce(values, 0))
    right, left = (rank + 1) % ranks, (rank - 1) % ranks
    operations = [dist.P2POp(dist.isend, values, right), dist.P2POp(dist.irecv, values.clone(), left)]
    sent_by(lambda: [work.wait() for work in dist.batch_isend_irecv(operations)])
    assert dist.ProcessGroup.allreduce is plain
    return found


def test_bytes_are_counted() -> None:
    """Of 96 bytes, on three ranks: what the fastest algorithm of each collective sends, in mean over the ranks."""
    for found in run_ranks(3, counted_bytes):
        assert found == pytest.approx([128, 64, 64, 64, 64, 64, 96])


@pytest.mark.deep
@pytest.mark.timeout(240)
def test_algorithms_train_from_the_same_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    details, result, plot = tmp_path / "details.json", tmp_path / "convergence.json", tmp_path / "curves.png"
    words = ["--device", "cpu", "--tasks", "digits", "--algorithms", ",".join(BYTES_PER_PARAMETER)]
    words += ["--seeds", "1", "--steps", "60", "--details", str(details), "--json", str(result), "--plot", str(plot)]
    from measure.convergence import tool

    code = tool.main(words)
    document = json.loads(details.read_text())
    assert document["errors"] == [], capsys.readouterr().out
    trainings = document["turns"]
    assert [one["case"] for one in trainings] == [row["case"] for row in document["summary"]]
    assert [one["case"] for one in trainings] == list(BYTES_PER_PARAMETER)
    assert len({one["curve_loss"][0] for one in trainings}) == 1, "all algorithms begin with the same model"
    for one in trainings:
        assert one["curve_steps"] == sorted(one["curve_steps"])
        assert one["curve_bytes"] == sorted(one["curve_bytes"])
        least, most = BYTES_PER_PARAMETER[one["case"]]
        assert least <= one["curve_bytes"][-1] / one["steps"] / DIGITS_PARAMETERS <= most, one
        assert one["curve_loss"][-1] == one["test_loss"] < one["curve_loss"][0] / 2, one
        differ = one["case"] in ("decentralized", "diloco-started")
        assert (0 < one["spread"] < 1e-2) if differ else one["spread"] == 0, one
    verdicts = {row["case"]: row["verdict"] for row in document["summary"]}
    # So few steps are no training to the end: whether an algorithm holds is not asked here.
    assert verdicts.pop("gradient_allreduce") == ""
    assert code == (0 if set(verdicts.values()) == {"holds"} else 1)
    assert read_result(result).find("loss_difference", algorithm="bytegrad", model="digits").repetitions == 1
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.deep
@pytest.mark.timeout(240)
def test_fsdp_trains_as_it_does_without_compression(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from measure.convergence import tool

    details = tmp_path / "details.json"
    chosen = ["fsdp", "fsdp_weights-int4-differences"]
    words = ["--device", "cpu", "--tasks", "text-small", "--algorithms", ",".join(chosen), "--seeds", "1"]
    tool.main([*words, "--steps", "24", "--details", str(details)])
    document = json.loads(details.read_text())
    assert document["errors"] == [], capsys.readouterr().out
    trainings = document["turns"]
    assert [one["case"] for one in trainings] == chosen
    assert len({one["curve_loss"][0] for one in trainings}) == 1
    plain, compressed = (one["curve_bytes"][-1] for one in trainings)
    assert plain > 3 * compressed
    for one in trainings:
        assert one["test_loss"] == pytest.approx(trainings[0]["test_loss"], rel=0.05)
        assert one["test_loss"] < one["curve_loss"][0] - 0.3
