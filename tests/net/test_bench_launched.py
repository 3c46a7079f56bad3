"""bagua-net-bench that a launcher started: which rank a process is, how ranks meet, and how their run ends. The hosts
are processes here; the protocol is real. `bagua-net test` meets in the same way."""

from __future__ import annotations

import errno
import json
import socket
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from support.bench_command import Bench, hanging, start_installed
from support.labs import Lab, needs_lab
from support.ports import free_port
from support.processes import living_pids, wait_until
from support.sweeps import rest_is_deep

from bagua.net.bench.driver import DriverRequest, DriverSettings, NetworkPath
from bagua.net.bench.errors import BenchError, UsageError
from bagua.net.bench.launch_environment import DEFAULT_PORT, LaunchEnvironment, detect_launch, launch_of_run
from bagua.net.bench.ranks import Ranks
from bagua.net.bench.rendezvous import LineConnection, Member, join, listen, meet, proof
from bagua.net.bench.result_file import read_result

RUN = ["-b", "1K", "-e", "1M", "-f", "32", "-n", "3", "--repeats", "2", "--timeout", "20"]

# --- which rank is this -----------------------------------------------------------------------------------------------

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "node0"}
TORCHRUN |= {"MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "job-7"}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}
OPEN_MPI |= {"OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
OLD_SLURM = {"SLURM_PROCID": "5", "SLURM_NTASKS": "16", "SLURM_LOCALID": "1"}
OLD_SLURM |= {"SLURM_JOB_NODELIST": "gpu[07-09]", "SLURM_JOB_ID": "123456"}
SLURM = OLD_SLURM | {"SLURM_STEP_NUM_TASKS": "8"}  # the step's tasks, not the job's
PMI = {"PMI_RANK": "0", "PMI_SIZE": "4", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "4"}
ACROSS = OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
SLURM_PORT = 20000 + 123456 % 9000  # two jobs of one node must not meet


@pytest.mark.parametrize(
    ("variables", "found"),
    [
        (TORCHRUN, ("torchrun", 3, 8, 1, "node0", 29501)),  # MASTER_PORT itself is torchrun's store
        (OPEN_MPI, ("Open MPI", 1, 2, 1, "127.0.0.1", DEFAULT_PORT)),
        (ACROSS | {"MASTER_ADDR": "10.0.0.1"}, ("Open MPI", 1, 2, 1, "10.0.0.1", DEFAULT_PORT)),
        (SLURM, ("Slurm", 5, 8, 1, "gpu07", SLURM_PORT)),
        (OLD_SLURM, ("Slurm", 5, 16, 1, "gpu07", SLURM_PORT)),
        (SLURM | {"SLURM_STEP_NODELIST": "gpu09"}, ("Slurm", 5, 8, 1, "gpu09", SLURM_PORT)),
        (SLURM | {"SLURM_JOB_NODELIST": "gpu[01-03,7],login"}, ("Slurm", 5, 8, 1, "gpu01", SLURM_PORT)),
        (SLURM | {"SLURM_JOB_NODELIST": "r[1-2]n[3-4]"}, ("Slurm", 5, 8, 1, "r1n3", SLURM_PORT)),
        (SLURM | {"SLURM_JOB_NODELIST": "n3.cluster,b"}, ("Slurm", 5, 8, 1, "n3.cluster", SLURM_PORT)),
        (PMI, ("PMI", 0, 4, 0, "127.0.0.1", DEFAULT_PORT)),
        # The innermost launcher counts.
        (SLURM | {"PMI_RANK": "5", "PMI_SIZE": "8"}, ("PMI", 5, 8, None, "gpu07", SLURM_PORT)),
        (SLURM | OPEN_MPI, ("Open MPI", 1, 2, 1, "127.0.0.1", SLURM_PORT)),
        (SLURM | OPEN_MPI | PMI | TORCHRUN, ("torchrun", 3, 8, 1, "node0", 29501)),
        ({"MASTER_ADDR": "x", "RANK": "0", "SLURM_JOB_ID": "1"}, None),
    ],
)
def test_the_variables_of_each_launcher(variables: dict[str, str], found: tuple[object, ...] | None) -> None:
    launch = detect_launch(variables)
    if launch is None:
        assert found is None
    else:
        one = launch
        assert found == (one.launcher, one.rank, one.world_size, one.local_rank, one.master_address, one.port)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (TORCHRUN | {"RANK": "three"}, "RANK='three' is not an integer"),
        (TORCHRUN | {"RANK": "8"}, "RANK=8 of WORLD_SIZE=8; a rank is in 0..size-1"),
        (TORCHRUN | {"RANK": "-1"}, "RANK=-1"),
        (TORCHRUN | {"RANK": "0", "WORLD_SIZE": "0"}, "WORLD_SIZE=0"),
        (TORCHRUN | {"MASTER_PORT": "65535"}, r"MASTER_PORT=65535 is outside 1\.\.65534.*--port"),
        (ACROSS, r"MASTER_ADDR, the host of rank 0, is not set.*mpirun -x MASTER_ADDR"),
        (SLURM | {"SLURM_JOB_NODELIST": "gpu[1-"}, r"node list 'gpu\[1-' names no host; set MASTER_ADDR"),
        (TORCHRUN, "--ranks 4, but torchrun started 8 ranks; leave --ranks out, or give --local"),
    ],
)
def test_broken_variables_are_named(variables: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        launch_of_run(variables, local=False, port=None, ranks=4)


def test_a_run_of_its_own_has_no_launch() -> None:
    launch = launch_of_run(TORCHRUN, local=False, port=5555, ranks=8)
    assert launch is not None
    assert (launch.world_size, launch.port) == (8, 5555)
    other = detect_launch(TORCHRUN | {"TORCHELASTIC_RUN_ID": "job-8"})
    assert other is not None
    assert other.job != launch.job
    assert launch_of_run(TORCHRUN, local=True, port=None, ranks=4) is None, "--local"
    alone = TORCHRUN | {"RANK": "0", "WORLD_SIZE": "1"}
    assert launch_of_run(alone, local=False, port=None, ranks=4) is None, "it starts all ranks itself"


class _Nowhere:
    """A place that starts nothing."""


@pytest.mark.parametrize(
    ("identities", "measured_link", "links"),
    [
        (["a", "a", "a", "a"], 0, 4),  # one host: all connections share its loopback
        (["a", "b"], 0, 1),
        (["a", "a", "b", "b"], 1, 1),  # only rank 1 -> 2 leaves rank 0's host
        (["a", "b", "a", "b"], 0, 2),  # round robin: two connections leave it
    ],
)
def test_the_measured_path(identities: list[str], measured_link: int, links: int) -> None:
    ranks = Ranks([_Nowhere() for _ in identities], identities, NetworkPath("10.0.0.1", "eth0"))  # type: ignore[misc]
    assert (ranks.measured_link, ranks.links, ranks.hosts) == (measured_link, links, len(set(identities)))


# --- how ranks meet ---------------------------------------------------------------------------------------------------


def make_launch(rank: int, world_size: int, port: int = 0, job: str = "job-1") -> LaunchEnvironment:
    return LaunchEnvironment("torchrun", rank, world_size, None, None, "127.0.0.1", port, job)


class Meeting:
    """Rank 0 in a thread, on a port that the kernel chose; others join it."""

    def __init__(self, world_size: int, timeout_s: float = 10.0) -> None:
        self.world_size = world_size
        self.said: list[str] = []
        listener = listen(make_launch(0, world_size))
        self.port = int(listener.getsockname()[1])
        self._threads = ThreadPoolExecutor()
        launch = make_launch(0, world_size, self.port)
        self._met = self._threads.submit(meet, launch, timeout_s, self.said.append, listener)
        self._joining: list[Future[tuple[LineConnection, int]]] = []

    def __enter__(self) -> Meeting:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown()
        ends = [one.connection for one in ([] if self._met.exception() else self._met.result()) if one.connection]
        ends += [one.result()[0] for one in self._joining if not one.exception()]
        for end in ends:
            end.close()

    def joining(self, number: int, **changes: object) -> Future[tuple[LineConnection, int]]:
        launch = replace(make_launch(number, self.world_size, self.port), **changes)  # type: ignore[arg-type]
        self._joining.append(self._threads.submit(join, launch, 10))
        return self._joining[-1]

    def members(self) -> list[Member]:
        return self._met.result(60)

    def error(self) -> str:
        return str(self._met.exception(60))


def test_all_ranks_meet_and_strangers_disturb_nobody() -> None:
    with Meeting(3) as meeting:
        with socket.create_connection(("127.0.0.1", meeting.port)) as scanner:
            scanner.sendall(b"GET / HTTP/1.0\r\n\r\n")
            with pytest.raises(BenchError, match=r"turned this rank away: .* give all ranks one BAGUA_BENCH_SECRET"):
                meeting.joining(1, job="job-2").result(60)
            joined = [meeting.joining(rank) for rank in (2, 1)]
            (_, of_host), (connection, _) = (one.result(60) for one in joined)
        assert of_host == 3, "how many ranks share the host"
        members = meeting.members()
        assert [member.rank for member in members] == [0, 1, 2]
        assert sum("which is not a rank of this run" in text for text in meeting.said) == 2
        (why,) = [text for text in meeting.said if "BAGUA_BENCH_SECRET" in text]  # of the rank, not of the scanner
        assert "calls itself rank 1" in why
        one = members[1].connection
        assert one is not None
        assert one.local_address == "127.0.0.1"  # not ::ffff:127.0.0.1
        for end in (
            one,
            connection,
        ):  # a host that vanishes is noticed by the end that waits, and by the one that sends
            with socket.fromfd(end.fileno(), socket.AF_INET, socket.SOCK_STREAM) as duplicate:
                assert duplicate.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
                assert 0 < duplicate.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) <= 60_000
        one.send({"hello": "x" * 100_000})
        assert connection.receive(10) == {"hello": "x" * 100_000}
        assert connection.receive(0) is None
        one.close()
        with pytest.raises(BenchError, match=r"connection to rank 0 at 127\.0\.0\.1.* is lost"):
            connection.receive(10)


@pytest.mark.parametrize(
    ("number", "remedy"),
    [(errno.ETIMEDOUT, "check that its host runs"), (errno.ECONNRESET, "its own output says why it ended")],
)
def test_a_peer_that_vanished_has_no_output_to_read(number: int, remedy: str) -> None:
    class Lost(socket.socket):
        def recv(self, *_: object) -> bytes:
            raise OSError(number, "lost")

    with socket.create_server(("127.0.0.1", 0)) as server, Lost() as client:
        client.connect(server.getsockname())
        with server.accept()[0] as other:
            other.sendall(b"x")  # it becomes readable
            with pytest.raises(BenchError, match=remedy):
                LineConnection(client, "rank 1", 10).receive(10)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rank": 5}, "rank 5 of 2 came to a run of 2 ranks"),
        ({"world_size": 4}, "rank 1 of 4 came to a run of 2 ranks"),
    ],
)
def test_a_misnumbered_rank_ends_both_sides_with_the_reason(changes: dict[str, int], message: str) -> None:
    told = f"turned this rank away: {message}; start all ranks from one launcher"
    with Meeting(2) as meeting:
        with pytest.raises(BenchError, match=told):
            meeting.joining(1, **changes).result(60)
        assert message in meeting.error()


def test_a_second_process_of_the_same_rank_is_refused() -> None:
    with Meeting(3) as meeting:
        errors = [str(one.exception(60)) for one in [meeting.joining(1), meeting.joining(1)]]
        assert any("a second rank 1" in error for error in errors)
        assert "a second rank 1" in meeting.error()


def test_another_version_is_refused() -> None:
    with Meeting(2) as meeting, socket.create_connection(("127.0.0.1", meeting.port)) as raw:
        connection = LineConnection(raw, "rank 0", 10)
        greeting = connection.receive(10)
        assert greeting is not None
        hello = {"rank": 1, "ranks": 2, "host": "h", "identity": "i", "network": "n", "version": "0.0.1"}
        connection.send(hello | {"proof": proof("job-1", str(greeting["nonce"]), 1)})
        answer = connection.receive(10)
    assert answer is not None
    assert "rank 1 has bagua 0.0.1 and rank 0 has" in str(answer["error"])
    assert "0.0.1" in meeting.error()


def test_absent_ranks_are_named_in_time() -> None:
    absent = r"turned this rank away: 1 of 3 ranks \(rank 1\) did not reach port"
    with Meeting(3, timeout_s=3.0) as meeting:
        with pytest.raises(BenchError, match=absent):
            meeting.joining(2).result(60)
        assert "1 of 3 ranks (rank 1) did not reach port" in meeting.error()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(BenchError, match=rf"rank 0 at 127.0.0.1:{port} cannot be reached within 1 s"):
        join(make_launch(1, 3, port), 1)


def test_another_server_on_the_port_is_recognised() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]

        def answer() -> None:
            accepted, _ = other.accept()
            with accepted:
                accepted.sendall(json.dumps({"magic": "something else"}).encode() + b"\n")

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(BenchError, match="is no bagua-net-bench; give --port"):
            join(make_launch(1, 3, port), 60)
        thread.join(60)


# --- runs of several commands -----------------------------------------------------------------------------------------


Started = list[subprocess.Popen[str]]


def start(bench: Bench, environments: Sequence[Mapping[str, str]], *words: Sequence[str], **fault: object) -> Started:
    """One command each; the last `words` are of all that are left."""
    of_each = [*words, *[words[-1]] * (len(environments) - len(words))]
    return [
        subprocess.Popen(
            bench.command(*RUN, *arguments),
            env={**bench.environment(fault), **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for environment, arguments in zip(environments, of_each, strict=True)
    ]


def finish(processes: Started) -> list[tuple[int, str, str]]:
    results = []
    try:
        for process in processes:
            output, errors = process.communicate(timeout=120)
            results.append((process.returncode, output, errors))
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return results


def torchrun(world_size: int, port: int) -> list[dict[str, str]]:
    place = {"WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size, "MASTER_PORT": port}
    of_all = {
        "MASTER_ADDR": "127.0.0.1",
        "TORCHELASTIC_RUN_ID": "test",
        **{name: str(one) for name, one in place.items()},
    }
    return [{**of_all, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world_size)]


def slurm(world_size: int, port: int) -> list[dict[str, str]]:
    of_all = {"SLURM_STEP_NUM_TASKS": str(world_size), "SLURM_JOB_NODELIST": "localhost", "SLURM_JOB_ID": str(port)}
    return [{**of_all, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)} for rank in range(world_size)]


def open_mpi(world_size: int, port: int) -> list[dict[str, str]]:
    of_all = {"OMPI_COMM_WORLD_SIZE": str(world_size), "OMPI_COMM_WORLD_LOCAL_SIZE": str(world_size)}
    ranks = [{"OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_LOCAL_RANK": str(rank)} for rank in range(world_size)]
    return [{**of_all, **one, "MASTER_PORT": str(port)} for one in ranks]


@pytest.mark.parametrize("launcher", rest_is_deep([torchrun, slurm, open_mpi], 0))
def test_only_rank_zero_reports(launcher: Callable[..., list[dict[str, str]]], bench: Bench, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    words = ["--backends", "plugin,bare,raw", "--raw-streams", "1,2", "--busy-per-cpu", "1", "--json"]
    # Only rank 0 gets a path that exists.
    results = finish(start(bench, launcher(3, free_port(2)), [*words, str(path)], [*words, "/no/such/1.json"]))
    assert [code for code, _, _ in results] == [0, 0, 0], results
    for told in ("3 ranks x 2 channels", "1 busy process per CPU", "every byte of every size correct"):
        assert told in results[0][1]
    assert [(output, errors) for _, output, errors in results[1:]] == [("", "")] * 2
    result = read_result(path)
    measured = {(one.case["backend"], one.case.get("streams")) for one in result.select("time")}
    assert measured == {("plugin", None), ("bare", None), ("raw", 1), ("raw", 2)}
    assert result.parameters["ranks"] == 3
    assert len(list(bench.pids.iterdir())) == 3 + 3 + 4
    assert living_pids(bench.pids) == []


def test_a_driver_that_dies_elsewhere_ends_all_ranks(bench: Bench) -> None:
    fault = {"at": "run", "do": "kill", "rank": 1, "transport": "bare"}
    results = finish(start(bench, torchrun(2, free_port(2)), ["--backends", "plugin,bare"], **fault))
    assert [code for code, _, _ in results] == [1, 1]
    assert "bare rank 1 on " in results[0][2]
    assert "killed by SIGKILL" in results[0][2]
    assert results[1][1:] == ("", "")
    assert living_pids(bench.pids) == []


def test_a_rank_without_a_library_is_named_by_rank_zero(bench: Bench, tmp_path: Path) -> None:
    (tmp_path / "libold.so").touch()
    words = ["--backends", "plugin", "--baseline-library"]
    for missing in (["/no/lib.so"], [str(tmp_path / "libold.so"), "--library", "/no/lib.so"]):
        own = [*words, str(tmp_path / "libold.so")]
        results = finish(start(bench, torchrun(2, free_port(2)), own, [*words, *missing]))
        assert [code for code, _, _ in results] == [1, 1]
        assert "rank 1 on " in results[0][2]
        assert "library '/no/lib.so' does not exist" in results[0][2]


def test_a_rank_that_was_started_without_the_option_says_so() -> None:
    """Rank 0 asks for a backend by name; each rank knows its own path."""
    paths = {"driver": Path("/d"), "library": Path("/l.so"), "address": "127.0.0.1", "interface": "lo"}
    settings = DriverSettings(**paths, channels=2, local_ranks=2, timeout_s=10)  # type: ignore[arg-type]
    with pytest.raises(BenchError, match=r"baseline rank 1 was .* no --baseline-library; give all ranks"):
        settings.command(DriverRequest("baseline", 1, 2))


def test_a_killed_rank_ends_the_others(bench: Bench) -> None:
    fault = {"at": "run", "do": "hang", "transport": "bare"}
    processes = start(bench, torchrun(2, free_port(2)), ["--backends", "bare"], **fault)
    wait_until(lambda: hanging(bench.pids) == 2, "the run of both drivers")
    processes[1].kill()
    results = finish(processes)
    assert results[0][0] == 1
    assert "the connection to rank 1" in results[0][2]
    assert "Traceback" not in results[0][2]
    # Rank 1 had no chance to end its driver, which follows its parent by itself.
    wait_until(lambda: not living_pids(bench.pids), "the end of the drivers")


def test_what_keeps_ranks_from_meeting_is_named(bench: Bench) -> None:
    port = free_port(2)
    with socket.create_server(("127.0.0.1", port + 1)):
        ((code, _, in_use),) = finish(start(bench, torchrun(2, port)[:1], []))
    assert code == 1
    assert f"port {port + 1} on " in in_use
    assert "another program holds it: give every rank the same free one with --port" in in_use
    ((code, _, absent),) = finish(start(bench, torchrun(2, free_port(2))[:1], ["--timeout", "1.5"]))
    assert code == 1
    assert "1 of 2 ranks (rank 1) did not reach port" in absent
    assert "see that torchrun started them all" in absent
    # PMI tells a rank and a size only.
    pmi = {"PMI_RANK": "1", "PMI_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    ((code, _, nobody),) = finish(start(bench, [pmi], ["--busy-per-cpu", "1"]))
    assert code == 2
    assert "does not say which rank is the first of its host" in nobody


def test_one_launched_process_or_local_is_a_local_run(bench: Bench) -> None:
    environments = [torchrun(1, free_port(2))[0], torchrun(2, free_port(2))[1]]
    results = finish(start(bench, environments, ["--backends", "bare"], ["--backends", "bare", "--local"]))
    assert [code for code, _, _ in results] == [0, 0], results
    assert all("2 ranks x 2 channels on one host" in output for _, output, _ in results)


@needs_lab
def test_joined_interfaces_are_measured_as_one_device() -> None:
    """With the real drivers, on two hosts."""
    with Lab(nics=2, ip_versions=(4,)) as lab:
        launch = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_PORT": "29500"}
        launch |= {"MASTER_ADDR": lab.hosts[0].address(0), "BAGUA_NET_JOIN_NICS": "eth0+eth1"}
        processes = []
        for host in range(2):
            with lab.inside(host):
                processes.append(start_installed(*RUN, "--backends", "plugin,bare,raw", RANK=str(host), **launch))
        (code, output, errors), _ = finish(processes)
    assert code == 0, errors
    assert "on 2 hosts over eth0,eth1 (10.77.0.1)" in output
    assert "devices eth0+eth1" in output
    assert "bare and raw: over 10.77.0.1 alone; the plugin's device is eth0+eth1" in output
