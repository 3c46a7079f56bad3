"""What error messages tell to use exists: names of functions and classes, arguments, environment variables."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.utils.checkpoint
from support.ranks import run_ranks

import bagua
from bagua import env
from bagua.error_text import one_line

FOLDERS = ("engine", "job", "collectives", "torch_api", "comm_ops", "comm_hooks", "lightning")
# Of torch, with what takes them.
ARGUMENTS_OF_TORCH: dict[str, Any] = {
    "use_reentrant": torch.utils.checkpoint.checkpoint,
    "sparse": torch.nn.Embedding,
    "drop_last": torch.utils.data.DataLoader,
    "assign": torch.nn.Module.load_state_dict,
    "device": torch.nn.Module.to_empty,
    "create_graph": torch.autograd.backward,
    "differentiable": torch.optim.SGD,
    "fused": torch.optim.SGD,
}
ARGUMENTS_OF_OTHERS = {"put_on_device"}  # Accelerate's dataloader configuration


def _sources() -> Iterator[ast.Module]:
    for folder in FOLDERS:
        for path in sorted(Path(bagua.__file__).parent.joinpath(folder).rglob("*.py")):
            yield ast.parse(path.read_text())


def _texts(tree: ast.Module) -> Iterator[str]:
    """All that is said, but for docstrings; of what is formatted, a value is "0"."""
    docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    inside = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and not {id(node)} & (docs | inside):
            yield node.value
        elif isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "0" for part in node.values)


def _missing(names: list[str]) -> list[str]:
    """In a rank, which has imported Lightning."""
    return [name for name in names if not _exists(name)]


def _exists(dotted: str) -> bool:
    parts = dotted.split(".")
    found: Any = importlib.import_module(parts[0])
    for number, part in enumerate(parts[1:], 2):
        if not hasattr(found, part):
            try:
                importlib.import_module(".".join(parts[:number]))
            except ImportError:
                return False
        found = getattr(found, part)
    return True


def test_what_messages_name_exists() -> None:
    trees = list(_sources())
    texts = [text for tree in trees for text in _texts(tree) if " " in text]
    assert len(texts) > 200
    names = {name for text in texts for name in re.findall(r"\b(?:bagua|torch)(?:\.[A-Za-z_]\w*)+", text)}
    assert "torch.autograd.grad" in names
    assert run_ranks(1, _missing, sorted(names), lightning=True) == [[]]
    variables = {name for text in texts for name in re.findall(r"\bBAGUA_\w+", text)}
    assert variables
    assert variables <= env.SETTINGS, variables
    keywords = {name for text in texts for name in re.findall(r"\b([a-z]\w*)=(?:True|False|None)\b", text)}
    assert "find_unused_parameters" in keywords
    for name in keywords & set(ARGUMENTS_OF_TORCH):
        assert name in inspect.signature(ARGUMENTS_OF_TORCH[name]).parameters, name
    ours = {
        argument.arg
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        for argument in (*node.args.args, *node.args.kwonlyargs)
    }
    assert keywords - set(ARGUMENTS_OF_TORCH) - ARGUMENTS_OF_OTHERS - ours == set()


def test_a_cause_that_is_too_long_ends_after_a_word() -> None:
    error = RuntimeError("Broken pipe.\nCheck the logs of others")
    assert one_line(error, 45) == "RuntimeError: Broken pipe. Check the logs ..."
    assert one_line(error, 100) == "RuntimeError: Broken pipe. Check the logs of others"
