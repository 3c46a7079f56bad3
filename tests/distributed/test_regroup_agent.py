"""`python -m bagua.distributed.run --regroup`: which ranks are started, who is told of their end, and how jobs end."""

from __future__ import annotations

import datetime
import json
import os
import signal
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.forked_launcher import captured, fork_scripts, run_launcher
from support.ports import free_port
from support.processes import exit_code_of, forked, living_pids, wait_until
from support.ranks import run_ranks

from bagua.distributed import regroup_agent, run
from bagua.job.places import Place
from bagua.job.presence import Door
from bagua.job.torch_internals import PrefixStore, TCPStore
from bagua.regroup.epochs import LEFT, PREFIX, EpochStore, Member

TIMEOUT_S = 120
RUN = "bagua.distributed.run"
PATIENCE = datetime.timedelta(seconds=60)

# Says in a file what it was given, and waits to be ended, or for a file that says how it ends.
RANK = """
import json, os, pathlib, sys, time
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_PORT", "RANK_TOKEN")
told = {name: os.environ.get(name) for name in names} | {"pid": os.getpid(), "arguments": sys.argv[1:]}
written = pathlib.Path(f"{os.getpid()}.new")
written.write_text(json.dumps(told))
written.rename(f"{os.getpid()}.json")
end = pathlib.Path(f"end {os.environ['RANK']}")
while not end.exists():
    time.sleep(0.01)
sys.exit(int(end.read_text()))
"""


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in ("RANK", "OMP_NUM_THREADS")}


def _script(folder: Path, text: str) -> str:
    (folder / "train.py").write_text(text)
    return "train.py"


def _put(path: Path, text: str) -> None:
    path.with_suffix(".new").write_text(text)
    path.with_suffix(".new").rename(path)


class _Ranks:
    """What ranks say in their files.

    Args:
        folder: of the files.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def all(self) -> list[dict[str, Any]]:
        return [json.loads(path.read_text()) for path in self._folder.glob("*.json")]

    def next(self, rank: int, after: set[str]) -> dict[str, Any]:
        """The process that is this rank and has another token than these."""
        found: list[dict[str, Any]] = []

        def is_there() -> bool:
            found[:] = [one for one in self.all() if one["RANK"] == str(rank) and one["RANK_TOKEN"] not in after]
            return bool(found)

        wait_until(is_there, f"another process is rank {rank}")
        return found[0]


def _store(port: int) -> EpochStore:
    client = TCPStore("127.0.0.1", port, None, False, PATIENCE, wait_for_workers=False)
    return EpochStore(PrefixStore(PREFIX, client))


def _beside(function: Callable[[], None]) -> Callable[[], None]:
    """Runs it on a thread. Returns what waits for its end, and raises what it has raised."""
    raised: list[BaseException] = []

    def call() -> None:
        try:
            function()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=call)
    thread.start()

    def end() -> None:
        thread.join()
        if raised:
            raise raised[0]

    return end


# --- ranks that die --------------------------------------------------------------------------------------------------


def test_a_rank_that_dies_is_told_and_started_again_as_long_as_it_trains(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    port, ranks = free_port(), _Ranks(tmp_path)
    door = socket.create_server(("127.0.0.1", 0))
    door.settimeout(TIMEOUT_S)

    def play() -> None:
        # The other members of the job: rank 0 of the agent, and one of another host.
        first, second = ranks.next(0, set()), ranks.next(1, set())
        store = _store(port)
        host = Place("elsewhere", 1, 0, 1, door=Door(("127.0.0.1",), door.getsockname()[1]))
        tokens = [first["RANK_TOKEN"], second["RANK_TOKEN"], "other"]
        epoch = store.first([Member(token, host, rank) for rank, token in enumerate(tokens)])
        os.kill(second["pid"], signal.SIGKILL)
        for token in (tokens[0], tokens[2]):
            why = store.wait_for_mail(epoch, token, PATIENCE)
            assert why is not None
            assert why.startswith("rank 1 (host ")
            assert why.endswith(") was killed by SIGKILL")
        assert store.lost() == {tokens[1]: "was killed by SIGKILL"}
        # There is no room for another node.
        assert run.main(["--regroup", f"--master-port={port}", "-m", "train"]) == 1
        assert "the job has 1 nodes, as many as --nnodes=1 allows" in capfd.readouterr().err
        # Killed more often than it has attempts, but it trains in between.
        seen = {tokens[1]}
        for _ in range(3):
            process = ranks.next(1, seen)
            seen.add(process["RANK_TOKEN"])
            store.set_trained(process["RANK_TOKEN"])
            os.kill(process["pid"], signal.SIGKILL)
        # And now it does not.
        process = ranks.next(1, seen)
        os.kill(process["pid"], signal.SIGKILL)
        wait_until(lambda: process["RANK_TOKEN"] in store.lost(), "the last end is told")
        _put(tmp_path / "end 0", "0")
        # The store is there as long as the member of another host is, and the agent looks whether it is.
        with door, door.accept()[0]:
            assert store.lost().get(tokens[0]) == LEFT
            store.add_lost(tokens[2], LEFT)

    end = _beside(play)
    words = ["--regroup", "--nproc-per-node=2", "--rank-restarts=1", f"--master-port={port}", "--logdir=logs"]
    done = run_launcher(RUN, [*words, _script(tmp_path, RANK)], tmp_path, _environment(), TIMEOUT_S)
    end()
    assert done.returncode == 0, done.stderr
    assert len(ranks.all()) == 1 + 5
    assert sorted(str(path.relative_to(tmp_path / "logs")) for path in tmp_path.rglob("stderr.log")) == [
        "attempt_0/0/stderr.log",
        *(f"attempt_{attempt}/1/stderr.log" for attempt in range(5)),
    ]
    assert "rank 1 was killed by SIGKILL. Starting it again (attempt 1 of 1 to make a step)." in done.stderr
    assert "It is given up: --rank-restarts=1" in done.stderr
    assert "Serving the job's store until those of other nodes have." in done.stderr


# --- several nodes ---------------------------------------------------------------------------------------------------


def _agent(words: list[list[str]], folder: str) -> tuple[int, str]:
    """In a rank, which is an agent."""
    os.chdir(folder)
    mine = words[int(os.environ["RANK"])]
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        del os.environ[name]
    with captured(2) as errors:
        status = run.main(mine)
    return status, errors.read_text()


def _words(port: int, *options: str) -> list[str]:
    return ["--regroup", f"--master-port={port}", *options, "train.py"]


def test_nodes_are_counted_through_and_a_rank_that_cannot_start_ends_all(tmp_path: Path) -> None:
    port, ranks = free_port(), _Ranks(tmp_path)
    _script(tmp_path, RANK)

    def play() -> None:
        wait_until(lambda: len(ranks.all()) == 3, "all ranks are started")
        _put(tmp_path / "end 2", "7")

    end = _beside(play)
    words = [
        _words(port, "--nnodes=1:2", "--node-rank=1", "--rank-restarts=1", "--nproc-per-node=2", "-m"),
        _words(port, "--nnodes=1:2", "--node-rank=0", "--set_additional_flag"),
    ]
    words[0][-1] = "train"
    results = run_ranks(2, _agent, words, str(tmp_path), env={"PYTHONSAFEPATH": ""}, timeout=TIMEOUT_S)
    end()
    said = {(one["RANK"], one["LOCAL_RANK"], one["NODE_RANK"], one["LOCAL_WORLD_SIZE"]) for one in ranks.all()}
    assert said == {("0", "0", "0", "1"), ("1", "0", "1", "2"), ("2", "1", "1", "2")}
    assert {(one["WORLD_SIZE"], one["MASTER_PORT"]) for one in ranks.all()} == {("3", str(port))}
    assert {tuple(one["arguments"]) for one in ranks.all()} == {("--local_rank=0",), ()}
    assert len(ranks.all()) == 4  # rank 2 was started again once
    for status, text in results:
        assert status == 1
        assert "rank 2 ended with exit status 7, and the job has not begun." in text


def test_a_job_starts_with_fewer_nodes_if_no_more_come(tmp_path: Path) -> None:
    _script(tmp_path, RANK)
    _put(tmp_path / "end 0", "0")
    words = [_words(free_port(), "--nnodes=1:3", "--rdzv-conf=last_call_timeout=0")]
    ((status, text),) = run_ranks(1, _agent, words, str(tmp_path))
    assert status == 0
    assert "1 of 1 to 3 nodes are there. Starting in 0 s" in text


def _late_agent(words: list[list[str]], folder: str) -> tuple[int, str]:
    """The second agent comes when the first has started its rank."""
    if os.environ["RANK"] == "1":
        wait_until(lambda: any(Path(folder).glob("*.json")), "the job starts")
        state, start, asked = regroup_agent.Job.state, regroup_agent.Agent.run, []

        def counted(job: regroup_agent.Job) -> regroup_agent.JobState:
            asked.append(job)
            if len(asked) == 3:
                Path(folder, "asked").touch()
            return state(job)

        def checked(agent: regroup_agent.Agent) -> int:
            assert state(agent.job).epoch is not None
            return start(agent)

        regroup_agent.Job.state, regroup_agent.Agent.run = counted, checked  # type: ignore[method-assign]
    return _agent(words, folder)


def test_a_node_that_comes_before_the_job_has_begun_waits_for_that(tmp_path: Path) -> None:
    port, ranks = free_port(), _Ranks(tmp_path)
    _script(tmp_path, RANK)

    def play() -> None:
        first = ranks.next(0, set())
        wait_until((tmp_path / "asked").exists, "the second agent asks for the job again and again")
        _store(port).first([Member(first["RANK_TOKEN"], Place("elsewhere", 0, 0, 1), 0)])
        late = ranks.next(1, set())
        assert (late["WORLD_SIZE"], late["NODE_RANK"]) == ("2", "1")
        for rank in range(2):
            _put(tmp_path / f"end {rank}", "0")

    end = _beside(play)
    words = [_words(port, "--nnodes=1:2", "--rdzv-conf=last_call_timeout=0")] * 2
    results = run_ranks(2, _late_agent, words, str(tmp_path))
    end()
    assert [status for status, _ in results] == [0, 0], results


def test_nodes_that_contradict_each_other_or_are_missing_do_not_start(tmp_path: Path) -> None:
    _script(tmp_path, RANK)
    port = free_port()
    words = [_words(port, "--nnodes=2"), _words(port, "--nnodes=2:3", "--rdzv-conf=last_call_timeout=0")]
    results = run_ranks(2, _agent, words, str(tmp_path))
    # The first one decides when there are enough.
    assert {status for status, _ in results} == {2}
    assert all("nodes have --nnodes=2 and 2:3." in text for _, text in results)
    words = [_words(free_port(), "--nnodes=2", "--rdzv-conf=join_timeout=0")]
    ((status, text),) = run_ranks(1, _agent, words, str(tmp_path))
    assert status == 1
    assert "1 of 2 nodes are there. Waiting for the others, for 0 s in all" in text
    assert "1 of at least 2 nodes have come within 0 s" in text


TRAIN = """
import os, pathlib, signal, time
import torch
import bagua.torch_api as bagua
from bagua.job import peer_watch, places
from bagua.regroup import coordinator, detection

# As if the other rank were on another host, and nothing but its agent could tell of its end.
places._pid_namespace = str
detection.CONFIRM_S = peer_watch.STOP_S = 600
bagua.init_process_group(regroup=bagua.Regroup(min_ranks=1), backend="gloo", timeout=60)
torch.manual_seed(int(os.environ["RANK"]))
net = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(net.parameters(), 0.01)
model = bagua.with_bagua(net, [optimizer])
regrouping = coordinator.current()
while True:
    # 1: the second rank has come; 2: it was killed; 3: it was started again.
    epoch, step = regrouping.epoch, bagua.regroup_step()
    if epoch.number == 1 and step == epoch.step + 2 and os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    if epoch.number == 3 and step == epoch.step + 2:
        break
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    pathlib.Path("training").touch()
    time.sleep(0.02)  # leaves the processors to those that start
first_lost = next(iter(regrouping._store.lost().values()))
print(os.environ["WORLD_SIZE"], first_lost, net.weight.double().sum().item(), flush=True)
"""


def _agent_after(path: str, words: list[list[str]], folder: str) -> tuple[int, str]:
    """The second agent comes when there is that file."""
    if os.environ["RANK"] == "1":
        wait_until(Path(folder, path).exists, "the job trains", TIMEOUT_S)
    fork_scripts()
    return _agent(words, folder)


def test_a_node_joins_late_and_its_rank_is_killed_and_joins_again(tmp_path: Path) -> None:
    _script(tmp_path, TRAIN)
    words = [_words(free_port(), "--nnodes=1:2", "--rdzv-conf=last_call_timeout=0", "--logdir=logs")] * 2
    results = run_ranks(2, _agent_after, "training", words, str(tmp_path), timeout=240)
    assert [status for status, _ in results] == [0, 0], results
    assert "rank 1 was killed by SIGKILL. Starting it again" in results[1][1]
    logs = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("stdout.log"))
    assert logs == ["logs/attempt_0/0/stdout.log", "logs/attempt_0/1/stdout.log", "logs/attempt_1/1/stdout.log"]
    first, killed, again = ((tmp_path / path).read_text() for path in logs)
    assert first.startswith("2 was killed by SIGKILL ")
    assert (killed, again) == ("", first)


# --- the end of an agent ---------------------------------------------------------------------------------------------

# Signals its agent, once both ranks are there; the second one goes on all the same, until the agent gets another one.
SIGNALS = """
import os, pathlib, signal, sys, time
is_second = os.environ["RANK"] == "1"

def stop(*_):
    pathlib.Path(f"told {os.environ['RANK']}").touch()
    if not is_second:
        os._exit(0)
    while not os.path.exists("told 0"):
        time.sleep(0.01)
    os.kill(os.getppid(), signal.SIGTERM)

signal.signal(signal.SIGTERM, stop)
pathlib.Path("pids", str(os.getpid())).touch()
if is_second:
    while len(os.listdir("pids")) < 2:
        time.sleep(0.01)
    os.kill(os.getppid(), signal.Signals[sys.argv[1]])
while True:
    signal.pause()
"""


@pytest.mark.parametrize("number", ["SIGTERM", "SIGKILL"])
def test_ranks_end_with_their_agent(number: str, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    pids.mkdir()
    _script(tmp_path, SIGNALS)
    words = [[*_words(free_port(), "--nproc-per-node=2"), number]]
    if number == "SIGKILL":
        run_ranks(1, _agent, words, str(tmp_path), expect_death={0})
        wait_until(lambda: living_pids(pids) == [], "the kernel has killed the ranks")
    else:
        ((status, text),) = run_ranks(1, _agent, words, str(tmp_path))
        assert status == 128 + signal.SIGTERM
        assert "this agent ends, and the job's store with it" in text
        assert sorted(path.name for path in tmp_path.glob("told *")) == ["told 0", "told 1"]
        assert living_pids(pids) == []
    assert len(list(pids.iterdir())) == 2


STOPS_STORE = """
import os, pathlib, signal, sys, time
os.kill(int(sys.argv[1]), signal.SIGSTOP)
while not pathlib.Path("looked in vain 2").exists():
    time.sleep(0.01)
os.kill(os.getppid(), signal.SIGTERM)
signal.pause()
"""


def _impatient_agent(words: list[list[str]], folder: str) -> tuple[int, str]:
    regroup_agent.ANSWER_S, regroup_agent.LOOK_S = 0.2, 0.05
    look, failures = regroup_agent.Agent._look, 0

    def counted(agent: regroup_agent.Agent) -> None:
        nonlocal failures
        before = agent._looks_from
        look(agent)
        failures += agent._looks_from != before
        Path(f"looked in vain {failures}").touch()

    regroup_agent.Agent._look = counted  # type: ignore[method-assign]
    return _agent(words, folder)


def test_an_agent_ends_although_the_store_does_not_answer(tmp_path: Path) -> None:
    _script(tmp_path, STOPS_STORE)
    port = free_port()
    store = forked(run.main, ["--regroup", "--store-only", f"--master-port={port}"])
    _store(port)  # it listens
    ((status, errors),) = run_ranks(1, _impatient_agent, [[*_words(port), str(store)]], str(tmp_path))
    assert status == 128 + signal.SIGTERM
    assert errors.count("the job's store is unreachable") == 1, errors
    os.kill(store, signal.SIGCONT)
    os.kill(store, signal.SIGTERM)
    assert exit_code_of(store) == 0
