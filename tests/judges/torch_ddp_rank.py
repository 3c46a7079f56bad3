"""One rank of torch's own tests of DDP, with Bagua's wrapper in the place of torch's.

torch's harness starts two processes for each test. Here the processes stay, and make one process group after the other:
a test takes as long as its steps. `prepare` comes first, once, and then `run_test` on both ranks.

Each test finds what it finds in torch's harness, and no more: the first GPU is current on every rank, and the
environment has the variables that torch's harness sets, and none of a launcher.
"""

from __future__ import annotations

import contextlib
import datetime
import gc
import os
import re
import tempfile
import traceback
import unittest
import warnings
from pathlib import Path
from typing import Any, NamedTuple

PASSED, SKIPPED, FAILED = "PASS", "SKIP", "FAIL"
WRAPPERS = ("bagua", "torch")
# Of launchers, which torch's harness is not. It sets WORLD_SIZE and MASTER_ADDR.
_OF_LAUNCHERS = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK", "MASTER_PORT")


class Outcome(NamedTuple):
    """Of a test in one rank: PASSED, SKIPPED or FAILED, and why not passed."""

    verdict: str
    reason: str = ""


def prepare(pretended: bool, rank: int, wrapper: str = "bagua", world_size: int = 2) -> None:
    """Imports torch's tests, which read the environment then, and puts the wrapper in their way.

    Args:
        pretended: whether a CPU passes for the GPUs, with gloo.
        wrapper: one of WRAPPERS. torch's shows what a failure is worth.
    """
    import torch
    from judges import pretended_gpus

    global _rank
    _rank = rank
    for name in _OF_LAUNCHERS:
        os.environ.pop(name, None)
    os.environ.update(BACKEND="gloo" if pretended else "nccl", WORLD_SIZE=str(world_size))
    os.environ.update(TEMP_DIR=tempfile.gettempdir(), PYTORCH_PRINT_REPRO_ON_FAILURE="0")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, about itself
        if pretended:
            pretended_gpus.pretend()
        from torch.testing._internal.distributed import distributed_test

    os.environ["MASTER_ADDR"] = distributed_test.MASTER_ADDR
    found: Any = torch.nn.parallel.DistributedDataParallel
    if wrapper == "bagua":
        from bagua.torch_api.data_parallel import DistributedDataParallel

        found = DistributedDataParallel
    if pretended:
        found = pretended_gpus.without_device_ids(found)
    torch.nn.parallel.DistributedDataParallel = found
    torch.nn.parallel.distributed.DistributedDataParallel = found
    distributed_test.DistributedDataParallel = found


def names_of_tests() -> list[str]:
    """The tests of the installed torch that make a wrapper, in the order of its file. After `prepare`."""
    from torch.testing._internal.distributed import distributed_test

    source = Path(distributed_test.__file__).read_text(encoding="utf-8")
    text = _texts_of_functions(source)
    return [name for name in dir(_case_class()) if name.startswith("test_") and _wraps(_written_as(name, text), text)]


def _texts_of_functions(source: str) -> dict[str, str]:
    parts = re.split(r"^        def (\w+)\(", source, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def _written_as(name: str, text: dict[str, str]) -> str:
    """A parametrized test has its values behind the name of its function."""
    return max((one for one in text if name.startswith(one)), key=len, default=name)


def _wraps(name: str, text: dict[str, str], seen: frozenset[str] = frozenset()) -> bool:
    body = text.get(name, "")
    if "DistributedDataParallel(" in body:
        return True
    called = set(re.findall(r"self\.(_?\w+)\(", body)) & set(text) - seen - {name}
    return any(_wraps(one, text, seen | {name}) for one in called)


def _case_class() -> Any:
    from torch.testing._internal.distributed import distributed_test

    global _case
    if _case is None:

        class Case(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
            pass

        _case = Case
    return _case


_case: Any = None
_rank = -1  # before `prepare`


def run_test(name: str, folder: str) -> Outcome:
    """
    Args:
        name: of one of `names_of_tests`.
        folder: empty, of this test alone, the same on both ranks.
    """
    import torch
    import torch.distributed as dist
    from torch.testing._internal import common_utils
    from torch.testing._internal.distributed import distributed_test

    size = int(os.environ["WORLD_SIZE"])
    os.environ["TEMP_DIR"] = folder
    for one in ("barrier", "test_dir", "init_dir"):
        Path(folder, one).mkdir(exist_ok=True)
    distributed_test.Barrier.barrier_id = 0
    case = _case_class()(name)
    if getattr(getattr(case, name), "__unittest_skip__", False):
        return Outcome(SKIPPED, getattr(case, name).__unittest_skip_why__)
    case.rank, case.file_name = _rank, str(Path(folder, "store"))
    if os.environ["BACKEND"] == "nccl" and torch.cuda.current_device() != 0:
        torch.cuda.set_device(0)  # as in a new process: an earlier test may have set another
    dist.init_process_group(
        os.environ["BACKEND"],
        init_method=f"file://{case.file_name}",
        world_size=size,
        rank=_rank,
        timeout=datetime.timedelta(seconds=distributed_test.CUSTOM_PG_TIMEOUT.get(name, 60)),
    )
    common_utils.set_rng_seed()
    before = dict(os.environ)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("default")
            getattr(case, name)()
    except unittest.SkipTest as error:
        return Outcome(SKIPPED, str(error))
    except SystemExit as error:
        return _exit_outcome(error.code)
    except Exception:
        return Outcome(FAILED, traceback.format_exc())
    finally:
        os.environ.clear()
        os.environ.update(before)
        gc.collect()  # as the end of a process: what this test leaves is not the next one's
        with contextlib.suppress(Exception):
            dist.destroy_process_group()
    return Outcome(PASSED)


def _exit_outcome(code: Any) -> Outcome:
    from torch.testing._internal.common_distributed import TEST_SKIPS

    for skip in TEST_SKIPS.values():
        if skip.exit_code == code:
            return Outcome(SKIPPED, skip.message)
    return Outcome(FAILED, f"the test ended its process with {code!r}")
