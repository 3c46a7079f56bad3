"""What the kernel of this machine tells of interfaces that carry no network of their own, and what counts of it."""

from __future__ import annotations

import json
import sys

from support.labs import NEEDS_LAB, Lab
from support.nic_traffic import run_ip

pytestmark = NEEDS_LAB

_SPEEDS = """
import json
from bagua.net import native
print(json.dumps({row.name: row.speed_mbps for row in native.interfaces({})}))
"""


def test_the_speeds_that_the_kernel_makes_up_are_unknown() -> None:
    with Lab(ip_versions=(4,)) as lab:
        run_ip(lab, 0, "link", "add", "veth7", "type", "veth", "peer", "name", "veth8")
        run_ip(lab, 0, "tuntap", "add", "tun7", "mode", "tun")
        run_ip(lab, 0, "link", "add", "br7", "type", "bridge")
        run_ip(lab, 0, "link", "set", "veth8", "master", "br7")
        made_up = ["veth7", "veth8", "tun7", "br7"]
        for name in made_up:
            run_ip(lab, 0, "link", "set", name, "up")
        told = {name: lab.run(0, ["cat", f"/sys/class/net/{name}/speed"]).stdout.strip() for name in made_up}
        assert told["veth7"] == told["veth8"] == "10000", told
        speeds = json.loads(lab.run(0, [sys.executable, "-c", _SPEEDS], check=True).stdout)
        assert {name: speeds[name] for name in made_up} == dict.fromkeys(made_up, 0), told
