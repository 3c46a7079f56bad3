"""Lightning's two packages, and classes of ours for them. In ranks: importing Lightning takes seconds."""

from __future__ import annotations

import copy
import importlib.util
import pickle

import pytest
from support.ranks import run_ranks

if importlib.util.find_spec("lightning") is None:
    pytest.skip("needs lightning: pip install lightning", allow_module_level=True)


def _without_a_package() -> None:
    from bagua.lightning import packages

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packages, "packages_in_use", list)
        patch.setattr(importlib.util, "find_spec", lambda _: None)
        with pytest.raises(ImportError, match="pip install lightning"):
            packages.package_in_use()


def test_a_missing_extra_is_named() -> None:
    run_ranks(1, _without_a_package, lightning=True)


def _chosen() -> list[str]:
    from bagua.lightning import packages

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(importlib.util, "find_spec", lambda _: object())
        chosen = []
        for in_use in ([], [0], [1], [0, 1]):
            patch.setattr(packages, "packages_in_use", lambda in_use=in_use: [packages.PACKAGES[one] for one in in_use])
            chosen.append(packages.package_in_use())
        return chosen


def test_the_usual_package_is_chosen_unless_the_other_is_in_use() -> None:
    usual, other = "lightning.pytorch", "pytorch_lightning"
    assert run_ranks(1, _chosen, lightning=True) == [[usual, usual, other, usual]]


def _pickled() -> str:
    from bagua.lightning import BaguaStrategy, CommunicationMonitor

    for one, name in ((BaguaStrategy(algorithm="bytegrad"), "_algorithm"), (CommunicationMonitor(7), "every_n_steps")):
        for other in (pickle.loads(pickle.dumps(one)), copy.deepcopy(one)):
            assert type(other) is type(one)
            assert getattr(other, name) == getattr(one, name)
    with pytest.raises(ValueError, match="every_n_steps") as raised:
        CommunicationMonitor(0)
    return str(raised.value)


def test_strategy_and_callback_can_be_pickled() -> None:
    assert run_ranks(1, _pickled, lightning=True) == ["every_n_steps=0: must be at least 1"]
