"""Warns of BAGUA_* variables that nothing reads, with the name that was probably meant."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, MutableMapping

from bagua.env import SETTINGS, WITHOUT_EFFECT
from bagua.net import native, notice


def report(environment: MutableMapping[str, str]) -> None:
    """Logs each warning once for this process and its children; `environment` keeps the record."""
    notice.report(warnings(environment), environment)


def warnings(environment: Mapping[str, str]) -> list[str]:
    found = native.unknown_knobs(environment)
    known = SETTINGS | {knob.name for knob in native.knobs()}
    for name in sorted(environment):
        if not name.startswith("BAGUA_") or name.startswith("BAGUA_NET_") or name in SETTINGS:
            continue
        if name in WITHOUT_EFFECT:
            if environment[name].strip() not in ("", "0"):
                found.append(f"{name} has no effect in this version.")
            continue
        nearest = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.8)
        found.append(
            f"{name} is not a Bagua setting and has no effect." + "".join(f" Did you mean {n}?" for n in nearest)
        )
    return found
