"""The tests of the training core again, on GPUs and with NCCL instead of gloo: those of
support.cuda_choice, or with BAGUA_TEST_CHOICE=all all tests of its files. Where there are fewer GPUs than a test has
ranks, these share them."""

from __future__ import annotations

import os

import pytest
from support.cuda_choice import all_files, chosen_tests
from support.lanes import belongs_to, run_lanes
from support.ranks import visible_gpus

CHOICE_VARIABLE = "BAGUA_TEST_CHOICE"
EVERYTHING = os.environ.get(CHOICE_VARIABLE) == "all"
DEADLINE_S = 3600 if EVERYTHING else 270 if len(visible_gpus()) > 1 else 420


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.timeout(DEADLINE_S + 20)
def test_on_gpus(subtests: pytest.Subtests) -> None:
    """One test for all lanes, which share the GPUs out among themselves. What failed is told by file."""
    report = run_lanes(all_files() if EVERYTHING else chosen_tests(), visible_gpus(), DEADLINE_S)
    skipped, passed = report.of_kind("skipped"), report.of_kind("passed")
    print(f"{len(passed)} passed, {len(skipped)} skipped")
    for outcome in skipped:
        print(f"skipped {outcome.test}: {outcome.text}")
    for outcome in sorted(passed, key=lambda one: -one.seconds):
        print(f"{outcome.seconds:6.1f} s {outcome.test}")
    failed = report.of_kind("failed")
    for file in all_files():
        texts = [f"{outcome.test}\n{outcome.text}" for outcome in failed if belongs_to(outcome.test, file)]
        if texts:
            with subtests.test(file):
                pytest.fail("\n".join(texts), pytrace=False)
    for problem in report.problems:
        with subtests.test("lane"):
            pytest.fail(problem, pytrace=False)
    assert passed or failed or report.problems, "every test was skipped"
