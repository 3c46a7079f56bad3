"""Every way to switch the plugin on and off, as NCCL itself sees it: its log has to name the network."""

from __future__ import annotations

import pytest
from support.gpu_job import RANKS, RunJob

from bagua.net.library import library_path
from bagua.net.nccl_release import NcclRelease

pytestmark = [pytest.mark.gpu, pytest.mark.slow]


def test_one_variable_brings_a_job_that_never_imports_bagua_to_the_plugin(run_job: RunJob) -> None:
    job = run_job(ENABLE_BAGUA_NET="1")
    assert job.code == 0, job.output
    assert job.right is True
    assert job.networks == {"BaguaNet"}
    assert len(job.proofs) == RANKS
    assert job.nccl is not None
    release = NcclRelease.from_text(job.nccl)
    assert release is not None
    # NCCL says which of our tables it took: the newest that it knows.
    assert {proof.table for proof in job.proofs} == {f"v{release.table}"}
    assert all(any("BaguaNet" in transport for transport in proof.transports) for proof in job.proofs)
    warned = [text for proof in job.proofs for text in proof.warnings if "bagua" in text.lower()]
    assert warned == []


def test_the_library_alone_is_enough(run_job: RunJob) -> None:
    job = run_job(NCCL_NET_PLUGIN=str(library_path()))
    assert (job.code, job.right, job.networks) == (0, True, {"BaguaNet"}), job.output


def test_nothing_asked_for_is_nothing_done(run_job: RunJob) -> None:
    job = run_job()
    assert (job.code, job.right, job.networks) == (0, True, {"Socket"}), job.output


def test_zero_makes_the_library_decline_and_nccl_carries_on(run_job: RunJob) -> None:
    job = run_job(ENABLE_BAGUA_NET="0", NCCL_NET_PLUGIN=str(library_path()))
    assert (job.code, job.right, job.networks) == (0, True, {"Socket"}), job.output
    assert "BaguaNet" in job.logs, "the library was opened, and declined"


def test_a_users_own_network_is_kept_and_said(run_job: RunJob) -> None:
    job = run_job(ENABLE_BAGUA_NET="1", NCCL_NET="Socket")
    assert (job.code, job.right, job.networks) == (0, True, {"Socket"}), job.output
    assert "NCCL_NET" in job.output, "a warning says why the plugin is not used"


def test_communicators_come_back_after_all_were_destroyed(run_job: RunJob) -> None:
    """NCCL finalizes and unloads the plugin with the last communicator, and takes it again for the next."""
    job = run_job("--again", ENABLE_BAGUA_NET="1")
    assert (job.code, job.right) == (0, True), job.output
    used = [line for line in job.logs.splitlines() if "Using network" in line]
    assert len(used) >= 2 * RANKS
    assert all(line.endswith("Using network BaguaNet") for line in used), used


def test_a_bad_knob_is_named_with_its_value_and_range(run_job: RunJob) -> None:
    job = run_job(ENABLE_BAGUA_NET="1", BAGUA_NET_NSTREAMS="0")
    said = job.output + job.logs
    assert "BAGUA_NET_NSTREAMS" in said
    assert "1 to 64" in said or "1..64" in said


def test_required_turns_the_fallback_into_an_error(run_job: RunJob) -> None:
    job = run_job(ENABLE_BAGUA_NET="1", BAGUA_NET_REQUIRED="1", BAGUA_NET_NSTREAMS="0")
    assert job.code != 0
    assert job.right is None
    assert "BAGUA_NET_NSTREAMS" in job.output + job.logs
