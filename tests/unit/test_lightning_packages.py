"""Lightning's two packages, and classes of ours for them. In ranks: importing Lightning takes seconds."""

from __future__ import annotations

import copy
import importlib.util
import pickle

import pytest
from support.ranks import run_ranks

if importlib.util.find_spec("lightning") is None:
    pytest.skip("needs lightning: pip install lightning", allow_module_level=True)


def _in_a_rank() -> list[str]:
    from bagua.lightning import BaguaStrategy, CommunicationMonitor, packages

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packages, "packages_in_use", list)
        patch.setattr(importlib.util, "find_spec", lambda _: None)
        with pytest.raises(ImportError, match="pip install lightning"):
            packages.package_in_use()
        patch.setattr(importlib.util, "find_spec", lambda _: object())
        chosen = []
        for in_use in ([], [0], [1], [0, 1]):
            patch.setattr(packages, "packages_in_use", lambda in_use=in_use: [packages.PACKAGES[one] for one in in_use])
            chosen.append(packages.package_in_use())
    for one, name in ((BaguaStrategy(algorithm="bytegrad"), "_algorithm"), (CommunicationMonitor(7), "every_n_steps")):
        for other in (pickle.loads(pickle.dumps(one)), copy.deepcopy(one)):
            assert type(other) is type(one)
            assert getattr(other, name) == getattr(one, name)
    with pytest.raises(ValueError, match="every_n_steps=0: must be at least 1"):
        CommunicationMonitor(0)
    return chosen


def test_packages_and_classes() -> None:
    """The usual package is chosen unless the other is in use, and a missing one is named. Classes can be pickled."""
    usual, other = "lightning.pytorch", "pytorch_lightning"
    assert run_ranks(1, _in_a_rank, lightning=True) == [[usual, usual, other, usual]]
