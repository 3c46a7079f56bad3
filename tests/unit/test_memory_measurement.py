"""`measure memory` without ranks: the probe, what is stated, rows. Real ranks are in
tests/distributed/test_memory_measurement.py."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs PyTorch, which is what trains")
import torch

sys.path.append(str(Path(__file__).resolve().parents[2] / "tools"))

from measure.memory.catalogue import CASES, FLAT, SUMMED_AT_ONCE_BYTES, THREAD_KEEPS_BYTES, Stated
from measure.memory.tool import GLOO_BYTES, Measured, row_of
from measure.memory_probe import Probe

from bagua.comm_ops.all_reduce import WINDOW_BYTES
from bagua.kernels.scratch_memory import KEPT_BYTES

MIB = 1 << 20
PARAMETERS = 10 * MIB


def event(kept: float, peak: float, parameters: int = PARAMETERS) -> dict[str, Any]:
    """In bytes per parameter of ten mebi."""
    return {
        "parameters": parameters,
        "kept": int(kept * parameters),
        "peak": int(peak * parameters),
        "buckets": [parameters // 4, parameters // 2],
    }


PLAIN = Measured([event(12, 12), event(12, 13)], [event(12, 12), event(12, 12)])


def row(case: str, kept: float, peak: float) -> Any:
    found = Measured([event(12, 12), event(12 + kept, 13 + peak)], [event(12, 12), event(12, 12 + peak + 1)])
    return row_of(case, found, PLAIN, ranks=2, device="cuda", transport=GLOO_BYTES)


class TestStated:
    def test_sums(self) -> None:
        stated = Stated(kept=8, kept_of_bucket=4, scratch=1, exchanged=lambda ranks, _device: 2 + 3 / ranks)
        assert stated.kept_bytes(100, 10, 4, "cuda") == 840
        assert stated.peak_bytes(100, 10, 4, "cuda") == 840 + 100
        assert stated.peak_bytes(100, 80, 4, "cuda") == 1120 + 220

    def test_the_thread_on_a_cpu_keeps_what_communication_needs(self) -> None:
        stated = Stated(kept=8, scratch=1, exchanged=lambda ranks, _device: 2 + 3 / ranks)
        assert stated.kept_bytes(100, 80, 4, "cpu") == 800 + 220
        assert stated.peak_bytes(100, 80, 4, "cpu") == 800 + 220

    def test_the_thread_keeps_no_more_than_its_limit(self) -> None:
        stated = Stated(exchanged=lambda _ranks, _device: 4)
        assert stated.kept_bytes(100, 20 * MIB, 2, "cpu") == THREAD_KEEPS_BYTES == KEPT_BYTES
        assert stated.peak_bytes(100, 20 * MIB, 2, "cpu") == 80 * MIB

    @pytest.mark.parametrize(("ranks", "elements", "kept"), [(1, 1000, 0), (4, 1000, 3000), (2, 99 * MIB, 16 * MIB)])
    def test_sums_on_a_cpu_need_other_ranks_versions(self, ranks: int, elements: int, kept: int) -> None:
        stated = Stated(sums=True)
        assert stated.kept_bytes(elements, elements, ranks, "cpu") == kept
        assert stated.kept_bytes(elements, elements, ranks, "cuda") == 0
        assert SUMMED_AT_ONCE_BYTES == WINDOW_BYTES

    def test_nothing_is_reduced_within_a_node(self) -> None:
        """Otherwise the ranks of one machine, which are one node, would have nothing to compress."""
        for name, case in CASES.items():
            if case.algorithm not in ("gradient_allreduce", "async"):
                assert case.options["hierarchical"] is FLAT["hierarchical"], name


class TestRows:
    def test_the_rank_with_most_counts(self) -> None:
        found = row("decentralized", 4, 4.1)
        assert (found.kept, found.kept_stated) == (4 * PARAMETERS, 4 * PARAMETERS)
        assert found.peak == pytest.approx(4.1 * PARAMETERS, abs=2)
        assert found.peak_with_fresh_gradients == pytest.approx(5.1 * PARAMETERS, abs=2)
        assert found.largest_bucket == PARAMETERS // 2
        assert not found.exceeds

    @pytest.mark.parametrize(("kept", "peak"), [(4.5, 4.5), (4, 5.1)])
    def test_more_than_stated_is_seen(self, kept: float, peak: float) -> None:
        assert row("decentralized", kept, peak).exceeds
        assert not row("low_precision_decentralized", kept, peak).exceeds

    def test_a_small_model_proves_nothing(self) -> None:
        """4 bytes more per parameter would be within what gloo and noise may add."""
        plain = Measured([event(12, 12, MIB)] * 2, [event(12, 12, MIB)] * 2)
        found = Measured([event(12 + 4, 12 + 4, MIB)] * 2, [event(12 + 4, 12 + 4, MIB)] * 2)
        stated_none = "gradient_allreduce"
        unseen = row_of(stated_none, found, plain, ranks=2, device="cuda", transport=GLOO_BYTES)
        assert not unseen.exceeds
        assert unseen.verdict == "too small to tell"
        # Without gloo, the same model is large enough, if only just.
        found = Measured([event(12, 12, MIB + 1)] * 2, [event(12, 12, MIB + 1)] * 2)
        plain = Measured([event(12, 12, MIB + 1)] * 2, [event(12, 12, MIB + 1)] * 2)
        told = row_of(stated_none, found, plain, ranks=2, device="cuda", transport=0)
        assert told.verdict == "as stated, within 4 MiB"


class TestProbe:
    def test_it_counts_what_is_kept_and_what_was_there_for_a_while(self) -> None:
        probe = Probe(torch.device("cpu"))
        probe.begin()
        kept = torch.ones(8 * MIB)
        probe.restart()
        torch.ones(16 * MIB)
        use = probe.use()
        assert kept.numel() * 4 == pytest.approx(use.kept, abs=MIB)
        # Without ALLOCATOR_SETTINGS: the heap may have had free pages before.
        assert use.peak <= (32 + 64 + 4) * MIB
        assert use.peak > 32 * MIB
