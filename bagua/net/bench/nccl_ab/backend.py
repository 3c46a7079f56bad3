"""Backends of the GPU comparison: a name, the environment that makes it, and the network that its log has to show.

NCCL reads its environment once per process, so a backend has ranks of its own and this file decides what they
inherit: everything except what would make one backend into another.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

PLUGIN_NETWORK = "BaguaNet"
SOCKET_NETWORK = "Socket"

# Limits of NCCL's socket transport (threads, sockets in all) and of its channel counts.
_MAX_THREADS, _MAX_SOCKETS, _MAX_CHANNELS = 16, 64, 64
DEFAULT_TUNED = "2x2x8"

# `--tuned best`: with NCCL's default, one or another of these was the best wherever it was measured: threads and
# sockets for large messages, channels where GPUs are the limit, few of both for small messages.
BEST = "best"
BEST_TUNED = ("2x4", "4x1", "1x2x8", "2x2x8", "2x4x8", "4x2x8", "1x1x16", "2x2x16")

# These choose the network or its speed: a value inherited by chance would tune every backend, or make two the same.
_OWNED = (
    "ENABLE_BAGUA_NET",
    "NCCL_NET",
    "NCCL_NET_PLUGIN",
    "NCCL_TUNER_PLUGIN",
    "NCCL_SOCKET_NTHREADS",
    "NCCL_NSOCKS_PERTHREAD",
    "NCCL_MIN_NCHANNELS",
    "NCCL_MAX_NCHANNELS",
    "NCCL_MIN_CTAS",
    "NCCL_MAX_CTAS",
    "NCCL_ALGO",
    "NCCL_PROTO",
    "NCCL_P2P_DISABLE",
    "NCCL_SHM_DISABLE",
    "NCCL_DEBUG",
    "NCCL_DEBUG_FILE",
    "NCCL_DEBUG_SUBSYS",
)
_OWNED_PREFIX = "BAGUA_NET_"

# torch.distributed would read these as a rendezvous of its own; the sessions form theirs over their own store.
_LAUNCHER = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_USE_AGENT_STORE")

_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)
_TUNED = re.compile(r"(\d+)x(\d+)(?:x(\d+))?")


@dataclass(frozen=True)
class Backend:
    name: str
    network: str  # as NCCL's log names it
    settings: dict[str, str] = field(default_factory=dict)
    shared_memory: bool = False  # may leave TCP: the yardstick, not a competitor
    is_ours: bool = False
    # All variables, as the user's job has them; None: those of the run, without what makes one backend into another.
    environment: Mapping[str, str] | None = None

    @property
    def is_own_tcp(self) -> bool:
        """NCCL's own transport over TCP: the default, or a hand-tuned setting. Of these the best is "best tuned"."""
        return self.network == SOCKET_NETWORK and not self.shared_memory


def own_transport() -> Backend:
    return Backend("NCCL default", SOCKET_NETWORK, {"NCCL_NET": SOCKET_NETWORK, "ENABLE_BAGUA_NET": "0"})


def hand_tuned(text: str) -> Backend:
    """THREADSxSOCKETS[xCHANNELS]: threads per connection, sockets per thread, least number of channels."""
    match = _TUNED.fullmatch(text)
    if match is None:
        raise ValueError(
            f"--tuned {text!r} is not THREADSxSOCKETS[xCHANNELS], {BEST} or none; write for example 2x2x8 for"
            " NCCL_SOCKET_NTHREADS=2 NCCL_NSOCKS_PERTHREAD=2 NCCL_MIN_NCHANNELS=8"
        )
    threads, sockets = int(match.group(1)), int(match.group(2))
    channels = int(match.group(3)) if match.group(3) else None
    if not 1 <= threads <= _MAX_THREADS:
        raise ValueError(f"--tuned {text!r}: {threads} threads is outside NCCL's 1..{_MAX_THREADS}")
    if sockets < 1 or threads * sockets > _MAX_SOCKETS:
        raise ValueError(
            f"--tuned {text!r}: {threads} threads x {sockets} sockets is outside NCCL's 1..{_MAX_SOCKETS} sockets"
        )
    if channels is not None and not 1 <= channels <= _MAX_CHANNELS:
        raise ValueError(f"--tuned {text!r}: {channels} channels is outside 1..{_MAX_CHANNELS}")
    settings = {**own_transport().settings, "NCCL_SOCKET_NTHREADS": str(threads), "NCCL_NSOCKS_PERTHREAD": str(sockets)}
    name = f"NCCL t{threads}s{sockets}"
    if channels is not None:
        settings["NCCL_MIN_NCHANNELS"] = str(channels)
        name += f" {channels}ch"
    return Backend(name, SOCKET_NETWORK, settings)


def tuned_settings(words: Sequence[str] | None) -> list[str]:
    """The settings that --tuned asks for: repeated or with commas; `best` stands for BEST_TUNED, `none` for nothing.

    A setting that is named beside `best`, which has it already, is meant once.
    """
    if words is None:
        return [DEFAULT_TUNED]
    named = [text.strip() for word in words for text in word.split(",")]
    if BEST not in named:
        return [text for text in named if text != "none"]
    return [*BEST_TUNED, *(text for text in named if text not in (BEST, "none", *BEST_TUNED))]


def bagua_net(library: Path) -> Backend:
    return Backend("bagua-net", PLUGIN_NETWORK, {"NCCL_NET_PLUGIN": str(library)}, is_ours=True)


def bagua_net_variant(text: str, ours: Backend) -> Backend:
    """NAME:VARIABLE=VALUE[,VARIABLE=VALUE...]: our plugin with settings on top, to try knobs beside the defaults."""
    name, colon, rest = text.partition(":")
    settings = dict(ours.settings)
    for assignment in rest.split(","):
        match = _ASSIGNMENT.fullmatch(assignment)
        if not name or not colon or match is None:
            raise ValueError(
                f"--variant {text!r} is not NAME:VARIABLE=VALUE[,VARIABLE=VALUE...]; write for example"
                " rails4:BAGUA_NET_RAILS=4"
            )
        settings[match.group(1)] = match.group(2)
    return Backend(name, PLUGIN_NETWORK, settings)


def shared_memory() -> Backend:
    return Backend("shared memory", SOCKET_NETWORK, dict(own_transport().settings), shared_memory=True)


def make_backends(
    *, library: Path | None, tuned: Sequence[str], variants: Sequence[str], with_shared_memory: bool
) -> list[Backend]:
    """NCCL's default first: the one that the others are compared with. No library: NCCL's own settings only."""
    backends = [own_transport(), *(hand_tuned(text) for text in tuned)]
    if library is not None:
        ours = bagua_net(library)
        backends += [ours, *(bagua_net_variant(text, ours) for text in variants)]
    elif variants:
        raise ValueError(f"--variant {variants[0]!r} needs the plugin; leave --without-plugin out")
    if with_shared_memory:
        backends.append(shared_memory())
    names = [backend.name for backend in backends]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"two backends are called {name!r}; give each --tuned and --variant once")
    return backends


def is_owned(variable: str) -> bool:
    return variable in _OWNED or variable.startswith(_OWNED_PREFIX)


def ignored_variables(environment: Mapping[str, str]) -> list[str]:
    """Settings of the caller that no backend sees; the report names them."""
    return sorted(name for name in environment if is_owned(name) and name != "ENABLE_BAGUA_NET")


def worker_environment(
    backend: Backend,
    inherited: Mapping[str, str],
    *,
    tcp_only: bool,
    debug_file: Path,
    import_path: Iterable[Path] = (),
) -> dict[str, str]:
    if backend.environment is None:
        environment = {name: value for name, value in inherited.items() if not is_owned(name)}
    else:
        environment = dict(backend.environment)
    for name in _LAUNCHER:
        environment.pop(name, None)
    if tcp_only:
        environment["NCCL_P2P_DISABLE"] = "1"
        if not backend.shared_memory:
            environment["NCCL_SHM_DISABLE"] = "1"
        environment.setdefault("NCCL_SOCKET_IFNAME", "lo")
    environment["NCCL_DEBUG"] = "INFO"
    environment["NCCL_DEBUG_SUBSYS"] = "INIT,NET,ENV"
    environment["NCCL_DEBUG_FILE"] = str(debug_file)
    # A lost peer has to become an error of the turn, not a core dump of the watchdog later on.
    environment.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    environment["OMP_NUM_THREADS"] = "1"
    environment["PYTHONSAFEPATH"] = "1"
    paths = [str(path) for path in import_path]
    if environment.get("PYTHONPATH"):
        paths.append(environment["PYTHONPATH"])
    if paths:
        environment["PYTHONPATH"] = ":".join(paths)
    environment.update(backend.settings)
    return environment
