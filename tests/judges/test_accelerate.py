"""Accelerate's own test of gradient accumulation, which its wheel ships, with our wrapper in place of torch's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.ranks import run_ranks

from bagua.torch_api.data_parallel import DistributedDataParallel

made: list[DistributedDataParallel] = []


class OursForTorchs(DistributedDataParallel):
    """Accelerate initializes torch.distributed by itself, and nobody initializes Bagua."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        made.append(self)


def _test_sync() -> None:
    from accelerate.test_utils.scripts import test_sync

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.parallel, "DistributedDataParallel", OursForTorchs)
        test_sync.main()
    assert len(made) == 3  # the tests that it has for several ranks of CPUs


def test_its_test_sync() -> None:
    run_ranks(2, _test_sync, env={"ACCELERATE_USE_CPU": "true"})
