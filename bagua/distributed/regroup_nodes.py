"""The agents of a job meet in its store: which nodes are there at the start, and which ranks each of them has.

[Note: keys] Under PREFIX:
    count       how many agents have come
    node/<i>    what the agent says that has come as number i: `Node`
    start       the nodes of the start, in their order, as numbers i; or why there is none. Made by the first agent
    late        how many ranks the agents have that came after the start
    problem     why the job cannot begin, as an agent has found out
    read        how many agents know that it cannot begin
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from bagua.command_exit import EXIT_FAILURE, EXIT_USAGE, CommandError
from bagua.job.torch_internals import PrefixStore, Store

PREFIX = "bagua/agents"
_PAUSE_S = 0.1
_READ_S = 5.0


class NodeCount(NamedTuple):
    """With how many nodes the job starts: `least` at least, and `most` if they come soon."""

    least: int
    most: int

    def __str__(self) -> str:
        return str(self.least) if self.least == self.most else f"{self.least}:{self.most}"


@dataclass(frozen=True)
class Node:
    """
    Attributes:
        nodes: of the job, as its command says.
        node_rank: as its command says.
    """

    nodes: str
    processes: int
    node_rank: int | None


@dataclass(frozen=True)
class Position:
    """Of a node in the job.

    Attributes:
        node: its number.
        first_rank: the ranks of a node follow each other.
        world_size: of the start; of a node that has come later, with its own ranks.
        is_late: the job has started without it.
    """

    node: int
    first_rank: int
    world_size: int
    is_late: bool


class Meeting:
    """
    Args:
        join_s: how long `count.least` nodes are waited for.
        last_call_s: how long more are waited for, from then on.
    """

    def __init__(
        self, store: Store, count: NodeCount, join_s: float, last_call_s: float, say: Callable[[str], None]
    ) -> None:
        self._store = PrefixStore(PREFIX, store)
        self._count, self._join_s, self._last_call_s, self._say = count, join_s, last_call_s, say
        self._has_problem = False

    def join(self, processes: int, node_rank: int | None) -> Position:
        """Waits until the job starts. Once a process.

        Raises:
            CommandError: too few nodes have come, or their commands contradict each other.
        """
        try:
            number, start = self._meet(Node(str(self._count), processes, node_rank))
        except RuntimeError as error:
            raise CommandError(
                f"the job's store has ended while nodes were waited for ({str(error).splitlines()[0]}).\n"
                "See the log of node 0."
            ) from None
        if "problem" in start:
            self._note_problem()
            raise CommandError(start["problem"], EXIT_USAGE if start["is_usage"] else EXIT_FAILURE)
        order: list[int] = start["nodes"]
        sizes = [self._node(one).processes for one in order]
        if number in order:
            node = order.index(number)
            return Position(node, sum(sizes[:node]), sum(sizes), is_late=False)
        late = self._store.add("late", processes)
        return Position(number, sum(sizes) + late - processes, sum(sizes) + late, is_late=True)

    def set_problem(self, text: str) -> None:
        """The job cannot begin: tells the other agents."""
        self._store.set("problem", text)
        self._note_problem()

    def problem(self) -> str | None:
        """Why the job cannot begin. None: it may."""
        if not self._store.check(["problem"]):
            return None
        self._note_problem()
        return self._store.get("problem").decode()

    def wait_for_readers(self) -> None:
        """Before the store ends: if the job cannot begin, the other agents have a moment to read why."""
        begin = time.monotonic()
        while self._has_problem and self._store.add("read", 0) < self._store.add("count", 0):
            if time.monotonic() - begin > _READ_S:
                return
            time.sleep(_PAUSE_S)

    def _note_problem(self) -> None:
        if not self._has_problem:
            self._has_problem = True
            self._store.add("read", 1)

    def _meet(self, node: Node) -> tuple[int, dict[str, Any]]:
        """The number of this agent, and what is decided about the start."""
        store = self._store
        number = store.add("count", 1) - 1
        store.set(f"node/{number}", json.dumps(asdict(node)))
        if number == 0:
            store.set("start", json.dumps(self._decide()))
        begin = time.monotonic()
        limit = self._join_s + self._last_call_s
        if number and not store.check(["start"]):
            self._say(f"this is node {number + 1} of {self._count}. Waiting for the start of the job.")
        while not store.check(["start"]):
            if time.monotonic() - begin > limit:
                raise CommandError(f"the first of the agents has not started the job within {limit:g} s: see its log")
            time.sleep(_PAUSE_S)
        return number, json.loads(store.get("start"))

    def _node(self, number: int) -> Node:
        return Node(**json.loads(self._store.get(f"node/{number}")))

    def _decide(self) -> dict[str, Any]:
        present = self._wait_for_nodes()
        if present < self._count.least:
            return {
                "problem": f"{present} of at least {self._count.least} nodes have come within {self._join_s:g} s.\n"
                "Check that the command runs on every node with the same address and port. To wait longer:"
                " --rdzv-conf join_timeout=SECONDS",
                "is_usage": False,
            }
        nodes = {number: self._node(number) for number in range(present)}
        said = sorted({one.nodes for one in nodes.values()})
        given = [one.node_rank for one in nodes.values() if one.node_rank is not None]
        if len(said) > 1:
            return {
                "problem": f"nodes have --nnodes={' and '.join(said)}.\nGive all the same.",
                "is_usage": True,
            }
        if len(set(given)) < len(given):
            twice = next(one for one in given if given.count(one) > 1)
            return {"problem": f"--node-rank={twice} was given to two nodes.\nNumber them from 0.", "is_usage": True}
        last = self._count.most
        return {"nodes": sorted(nodes, key=lambda one: last if (rank := nodes[one].node_rank) is None else rank)}

    def _wait_for_nodes(self) -> int:
        """How many there are. The clock counts from when there were enough: who comes later still delays nobody for
        longer than `last_call_s`."""
        least, most = self._count
        begin = time.monotonic()
        enough_since: float | None = None
        if (present := self._store.add("count", 0)) < least:
            self._say(
                f"{present} of {self._count} nodes are there. Waiting for the others, for {self._join_s:g} s in all"
                " (--rdzv-conf join_timeout=SECONDS)."
            )
        while (present := self._store.add("count", 0)) < most:
            now = time.monotonic()
            if present >= least:
                if enough_since is None:
                    enough_since = now
                    self._say(
                        f"{present} of {least} to {most} nodes are there. Starting in {self._last_call_s:g} s, or when"
                        " all are there (--rdzv-conf last_call_timeout=SECONDS)."
                    )
                if now - enough_since >= self._last_call_s:
                    break
            elif now - begin >= self._join_s:
                break
            time.sleep(_PAUSE_S)
        return min(present, most)
