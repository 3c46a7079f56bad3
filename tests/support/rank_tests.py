"""Tests whose body runs in every rank of a job:

@pytest.mark.parametrize("how", WRAPPERS)
@on_ranks(2)
def test_replicas_stay_equal(rank: int, device: torch.device, how: str) -> None: ...
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from support.ranks import run_ranks
from support.training import begin

PLACE = ("rank", "device")
RANKS = inspect.Parameter("ranks", inspect.Parameter.POSITIONAL_OR_KEYWORD)
Test = Callable[..., None]


def on_ranks(
    world_size: int | None = None,
    *,
    joined: bool = True,
    fresh: bool = False,
    timeout: float = 120,
    env: Mapping[str, str] | Sequence[Mapping[str, str]] | None = None,
    expect_death: Collection[int] = (),
    lightning: bool = False,
) -> Callable[[Test], Test]:
    """
    Calls the test by `run_ranks`. The ranks have joined the job (support.training.begin); the test's arguments `rank`
    and `device` are what `begin` returns. Other arguments are pytest's, and are pickled.

    Args:
        world_size: None: pytest's parameter `ranks`, which the test may have as an argument as well.
        joined: if False, the test joins by itself, or does not.
        fresh: in processes that no other test uses: for a test that changes what stays, such as settings of modules
            and the default group. Those of a test that is not `joined` are fresh.
        timeout, env, expect_death, lightning: as of `run_ranks`.
    """

    def decorate(test: Test) -> Test:
        signature = inspect.signature(test)
        asked = [name for name in PLACE if name in signature.parameters]
        own = {name: one for name, one in signature.parameters.items() if name not in asked}

        @functools.wraps(test)
        def in_rank(given: dict[str, Any]) -> None:
            place = dict(zip(PLACE, begin(), strict=True)) if joined else {}
            test(**{name: place[name] for name in asked}, **given)

        @functools.wraps(test)
        def run(**given: Any) -> None:
            run_ranks(
                world_size or given["ranks"],
                in_rank,
                {name: value for name, value in given.items() if name in own},
                timeout=timeout,
                env=env,
                expect_death=expect_death,
                reuse=joined and not fresh,
                lightning=lightning,
            )

        # A rank finds it by its name.
        in_rank.__qualname__ = f"{test.__qualname__}.in_rank"
        run.in_rank = in_rank  # type: ignore[attr-defined]
        of_pytest = [] if world_size or "ranks" in own else [RANKS]
        run.__signature__ = signature.replace(parameters=[*own.values(), *of_pytest])  # type: ignore[attr-defined]
        return run

    return decorate
