"""Ways to use the NICs of a host: NCCL's sockets or the plugin, with the best NIC, all of them, or all joined."""

from __future__ import annotations

from dataclasses import dataclass

from bagua.net.bench.api import PLUGIN_NETWORK, SOCKET_NETWORK, Backend

_OWN = {"NCCL_NET": SOCKET_NETWORK, "ENABLE_BAGUA_NET": "0"}
JOIN = "BAGUA_NET_JOIN_NICS"


@dataclass(frozen=True)
class Setup:
    """
    Attributes:
        backend: network and settings.
        all_nics: False: only the best NIC may be used.
        joins: all NICs are one device.
    """

    backend: Backend
    all_nics: bool
    joins: bool = False

    @property
    def name(self) -> str:
        return self.backend.name

    @property
    def is_own(self) -> bool:
        """NCCL's own transport."""
        return self.backend.network == SOCKET_NETWORK


def _plugin(name: str, join: str) -> Backend:
    return Backend(name, PLUGIN_NETWORK, {"ENABLE_BAGUA_NET": "1", JOIN: join}, is_ours=True)


OWN_BEST = Setup(Backend("NCCL best NIC", SOCKET_NETWORK, _OWN), all_nics=False)
OWN_ALL = Setup(Backend("NCCL all NICs", SOCKET_NETWORK, _OWN), all_nics=True)
BEST = Setup(_plugin("bagua-net best NIC", "off"), all_nics=False)
ALL = Setup(_plugin("bagua-net all NICs", "off"), all_nics=True)
JOINED = Setup(_plugin("bagua-net joined", "auto"), all_nics=True, joins=True)


def setups_for(device: str) -> list[Setup]:
    """NCCL's own transport needs GPUs."""
    return [BEST, ALL, JOINED] if device == "cpu" else [OWN_BEST, OWN_ALL, BEST, ALL, JOINED]
