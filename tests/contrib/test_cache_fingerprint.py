"""The fingerprint of a dataset changes with what its samples depend on, and with nothing else."""

from __future__ import annotations

import dataclasses
import enum
import functools
import os
import subprocess
import sys
import textwrap
import threading
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bagua.contrib.caching.fingerprint import fingerprint_of

SOURCE = """
import dataclasses, enum, functools, pathlib, re
import numpy as np
import torch
from torch.utils.data import Dataset

SIZE = 3
PATTERN = re.compile("a+")
LABELS = {"cat", "dog", "bird"}

class Mode(enum.Enum):
    FAST = 1
    SLOW = 2

def helper(x):
    return x + SIZE

@functools.cache
def cached(x):
    return x * 2

def unused(x):
    return x

@dataclasses.dataclass
class Options:
    mode: Mode = Mode.FAST
    names: list = dataclasses.field(default_factory=list)

class Transform:
    scale = 2
    def __call__(self, x):
        return [self.inner(one) for one in [x]][0]
    def inner(self, x):
        return helper(x) * self.scale if x not in {"p", "q", "r"} else cached(x)

class Data(Dataset):
    def __init__(self, root="/data"):
        self.root = pathlib.Path(root)
        self.transform = Transform()
        self.options = Options()
        self.table = np.arange(5)
        self.weights = torch.ones(3)
        self.labels = LABELS
        self.function = lambda x, k=1: x + k
        self.partial = functools.partial(helper, 1)
        self.itself = self
    def __getitem__(self, index):
        return self.transform(index), PATTERN, Mode.SLOW
    def __len__(self):
        return 3
"""


def dataset(source: str = SOURCE, **attributes: Any) -> Any:
    module = types.ModuleType("own_code")
    sys.modules["own_code"] = module
    exec(compile(source, "own_code.py", "exec"), vars(module))
    made = module.Data()
    vars(made).update(attributes)
    return made


def test_it_is_the_same_in_every_process(tmp_path: Path) -> None:
    """Compiled here or loaded from a file, whatever the seed of hashes."""
    (tmp_path / "own_code.py").write_text(SOURCE)
    program = (
        "from bagua.contrib.caching.fingerprint import fingerprint_of; import own_code\n"
        "print(fingerprint_of(own_code.Data()))"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "PYTHONHASHSEED": "1"}
    command = [sys.executable, "-W", "error", "-c", program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == fingerprint_of(dataset())
    assert len(done.stdout.strip()) == 32


def test_it_does_not_change_by_itself() -> None:
    first = dataset()
    assert fingerprint_of(first) == fingerprint_of(first) == fingerprint_of(dataset())
    # A script's `options` and `inner` are none of what `self.options` and `self.inner` mean.
    namesakes = SOURCE + "\noptions = __import__('threading').Lock()\ninner = transform = object()\n"
    assert fingerprint_of(dataset(namesakes)) == fingerprint_of(first)
    shared = [1, 2]
    assert fingerprint_of(dataset(a=[shared, shared])) == fingerprint_of(dataset(a=[[1, 2], [1, 2]]))
    moved = "# a comment\n\n" + SOURCE.replace("def unused(x):\n    return x", "def unused(x):\n    return x + 9")
    assert fingerprint_of(dataset(moved)) == fingerprint_of(first)


def test_globals_of_inner_functions_and_classes_count() -> None:
    inner = SOURCE.replace("return x + SIZE", "class Inner:\n        size = [y for y in (SIZE,)]\n    return x, Inner")
    by_lambda = SOURCE.replace("return x + SIZE", "return (lambda: SIZE)()")
    for source in (inner, by_lambda):
        assert fingerprint_of(dataset(source)) != fingerprint_of(dataset(source.replace("SIZE = 3", "SIZE = 4")))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("return x + SIZE", "return x - SIZE"),
        ("SIZE = 3", "SIZE = 4"),
        ("scale = 2", "scale = 3"),
        ("return x * 2", "return x * 3"),
        ("FAST = 1", "FAST = 5"),
        ('re.compile("a+")', 're.compile("b+")'),
        ('"cat", "dog"', '"cat", "cow"'),
        ("k=1", "k=2"),
        ('x not in {"p", "q", "r"}', 'x not in {"p", "q", "s"}'),
        ("self.transform(index), PATTERN", "PATTERN, self.transform(index)"),
        ('root="/data"', 'root="/other"'),
        ("np.arange(5)", "np.arange(6)"),
        ("torch.ones(3)", "torch.zeros(3)"),
        ("partial(helper, 1)", "partial(helper, 2)"),
        ("class Transform:", "class Transform(Options):"),
        ("default_factory=list", "default_factory=tuple"),
        ("mode: Mode = Mode.FAST", "mode: Mode = Mode.SLOW"),
    ],
)
def test_it_changes_with_code_and_values(old: str, new: str) -> None:
    assert old in SOURCE
    assert fingerprint_of(dataset(SOURCE.replace(old, new))) != fingerprint_of(dataset())


def test_values_that_look_alike_differ() -> None:
    values: list[Any] = [1, 1.0, True, "1", b"1", None, range(1), (1,), [1], {1}, frozenset({1}), {1: 1}]
    values += [[[1]], [1, []], [[], 1], ([], 1), ["1", "2"], ["1, 2"], ["1', '2"]]
    assert len({fingerprint_of(dataset(added=value)) for value in values}) == len(values)


def test_the_version_of_an_installed_package_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    import PIL.ImageFilter

    before = fingerprint_of([PIL.ImageFilter.BLUR])
    monkeypatch.setattr("PIL.__version__", "0.0")
    assert fingerprint_of([PIL.ImageFilter.BLUR]) != before


def test_ordinary_values_have_one() -> None:
    wrapped = functools.wraps(textwrap.dedent)(lambda text: text)
    fields = dataclasses.make_dataclass("Made", ["x"])
    fingerprint_of([wrapped, fields(1), enum.Enum("E", "A B").A, len, [].append, 1j, ..., Path, sys, slice(1), {}.get])


@pytest.mark.filterwarnings("ignore:Sparse ... tensor support", "ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize(
    "make",
    [
        lambda table: table.to_sparse(),
        lambda table: table.to_sparse_csr(),
        lambda table: table.to_sparse_csc(),
        lambda table: table.to_sparse_bsr((2, 3)),
        lambda table: table.to_sparse_bsc((2, 3)),
        lambda table: table.to_mkldnn(),
        lambda table: torch.quantize_per_tensor(table, 0.1, 0, torch.quint8),
        lambda table: torch.quantize_per_channel(table, table[:, 0] + 1, torch.zeros(4), 0, torch.quint8),
        lambda table: torch.complex(table, table).conj(),
        lambda table: torch.complex(table, table).conj().imag,
        lambda table: table[1:2, 1],
        lambda table: table[1, 1].expand(3),
        nn.Parameter,
    ],
)
def test_tensors_of_every_kind_count(make: Any) -> None:
    table = torch.arange(12.0).view(4, 3)
    first = fingerprint_of([make(table), 1])
    assert fingerprint_of([make(table.clone()), 1]) == first
    assert fingerprint_of([make(table + 0.5), 1]) != first


def test_flags_of_views_are_no_difference_and_shapes_are() -> None:
    conjugate = torch.complex(torch.ones(4, 3), torch.ones(4, 3)).conj()
    assert fingerprint_of([conjugate, 1]) == fingerprint_of([conjugate.resolve_conj(), 1])
    assert fingerprint_of([torch.ones(2, device="meta"), 1]) != fingerprint_of([torch.ones(3, device="meta"), 1])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_what_has_no_state_is_an_error_with_its_remedy() -> None:
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    locked = dataset(SOURCE.replace("x + SIZE", "x + LOCK") + "import threading; LOCK = threading.Lock()")
    for value, told in (
        ([nested, 1], r"list\[0\] cannot be computed"),
        (dataset(lock=threading.Lock()), r"Data\.lock cannot be computed: a _thread\.lock has no"),
        (locked, r"own_code\.LOCK"),
    ):
        with pytest.raises(TypeError, match=rf"fingerprint of {told}(.|\n)*fingerprint='\.\.\.'"):
            fingerprint_of(value)
