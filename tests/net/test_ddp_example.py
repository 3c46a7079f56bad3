"""The DDP example: its model, and what it says at once."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest
from support.tool_module import load_script

pytest.importorskip("torch", reason="needs PyTorch, which is what trains")


@pytest.fixture(scope="module")
def ddp_train() -> ModuleType:
    return load_script("examples/ddp_train.py")


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
