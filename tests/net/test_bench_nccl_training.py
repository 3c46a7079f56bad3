"""The DDP example, and the comparison of networks (`measure networks`), on CPUs with gloo."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("torch", reason="needs PyTorch, which is what trains")

sys.path.append(str(Path(__file__).resolve().parents[2] / "tools"))

from measure import all_reduce, networks
from support.labs import needs_lab
from support.tool_module import load_script

from bagua.net.bench.result_file import read_result


@pytest.fixture(scope="module")
def ddp_train() -> ModuleType:
    return load_script("examples/ddp_train.py")


@pytest.mark.deep
@pytest.mark.timeout(300)
def test_the_comparison_trains_and_finds_equal_losses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "networks.json"
    words = ["--device", "cpu", "--model", "mlp", "--length", "16", "--steps", "16", "--rounds", "1", "--warmup", "0"]
    words += ["--tuned", "none", "--timeout", "100", "--time-limit", "220", "--json", str(path)]
    code = networks.main([*words, "--output-dir", str(tmp_path)])
    assert code == 0, capsys.readouterr()
    result = read_result(path)
    losses = [result.find("loss", backend=name, model="mlp").median for name in ("nccl", "plugin")]
    assert losses[0] == losses[1]
    assert losses[0] < 2.0, "the model learns, so equal losses mean something"
    assert result.find("speedup", backend="plugin", model="mlp").repetitions == 1


@needs_lab
@pytest.mark.deep
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_all_reduce_goes_on_without_a_backend_that_fails_and_measures_a_network_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "all-reduce.json"
    words = ["--device", "cpu", "--networks", "free:9000:unknown", "--sizes", "4K,64K", "--rounds", "2"]
    words += ["--turn", "0.05", "--tuned", "none", "--lines", str(tmp_path / "lines"), "--json", str(path)]
    code = all_reduce.main([*words, "--network-limit", "200", "--variant", "broken:PYTHONHOME=/nonexistent"])
    assert code == 1
    assert "free:9000:unknown: bagua-net-bench exited with code 1" in capsys.readouterr().out
    first = read_result(path)
    for backend in ("nccl", "plugin"):
        assert first.find("time", backend=backend, size_bytes=1 << 16, told_mbps=-1, mtu=9000).repetitions == 2
    assert all_reduce.main(words) == 0, "nothing is left to measure"
    assert read_result(path).figures == first.figures


def test_vgg16_is_the_published_model(ddp_train: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    # Memory that nobody writes to costs nothing, and the device "meta" seconds when it is first used.
    for kind in (torch.nn.Conv2d, torch.nn.Linear):
        monkeypatch.setattr(kind, "reset_parameters", lambda _: None)
    model = ddp_train.vgg16(224)
    assert sum(parameter.numel() for parameter in model.parameters()) == 138_357_544
    convolutions = [layer for layer in model if isinstance(layer, torch.nn.Conv2d)]
    assert len(convolutions) == 13
    assert ddp_train.vgg16(32)(torch.empty(2, 3, 32, 32)).shape == (2, 1000)


def test_the_example_never_imports_bagua(repository: Path) -> None:
    text = (repository / "examples" / "ddp_train.py").read_text()
    assert "import bagua" not in text.replace("It never imports bagua", "")
    assert "from bagua" not in text


@pytest.mark.parametrize(
    ("words", "rank", "says"),
    [
        ([], None, "start it with torchrun"),
        (["--backend", "nccl"], "0", "needs a GPU for each rank, and torch sees none; use --backend gloo"),
        (["--json", "/nonexistent/x.json"], "0", "folder /nonexistent does not exist; create it first"),
    ],
)
def test_the_example_says_at_once_what_would_end_it_later(
    words: list[str],
    rank: str | None,
    says: str,
    ddp_train: ModuleType,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["ddp_train.py", *words])
    monkeypatch.delenv("RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    with pytest.raises(SystemExit, match="2"):
        ddp_train.main()
    assert says in capsys.readouterr().err
