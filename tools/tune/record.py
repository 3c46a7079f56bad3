"""Real cases: each model in each network, recorded into one JSON file per case."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from netlab import Lab, NetlabError
from rank_team.team import RankTeam, rank_environment
from sweep.grid import Network
from sweep.lab_placement import LabPlacement

from bagua.net.bench.errors import BenchError
from bagua.net.bench.machine import describe_machine

_CASE_TIMEOUT_S = 600.0
_TOOLS = Path(__file__).resolve().parents[1]


def record(
    networks: Sequence[Network],
    models: Sequence[str],
    allow: Sequence[str],
    folder: Path,
    repetitions: int,
    pairs: int,
    ranks: int,
    device: str,
) -> int:
    """Returns how many cases failed; what went wrong is printed."""
    folder.mkdir(parents=True, exist_ok=True)
    failures = 0
    for network in networks:
        try:
            failures += _in_network(network, models, allow, folder, repetitions, pairs, ranks, device)
        except (BenchError, NetlabError) as error:
            print(f"{network}: {error}", file=sys.stderr, flush=True)
            failures += 1
    return failures


def _in_network(
    network: Network,
    models: Sequence[str],
    allow: Sequence[str],
    folder: Path,
    repetitions: int,
    pairs: int,
    ranks: int,
    device: str,
) -> int:
    rate = network.rate_gbit * 1e3
    lab = Lab(ranks, rate_mbit=rate, delay_ms=network.delay_ms, tcp_buffer_bytes=network.tcp_buffer_bytes)
    with lab, tempfile.TemporaryDirectory(prefix="tune-") as cache:
        team = RankTeam(
            "tune.worker",
            ranks,
            device,
            timeout_s=_CASE_TIMEOUT_S,
            environment=lambda _: rank_environment(settings={"ENABLE_BAGUA_NET": "1"}, import_path=[_TOOLS]),
            placement=LabPlacement(lab, gpus=torch.cuda.device_count() if device == "cuda" else None),
        )
        failed = True
        try:
            for model in models:
                begin = time.monotonic()
                answers = team.ask(
                    "case",
                    _CASE_TIMEOUT_S,
                    model=model,
                    allow=list(allow),
                    repetitions=repetitions,
                    pairs=pairs,
                    cache=str(Path(cache, model)),
                )
                document = {
                    "model": model,
                    "device": device,
                    "rate_gbit": network.rate_gbit,
                    "delay_ms": network.delay_ms,
                    "ranks": ranks,
                    "machine": describe_machine().as_dict(),
                    **{name: value for name, value in answers[0].items() if name != "event"},
                }
                path = folder / f"{device}-{model}-{network.rate_gbit:g}g-{network.delay_ms:g}ms.json"
                path.write_text(json.dumps(document), encoding="utf-8")
                print(f"{path} ({time.monotonic() - begin:.0f} s)", flush=True)
            failed = False
        finally:
            team.close(failed=failed)
    return 0
