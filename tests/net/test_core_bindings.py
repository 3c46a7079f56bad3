"""bagua.net._core: what the compiled library tells Python."""

from __future__ import annotations

import ast
import importlib.metadata
import os
import re
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import bagua.net
from bagua.launch_environment import LAUNCHERS, job_position
from bagua.net import _core, native
from bagua.net.stats.reports import CommReport, ProcessReport, StreamReport


def test_the_library_is_of_the_same_version_as_the_package() -> None:
    assert _core.version() == importlib.metadata.version("bagua")


def test_knobs_are_unique_and_not_retired() -> None:
    names = [knob["name"] for knob in _core.knobs()]
    assert len(set(names)) == len(names)
    retired = {knob["name"] for knob in _core.retired_knobs()}
    assert "BAGUA_NET_TOKIO_WORKER_THREADS" in retired
    assert retired.isdisjoint(names)


def test_every_default_is_a_valid_value() -> None:
    defaults = {knob["name"]: knob["default_value"] for knob in _core.knobs()}
    # ENABLE_BAGUA_NET, BAGUA_NET_JOIN_NICS: no value is what happens without the variable.
    unset = [name for name, value in defaults.items() if value == "not set"]
    assert unset == [
        "ENABLE_BAGUA_NET",
        "BAGUA_NET_JOIN_NICS",
        "BAGUA_NET_SECRET_FILE",
        "BAGUA_NET_TRACE",
        "BAGUA_NET_FAULT",
    ]
    _core.check_environment({name: value for name, value in defaults.items() if value != "not set"})


def test_every_knob_refuses_nonsense() -> None:
    numbers = [knob["name"] for knob in _core.knobs() if knob["type"] != "path"]  # any name is one
    for name in numbers:
        with pytest.raises(ValueError, match=f"^{name}=nonsense: must be "):
            _core.check_environment({name: "nonsense"})
    with pytest.raises(
        ValueError, match=r"ENABLE_BAGUA_NET=maybe: .*; BAGUA_NET_NSTREAMS=0: must be an integer from 1"
    ):
        _core.check_environment({"BAGUA_NET_NSTREAMS": "0", "ENABLE_BAGUA_NET": "maybe"})


@pytest.mark.parametrize("knob", [knob for knob in _core.knobs() if knob["type"] == "integer"], ids=lambda k: k["name"])
def test_the_documented_range_is_the_real_one(knob: dict[str, str]) -> None:
    match = re.match(r"(\d+) to (\d+)", knob["range"])
    assert match is not None
    low, high = int(match[1]), int(match[2])
    for good in (low, high):
        _core.check_environment({knob["name"]: str(good)})
    for bad in (low - 1, high + 1):
        with pytest.raises(ValueError, match=f"{low} to {high}"):
            _core.check_environment({knob["name"]: str(bad)})
    if "auto" in knob["range"]:
        _core.check_environment({knob["name"]: "auto"})
    else:
        with pytest.raises(ValueError, match="must be"):
            _core.check_environment({knob["name"]: "auto"})


def test_unknown_and_retired_names_are_warned_about() -> None:
    warnings = _core.unknown_knobs(
        {"BAGUA_NET_STREAMS": "4", "BAGUA_NET_IMPLEMENT": "TOKIO", "BAGUA_NET_RAILS": "2", "PATH": "/bin"}
    )
    assert len(warnings) == 2
    assert warnings[0].startswith("BAGUA_NET_IMPLEMENT has no effect in this version: ")
    assert "Did you mean BAGUA_NET_NSTREAMS?" in warnings[1]


def test_every_interface_of_the_kernel_has_one_verdict() -> None:
    loopback, *others = _core.interfaces({"NCCL_SOCKET_IFNAME": "=lo", "NCCL_SOCKET_FAMILY": "AF_INET"})
    assert (loopback["name"], loopback["address"], loopback["pci_path"]) == ("lo", "127.0.0.1", "")
    assert loopback["used"]
    assert loopback["loopback"]
    assert loopback["reason"] == "matches NCCL_SOCKET_IFNAME==lo"
    assert sorted(["lo", *(row["name"] for row in others)]) == sorted(name for _, name in socket.if_nameindex())
    assert all(row["reason"].startswith("skipped: ") and not row["used"] for row in others)


def test_no_usable_interface_is_an_error_that_lists_what_there_is() -> None:
    with pytest.raises(ValueError, match=r"NCCL_SOCKET_IFNAME==no-such-nic: .*lo \(127\.0\.0\.1"):
        _core.interfaces({"NCCL_SOCKET_IFNAME": "=no-such-nic"})
    with pytest.raises(ValueError, match="NCCL_SOCKET_FAMILY=IPv4: must be AF_INET"):
        _core.interfaces({"NCCL_SOCKET_FAMILY": "IPv4"})


def test_the_environment_is_the_argument_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BAGUA_NET_NSTREAMS", "nonsense")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "=no-such-nic")
    _core.check_environment({})
    assert _core.interfaces({"NCCL_SOCKET_IFNAME": "=lo"})[0]["used"]
    with pytest.raises(ValueError, match="BAGUA_NET_NSTREAMS=nonsense"):
        _core.check_environment(os.environ)


def test_variables_that_are_not_utf8_do_no_harm() -> None:
    odd = os.fsdecode(b"\xff\xfe")
    _core.check_environment({"SOMETHING": odd, odd: "1"})
    with pytest.raises(ValueError, match=f"BAGUA_NET_RAILS={odd}: must be"):
        _core.check_environment({"BAGUA_NET_RAILS": odd})
    assert odd in _core.unknown_knobs({f"BAGUA_NET_{odd}": "1"})[0]


@pytest.mark.parametrize("function", [_core.check_environment, _core.unknown_knobs, _core.interfaces])
def test_something_that_is_no_environment_is_a_type_error(function: object) -> None:
    assert callable(function)
    for wrong in (None, 3, {"A": 1}, {1: "A"}):
        with pytest.raises(TypeError):
            function(wrong)


def test_cpu_budget_follows_the_launcher_and_the_mask() -> None:
    """The last: one of twice as many ranks as there are CPUs, bound to one of them."""
    cpus = os.sched_getaffinity(0)

    def ask(local_world_size: int, before: str = "pass") -> tuple[dict[str, int], int]:
        script = f"import os; {before}; from bagua.net import _core; print(_core.cpu_budget(), _core.default_workers())"
        done = subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "LOCAL_WORLD_SIZE": str(local_world_size)},
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        budget, workers = done.stdout.rsplit(" ", 1)
        return ast.literal_eval(budget), int(workers)

    budget, workers = ask(3)
    assert budget["local_ranks"] == 3
    assert 1 <= budget["usable_cpus"] <= len(cpus)
    assert 0 <= workers <= max(0, budget["usable_cpus"] // 3 - 2)  # cpu_budget_test.cc has the exact numbers
    assert ask(4000) == (budget | {"local_ranks": 4000}, 0)
    bound, _ = ask(2 * len(cpus), f"os.sched_setaffinity(0, [{min(cpus)}])")
    assert (bound["usable_cpus"], bound["local_ranks"]) == (1, 2)


def test_every_counter_is_in_a_report() -> None:
    layout = native.page_layout()
    process, comm, stream = ({one.name for one in fields(kind)} for kind in (ProcessReport, CommReport, StreamReport))
    counters = [*layout.comm_counters, *layout.stream_counters]
    assert {row.name for row in counters if row.metric} <= process
    keys = {re.sub("_[un]s$", "_s", row.name) for row in counters}
    assert keys - (process | comm | stream) == {"socket_buffer_s"}


def test_calls_from_many_threads() -> None:
    workers = _core.default_workers()

    def call(_: int) -> None:
        for _ in range(50):
            assert _core.interfaces({"NCCL_SOCKET_IFNAME": "=lo"})[0]["used"]
            assert _core.default_workers() == workers
            with pytest.raises(ValueError, match="BAGUA_NET_RAILS"):
                _core.check_environment({"BAGUA_NET_RAILS": "0"})

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(call, range(8)))


def test_the_stub_names_what_the_module_has() -> None:
    # An editable install has the stub in the source tree and the module in site-packages: both are in __path__.
    (stub,) = [Path(entry, "_core.pyi") for entry in bagua.net.__path__ if Path(entry, "_core.pyi").is_file()]
    declared = {node.name for node in ast.parse(stub.read_text()).body if isinstance(node, ast.FunctionDef)}
    assert declared == {name for name in dir(_core) if not name.startswith("_")}
    assert all(getattr(_core, name).__doc__ for name in declared)


# --- which rank this is: Python and the plugin find the same ----------------------------------------------------------

_NAMES = [name for launcher in LAUNCHERS for name in launcher[1:] if name]
_VALUES = st.sampled_from(
    ["0", "1", " 7 ", "4096", "4097", str((1 << 31) - 1), str(1 << 31), "-1", "+1", "1_0", "\u0663", "x", "", " "]
)


def positions_of(environment: dict[str, str]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return tuple(-1 if one is None else one for one in job_position(environment)), _core.job_position(environment)


@given(st.dictionaries(st.sampled_from(_NAMES), _VALUES))
def test_the_plugin_finds_the_same(environment: dict[str, str]) -> None:
    ours, of_the_plugin = positions_of(environment)
    assert ours == of_the_plugin


@pytest.mark.parametrize("launcher", LAUNCHERS, ids=lambda one: one.launcher)
def test_every_launcher_is_understood(launcher: tuple[str, ...]) -> None:
    expected = (3, 8, 1, 4 if launcher[4] else -1)
    environment = {name: str(value) for name, value in zip(launcher[1:], expected, strict=True) if name}
    assert positions_of(environment) == (expected, expected)


def test_the_first_launcher_that_says_it_counts() -> None:
    """mpirun inside a Slurm allocation: Slurm's variables are those of its daemon."""
    slurm = {"SLURM_LOCALID": "0", "SLURM_NTASKS": "1"}
    expected = (-1, 4, 3, -1)
    environment = slurm | {"OMPI_COMM_WORLD_LOCAL_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4"}
    assert positions_of(environment) == (expected, expected)
