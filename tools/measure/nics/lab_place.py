"""Load drivers on the hosts of an emulated network."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence

from netlab import Lab

from bagua.net.bench.api import (
    DriverProcess,
    DriverRequest,
    DriverSettings,
    LocalPlace,
    NetworkPath,
    driver_settings,
    is_owned,
)


class LabPlace(LocalPlace):
    """One host. A ring's channels are spread over the devices that the plugin offers, as NCCL spreads its own.

    Args:
        interfaces: that the plugin may use.
        nic: on whose address a server of raw TCP listens.
    """

    def __init__(
        self,
        lab: Lab,
        host: int,
        interfaces: Sequence[str],
        *,
        nic: int = 0,
        settings: Mapping[str, str] | None = None,
        timeout_s: float,
    ) -> None:
        inherited = {name: value for name, value in os.environ.items() if not is_owned(name)}
        path = NetworkPath(lab.hosts[host].address(nic), ",".join(interfaces))
        # All hosts share this machine's CPUs.
        of_one = driver_settings(None, None, path, {**inherited, **(settings or {})}, len(lab.hosts), timeout_s)
        super().__init__(dataclasses.replace(of_one, channels=max(2, len(interfaces))))
        self._lab, self._host = lab, host

    def start(self, request: DriverRequest) -> DriverProcess:  # type: ignore[override]
        assert isinstance(self.settings, DriverSettings)
        command = self.settings.command(request)
        if request.role == "ring":
            command += ["--device", "all"]
        environment = self.settings.process_environment(request)
        return self._drivers.start(request.title, self._lab.entering(self._host, command), environment)
