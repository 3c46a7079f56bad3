"""The examples of other frameworks, which never import bagua: NCCL names the plugin, and losses stay what they were."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from support.gpu_job import RANKS, RunJob
from support.ranks import visible_gpus

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

EXAMPLES = Path(__file__).parents[2] / "examples"


def loss_of(output: str) -> str:
    return next(line for line in output.splitlines() if line.startswith("loss "))


@pytest.mark.parametrize(
    ("package", "words"),
    [("accelerate", []), ("transformers", []), *(("deepspeed", ["--stage", str(stage)]) for stage in (1, 2, 3))],
)
def test_one_variable_changes_the_network_alone(run_job: RunJob, package: str, words: list[str]) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"needs {package}: pip install {package}")
    script = EXAMPLES / f"train_{package}.py"
    # As its users start it, where there is a GPU for each rank.
    as_launched = len(visible_gpus()) >= RANKS
    ours = run_job(*words, script=script, as_launched=as_launched, ENABLE_BAGUA_NET="1")
    assert ours.code == 0, ours.output
    assert ours.networks == {"BaguaNet"}
    assert len(ours.proofs) >= RANKS
    theirs = run_job(*words, script=script, as_launched=as_launched)
    assert (theirs.code, theirs.networks) == (0, {"Socket"}), theirs.output
    assert loss_of(ours.output) == loss_of(theirs.output)
