"""Lightning's two packages, and classes of ours for them."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

from bagua.lightning import packages

# In a process of its own: importing Lightning takes seconds and warns.
PICKLES = """
import copy, pickle
from bagua.lightning import BaguaStrategy, CommunicationMonitor
for one, name in ((BaguaStrategy(algorithm="bytegrad"), "_algorithm"), (CommunicationMonitor(7), "every_n_steps")):
    for other in (pickle.loads(pickle.dumps(one)), copy.deepcopy(one)):
        assert type(other) is type(one) and getattr(other, name) == getattr(one, name)
try:
    CommunicationMonitor(0)
except ValueError as error:
    print(error)
"""


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "packages_in_use", list)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ImportError, match=r"pip install 'bagua\[lightning\]'"):
        packages.package_in_use()


def test_the_usual_package_is_chosen_unless_the_other_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: object())
    for in_use, chosen in (([], 0), ([0], 0), ([1], 1), ([0, 1], 0)):
        monkeypatch.setattr(
            packages, "packages_in_use", lambda in_use=in_use: [packages.PACKAGES[one] for one in in_use]
        )
        assert packages.package_in_use() == packages.PACKAGES[chosen]


def test_strategy_and_callback_can_be_pickled() -> None:
    pytest.importorskip("lightning", reason="needs lightning: pip install 'bagua[lightning]'")
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", PICKLES], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "every_n_steps=0: must be at least 1\n"
