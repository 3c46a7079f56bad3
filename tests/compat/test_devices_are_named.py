"""What Bagua asks of CUDA names a device: the current one says nothing about a module. Read from the sources."""

from __future__ import annotations

import ast

import pytest
from support.import_arrows import PACKAGE, REPOSITORY, python_files

# Of torch.cuda, and of what has a device when it is told none: the current one.
OF_CUDA = {"current_device", "current_stream", "default_stream", "synchronize", "Stream", "stream"}
OF_ANYTHING = {"cuda", "record"}
# Where the current device is meant.
ALLOWED = {
    "bagua/collectives/carrier_device.py: torch.cuda.current_device()": "the last choice, where nothing names a device",
    "bagua/collectives/initialization.py: torch.cuda.current_device()": "regroup: before there is a module; compared",
    "bagua/kernels/minmax_uint8_triton_launch.py: torch.cuda.current_device()": "makes the tensor's device current",
    "bagua/job/torch_internals.py: torch.device('cuda')": "a kind of device, to ask for its backend",
}


def calls_without_device(source: str) -> list[str]:
    """As they are written."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.keyword) and node.arg == "device" and ast.unparse(node.value) == "'cuda'":
            found.append("device='cuda'")
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        given = [*node.args, *(one.value for one in node.keywords if one.arg in ("device", "stream", None))]
        owner, name = ast.unparse(node.func.value), node.func.attr
        is_unnamed = not given and (name in OF_ANYTHING or (owner == "torch.cuda" and name in OF_CUDA))
        if is_unnamed or ast.unparse(node) == "torch.device('cuda')":
            found.append(ast.unparse(node))
    return found


@pytest.mark.parametrize(
    ("line", "is_found"),
    [
        ("torch.cuda.current_stream()", True),
        ("torch.cuda.current_stream(tensor.device)", False),
        ("torch.cuda.Stream(priority=-1)", True),
        ("torch.cuda.Stream(device, -1)", False),
        ("event.record()", True),
        ("event.record(stream)", False),
        ("model.cuda()", True),
        ("torch.empty(3, device='cuda')", True),
        ("tensor.to(torch.device('cuda'))", True),
        ("torch.device('cuda', 1)", False),
        ("stream.synchronize()", False),
    ],
)
def test_what_is_found(line: str, is_found: bool) -> None:
    assert bool(calls_without_device(line)) is is_found


def test_nothing_uses_the_current_device() -> None:
    files = [path for path in python_files(".") if path.relative_to(PACKAGE).parts[0] != "net"]
    found = {
        f"{path.relative_to(REPOSITORY)}: {call}" for path in files for call in calls_without_device(path.read_text())
    }
    assert found == set(ALLOWED)
