"""Lightning knows the name "bagua" without an import of ours, in both of its packages, and classes of ours for them."""

from __future__ import annotations

import copy
import importlib.util
import pickle

import pytest
from support.forked_program import run_programs
from support.ranks import run_ranks
from support.sweeps import rest_is_deep

if importlib.util.find_spec("lightning") is None:
    pytest.skip("needs lightning: pip install lightning", allow_module_level=True)

# Importing Lightning takes seconds, and minutes on a machine where everything else is being built.
TIMEOUT_S = 240

SCRIPT = """
import os, sys
import torch
assert "bagua.lightning_name" in sys.modules
assert "bagua.lightning" not in sys.modules and "lightning" not in sys.modules
import {package} as package
from {package} import strategies
assert "bagua" in strategies.StrategyRegistry
assert "bagua.lightning" not in sys.modules
# Who asks the module how it was loaded gets the answer that it would have got without us.
assert type(strategies.__spec__.loader).__module__ == "_frozen_importlib_external"
assert strategies.__loader__ is strategies.__spec__.loader
trainer = package.Trainer(strategy="bagua", accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
assert isinstance(trainer.strategy, strategies.DDPStrategy)
from bagua.lightning import BaguaStrategy
import lightning_bagua, lightning_bagua.strategy
from lightning_bagua.environment import BaguaEnvironment
assert isinstance(trainer.strategy, BaguaStrategy)
assert lightning_bagua.BaguaStrategy is lightning_bagua.strategy.BaguaStrategy is BaguaStrategy
# The environment of the old launchers.
assert not BaguaEnvironment.detect()
os.environ |= dict(MASTER_ADDR="10.0.0.1", MASTER_PORT="29500", BAGUA_SERVICE_PORT="29501", WORLD_SIZE="4", RANK="3",
                   LOCAL_RANK="1", NODE_RANK="1")
assert BaguaEnvironment.detect()
found = BaguaEnvironment()
assert (found.main_address, found.main_port, found.service_port) == ("10.0.0.1", 29500, 29501)
assert (found.world_size(), found.global_rank(), found.local_rank(), found.node_rank()) == (4, 3, 1, 1)
assert found.creates_processes_externally
"""


@pytest.mark.parametrize("package", rest_is_deep(["lightning.pytorch", "pytorch_lightning"], 0))
def test_the_name_is_known_and_the_strategy_is_imported_when_it_is_used(package: str) -> None:
    (done,) = run_programs(1, SCRIPT.format(package=package), timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr


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
