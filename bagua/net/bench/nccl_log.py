"""What NCCL's own log says about the network of a job: the proof that a figure belongs to the backend it is shown
under. NCCL falls back to its sockets silently, so without this a comparison could show Socket beside Socket.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

# "host:pid:tid [device] NCCL INFO text"; a plugin may break lines of its own differently, so only the text is used.
_LEVEL = re.compile(r"NCCL (INFO|WARN) (.*)")
_USING = re.compile(r"Using network (.+?)\s*$")
_TABLE = re.compile(r"NET/Plugin: Loaded net plugin (.+?) \(v(\d+)\)")
_CHANNELS = re.compile(r"(\d+) coll channels, (\d+) collnet channels, (\d+) nvls channels, (\d+) p2p channels")
_NODES = re.compile(r"\bnRanks (\d+) nNodes (\d+)\b")
_OWN = re.compile(r"BaguaNet|bagua[-_]net", re.IGNORECASE)
_VIA = re.compile(r"Channel \d+(?:/\d+)? : \d+\[\w+\] -> \d+\[\w+\].* via (\S+)")

_KEPT_LINES = 12


@dataclass(frozen=True)
class NetworkProof:
    """Of one process's log."""

    network: str | None = None  # "BaguaNet"; None: the log names none
    table: str | None = None  # "v11": the table of the external plugin; None: an internal network
    channels: str | None = None  # "8 coll channels, ... 8 p2p channels"
    nodes: int | None = None
    transports: tuple[str, ...] = ()  # "NET/BaguaNet/0", "SHM/direct/direct"
    plugin_lines: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    def summary(self) -> str:
        parts = [f"Using network {self.network}" if self.network else "no network named in the log"]
        if self.table:
            parts.append(f"table {self.table}")
        if self.channels:
            parts.append(self.channels)
        return ", ".join(parts)


def read_proof(log: str) -> NetworkProof:
    network = table = channels = None
    nodes: int | None = None
    transports: dict[str, None] = {}
    plugin_lines: dict[str, None] = {}
    warnings: dict[str, None] = {}
    for line in log.splitlines():
        level = _LEVEL.search(line)
        text = level.group(2) if level else line.strip()
        if using := _USING.search(text):
            network = using.group(1)
        elif loaded := _TABLE.search(text):
            table = f"v{loaded.group(2)}"
        elif counted := _CHANNELS.search(text):
            channels = counted.group(0)
        elif via := _VIA.search(text):
            transports[via.group(1)] = None
            continue
        if counted_nodes := _NODES.search(text):
            nodes = int(counted_nodes.group(2))
        if level and level.group(1) == "WARN":
            warnings[text] = None
        elif _OWN.search(text) and "set by environment" not in text:
            plugin_lines[text] = None
    return NetworkProof(
        network=network,
        table=table if network not in ("Socket", "IB") else None,
        channels=channels,
        nodes=nodes,
        transports=tuple(transports)[:_KEPT_LINES],
        plugin_lines=tuple(plugin_lines)[:_KEPT_LINES],
        warnings=tuple(warnings)[:_KEPT_LINES],
    )


def read_proof_file(path: Path) -> NetworkProof:
    """Of one process; a log that NCCL never wrote proves nothing, and says so by naming no network."""
    try:
        return read_proof(path.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return NetworkProof()


def network_error(backend: str, expected: str, proofs: Sequence[NetworkProof | None]) -> str | None:
    """One sentence naming the ranks that used something else; None if every rank used what it should."""
    wrong = {
        rank: (proof.network if proof else None) or "none that its log names"
        for rank, proof in enumerate(proofs)
        if proof is None or (proof.network or "").lower() != expected.lower()
    }
    if not wrong:
        return None
    used = ", ".join(f"rank {rank} used {network}" for rank, network in wrong.items())
    return (
        f"{backend} should have used network {expected}, but {used}; its figures are not shown under that name."
        " The kept NCCL logs (--output-dir) and `bagua-net doctor` say why"
    )
