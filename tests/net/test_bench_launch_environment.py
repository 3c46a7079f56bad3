"""Which rank am I: the variables of each launcher."""

from __future__ import annotations

import pytest

from bagua.net.bench.errors import UsageError
from bagua.net.bench.launch_environment import DEFAULT_PORT, detect_launch, first_host, launch_of_run

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "job-7",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "16",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_JOB_NODELIST": "gpu[07-09]",
    "SLURM_JOB_ID": "123456",
}
PMI = {"PMI_RANK": "0", "PMI_SIZE": "4", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "4"}


def test_a_run_of_its_own_has_no_launch() -> None:
    assert launch_of_run({}, local=False, port=None, ranks=4) is None
    assert launch_of_run(TORCHRUN, local=True, port=None, ranks=4) is None, "--local"
    alone = TORCHRUN | {"RANK": "0", "WORLD_SIZE": "1"}
    assert launch_of_run(alone, local=False, port=None, ranks=4) is None, "it starts all ranks itself"


def test_a_launched_run_has_the_ranks_that_were_launched() -> None:
    launch = launch_of_run(TORCHRUN, local=False, port=5555, ranks=8)
    assert launch is not None
    assert (launch.world_size, launch.port) == (8, 5555)
    with pytest.raises(UsageError, match="--ranks 4, but torchrun started 8 ranks; leave --ranks out, or give --local"):
        launch_of_run(TORCHRUN, local=False, port=None, ranks=4)


def test_no_launcher() -> None:
    assert detect_launch({"HOME": "/root", "MASTER_ADDR": "x", "RANK": "0", "SLURM_JOB_ID": "1"}) is None


def test_torchrun() -> None:
    launch = detect_launch(TORCHRUN)
    assert launch is not None
    assert (launch.launcher, launch.rank, launch.world_size) == ("torchrun", 3, 8)
    assert (launch.local_rank, launch.local_world_size) == (1, 2)
    # MASTER_PORT itself is torchrun's store.
    assert (launch.master_address, launch.port) == ("node0", 29501)
    assert "job-7" in launch.job


def test_open_mpi_on_one_host_needs_no_address() -> None:
    launch = detect_launch(OPEN_MPI)
    assert launch is not None
    assert (launch.launcher, launch.rank, launch.world_size) == ("Open MPI", 1, 2)
    assert (launch.master_address, launch.port) == ("127.0.0.1", DEFAULT_PORT)


def test_open_mpi_across_hosts_needs_the_address_of_rank_zero() -> None:
    across = OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
    with pytest.raises(UsageError, match=r"MASTER_ADDR, the host of rank 0, is not set.*mpirun -x MASTER_ADDR"):
        detect_launch(across)
    launch = detect_launch(across | {"MASTER_ADDR": "10.0.0.1"})
    assert launch is not None
    assert launch.master_address == "10.0.0.1"


def test_slurm() -> None:
    launch = detect_launch(SLURM)
    assert launch is not None
    # The step's tasks, not the job's.
    assert (launch.launcher, launch.rank, launch.world_size, launch.local_rank) == ("Slurm", 5, 8, 1)
    assert launch.master_address == "gpu07"
    assert 20000 <= launch.port < 29000
    other = detect_launch(SLURM | {"SLURM_JOB_ID": "123457"})
    assert other is not None
    assert other.port != launch.port
    assert other.job != launch.job


def test_the_hosts_of_a_step_come_before_those_of_the_job() -> None:
    launch = detect_launch(SLURM | {"SLURM_STEP_NODELIST": "gpu09"})
    assert launch is not None
    assert launch.master_address == "gpu09"


def test_an_older_slurm_has_only_the_jobs_tasks() -> None:
    older = {name: value for name, value in SLURM.items() if name != "SLURM_STEP_NUM_TASKS"}
    launch = detect_launch(older)
    assert launch is not None
    assert launch.world_size == 16


def test_pmi() -> None:
    launch = detect_launch(PMI)
    assert launch is not None
    assert (launch.launcher, launch.rank, launch.world_size, launch.master_address) == ("PMI", 0, 4, "127.0.0.1")


def test_srun_with_pmi_takes_the_address_from_slurm() -> None:
    mixed = SLURM | {"PMI_RANK": "5", "PMI_SIZE": "8"}
    launch = detect_launch(mixed)
    assert launch is not None
    assert (launch.launcher, launch.rank, launch.master_address) == ("PMI", 5, "gpu07")


def test_mpirun_inside_a_slurm_job_is_mpirun() -> None:
    launch = detect_launch(SLURM | OPEN_MPI)
    assert launch is not None
    assert (launch.launcher, launch.rank, launch.world_size) == ("Open MPI", 1, 2)


def test_torchrun_inside_everything_is_torchrun() -> None:
    launch = detect_launch(SLURM | OPEN_MPI | PMI | TORCHRUN)
    assert launch is not None
    assert launch.launcher == "torchrun"


def test_an_explicit_port_wins() -> None:
    launch = detect_launch(TORCHRUN, port=5555)
    assert launch is not None
    assert launch.port == 5555


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"RANK": "three"}, "RANK='three' is not an integer"),
        ({"RANK": "8"}, "RANK=8 of WORLD_SIZE=8; a rank is in 0..size-1"),
        ({"RANK": "-1"}, "RANK=-1"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "WORLD_SIZE=0"),
        ({"MASTER_PORT": "65535"}, r"MASTER_PORT=65535 is outside 1\.\.65534.*--port"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT='http' is not an integer"),
    ],
)
def test_broken_variables_are_named(changes: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        detect_launch(TORCHRUN | changes)


@pytest.mark.parametrize(
    ("node_list", "host"),
    [
        ("login", "login"),
        ("a,b", "a"),
        ("gpu[01-03,7],login", "gpu01"),
        ("r[1-2]n[3-4]", "r1n3"),
        ("n[3].cluster", "n3.cluster"),
    ],
)
def test_the_first_host_of_a_node_list(node_list: str, host: str) -> None:
    assert first_host(node_list) == host


@pytest.mark.parametrize("node_list", ["", "gpu[1-", "gpu1]"])
def test_broken_node_lists_name_the_remedy(node_list: str) -> None:
    with pytest.raises(UsageError, match="MASTER_ADDR"):
        first_host(node_list)
