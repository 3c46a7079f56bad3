"""`make docs` writes a reference with every public module and name in it."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
GENERATOR = REPOSITORY / "tools" / "docs" / "generate_api.py"


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("api")
    result = subprocess.run(
        [sys.executable, str(GENERATOR), str(folder)], capture_output=True, text=True, timeout=240, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return folder


@pytest.mark.parametrize(
    "name",
    [
        *("bagua.torch_api", "bagua.torch_api.communication", "bagua.torch_api.bucket", "bagua.torch_api.distributed"),
        *("bagua.torch_api.data_parallel.distributed", "bagua.torch_api.algorithms.base", "bagua.engine.bucket_op"),
    ],
)
def test_module_has_its_page(reference: Path, name: str) -> None:
    page = (reference / (name.replace(".", "/") + ".html")).read_text()
    module = importlib.import_module(name)
    names = [one for one in getattr(module, "__all__", []) if not one.startswith("_")]
    folder = name.rpartition(".")[2]
    missing = [one for one in names if f'id="{one}"' not in page and f"{folder}/{one}.html" not in page]
    assert missing == []
    assert (module.__doc__ or "").split("\n")[0].split("`")[0][:40].strip() in page


def test_docstrings_are_in_it(reference: Path) -> None:
    page = (reference / "bagua/torch_api/distributed.html").read_text()
    assert "Train this module in parallel with the same module of the other ranks." in page
    assert "<h6" in page
    assert "Raises" in page


def test_index_leads_to_the_package(reference: Path) -> None:
    assert "bagua/torch_api.html" in (reference / "index.html").read_text()
