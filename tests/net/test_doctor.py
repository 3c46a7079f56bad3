"""`bagua-net doctor`: each thing that can be wrong is found, named, and comes with a remedy."""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.fresh_process import BuildLibrary, BuildNccl, Completed, RunCommand

import bagua.net
from bagua import gpu_presence
from bagua.cli.net import main
from bagua.net import native, nccl_config_file, rdma
from bagua.net.activation import Surroundings
from bagua.net.doctor import activation_check, examination, interface_state, library_check, network_check, self_test
from bagua.net.doctor.activation_check import check_activation
from bagua.net.doctor.finding import Finding, Section, Status, split_message
from bagua.net.doctor.library_check import check_library
from bagua.net.doctor.nccl_check import check_nccl
from bagua.net.doctor.self_test import check_loopback
from bagua.net.doctor.settings_check import check_settings
from bagua.net.nccl_config_file import ConfigSetting
from bagua.net.nccl_library import NcclLibrary, TorchInstallation
from bagua.net.nccl_release import NcclRelease

_ASKED = {"ENABLE_BAGUA_NET": "1"}
_TORCH = TorchInstallation(Path("/site/torch"), "2.10.0+cu128", has_cuda=True)
_SECTIONS = ["library", "activation", "nccl", "interfaces", "rdma", "settings", "self_test"]

Doctor = Callable[..., tuple[Completed, dict[str, Any]]]


@pytest.fixture
def doctor(run_command: RunCommand, bagua_net: Path, environment: dict[str, str], build_nccl: BuildNccl) -> Doctor:
    """The installed command with --json, on a machine that has an NCCL, and with variables besides."""
    machine = {**environment, "LD_LIBRARY_PATH": str(build_nccl(22809).parent)}

    def run(**variables: str) -> tuple[Completed, dict[str, Any]]:
        result = run_command([bagua_net, "doctor", "--json"], machine | variables)
        return result, json.loads(result.stdout)

    return run


def failed(report: dict[str, Any]) -> list[str]:
    return [name for name, section in report["sections"].items() if section["status"] == "fail"]


def only(section: Section) -> Finding:
    (finding,) = section.findings
    return finding


def test_all_is_well(doctor: Doctor) -> None:
    result, report = doctor(ENABLE_BAGUA_NET="1")
    assert failed(report) == []
    assert result.returncode == 0
    assert report["usable"] is True
    assert list(report["sections"]) == _SECTIONS
    library = report["sections"]["library"]["facts"]
    assert library["path"] == str(bagua.net.library_path())
    assert library["version"] == report["bagua_version"] == bagua.__version__
    assert library["tables"] == [5, 6, 7, 8, 9, 10, 11, 12]
    assert report["sections"]["activation"]["facts"] == {"way": "ENABLE_BAGUA_NET=1"}
    assert {"version": "2.28.9", "table": 11}.items() <= report["sections"]["nccl"]["facts"]["libraries"][-1].items()
    assert any(row["used"] for row in report["sections"]["interfaces"]["facts"]["interfaces"])
    assert report["sections"]["settings"]["facts"]["environment"]["ENABLE_BAGUA_NET"] == "1"
    self_test_facts = report["sections"]["self_test"]["facts"]
    assert self_test_facts["passed"] is True
    assert self_test_facts["busbw_gb_per_s"] > 0


def test_under_run(
    run_command: RunCommand, bagua_net: Path, environment: dict[str, str], build_nccl: BuildNccl
) -> None:
    """What `run` arranges, the doctor finds sufficient, also for NCCL 2.18, which is served by name."""
    for code, options in ((22809, []), (21805, ["--by-name"])):
        machine = {**environment, "LD_LIBRARY_PATH": str(build_nccl(code).parent)}
        command = [bagua_net, "run", *options, "--", bagua_net, "doctor"]
        result = run_command(command, machine)
        assert result.returncode == 0, result.stdout
        assert "every job takes the plugin" in result.stdout


def test_enabled_by_file(doctor: Doctor, run_command: RunCommand, bagua_net: Path, environment: dict[str, str]) -> None:
    run_command([bagua_net, "enable"], environment)
    result, report = doctor()
    assert result.returncode == 0
    file = Path(environment["HOME"], ".nccl.conf")
    assert report["sections"]["activation"]["facts"] == {"way": f"{file} sets NCCL_NET_PLUGIN"}
    assert report["sections"]["settings"]["facts"]["config_files"] == [str(file)]


@pytest.mark.parametrize(
    ("variables", "section", "text"),
    [
        ({}, "activation", "nothing asks for the plugin"),
        ({"ENABLE_BAGUA_NET": "0"}, "activation", "ENABLE_BAGUA_NET=0 switches the plugin off"),
        (_ASKED | {"NCCL_NET": "Socket"}, "activation", "NCCL_NET=Socket (set in the environment) is kept"),
        (_ASKED | {"NCCL_NET_PLUGIN": "ofi"}, "activation", "NCCL_NET_PLUGIN=ofi (set in the environment) is kept"),
        (_ASKED | {"NCCL_SOCKET_IFNAME": "=nosuch0"}, "interfaces", "nosuch0"),
        (_ASKED | {"BAGUA_NET_NSTREAMS": "lots"}, "settings", "BAGUA_NET_NSTREAMS=lots: must be"),
    ],
)
def test_what_keeps_a_job_from_the_plugin(variables: dict[str, str], section: str, text: str, doctor: Doctor) -> None:
    result, report = doctor(**variables)
    assert result.returncode == 1
    assert report["usable"] is False
    assert section in failed(report)
    (finding,) = [item for item in report["sections"][section]["findings"] if item["status"] == "fail"]
    assert text in finding["text"]
    assert finding["remedy"]


def test_a_bad_switch(doctor: Doctor) -> None:
    result, report = doctor(ENABLE_BAGUA_NET="maybe")
    assert result.returncode == 1
    assert failed(report) == ["settings"]


def test_the_report_for_people(
    run_command: RunCommand, bagua_net: Path, environment: dict[str, str], build_nccl: BuildNccl
) -> None:
    machine = {**environment, "LD_LIBRARY_PATH": str(build_nccl(22809).parent)}
    result = run_command([bagua_net, "doctor"], machine)
    assert result.returncode == 1
    titles = ["Library", "Activation", "NCCL", "Interfaces", "RDMA", "Settings", "Loopback self-test"]
    lines = result.stdout.splitlines()
    assert [line for line in lines if line in titles] == titles
    text = " ".join(result.stdout.split())
    assert "Activation FAIL nothing asks for the plugin: ENABLE_BAGUA_NET and NCCL_NET_PLUGIN are not set" in text
    assert "are not set -> export ENABLE_BAGUA_NET=1" in text
    assert text.endswith(" A job started in this environment would NOT use the plugin. Failed checks: Activation.")
    assert "\x1b" not in result.stdout, "colour is for terminals"
    assert all("/" in line or len(line) <= 80 for line in lines), "only paths are longer"

    result = run_command([bagua_net, "doctor"], {**machine, "ENABLE_BAGUA_NET": "1"})
    assert result.returncode == 0
    assert result.stdout.endswith("\nA job started in this environment would use the plugin.\n")
    assert "FAIL" not in result.stdout


def test_a_missing_library(
    run_command: RunCommand, environment: dict[str, str], without_library: dict[str, str]
) -> None:
    command = [sys.executable, "-S", "-m", "bagua.cli.net", "doctor", "--json"]
    result = run_command(command, environment | without_library)
    report = json.loads(result.stdout)
    assert result.returncode == 1
    assert {"library", "interfaces", "settings"} <= set(failed(report))
    (finding,) = report["sections"]["library"]["findings"]
    assert "libnccl-net.so is not installed" in finding["text"]
    assert "pip install" in finding["remedy"]
    (finding,) = report["sections"]["interfaces"]["findings"]
    assert "bagua.net._core cannot be imported" in finding["text"]


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"BAGUA_NET_REQUIRED": "1", "NCCL_NET": "Socket"}, "BAGUA_NET_REQUIRED=1, but NCCL_NET=Socket"),
        ({"BAGUA_NET_REQUIRED": "maybe"}, "BAGUA_NET_REQUIRED=maybe: must be 1, true, yes or on"),
    ],
)
def test_what_fails_every_import(
    doctor: Doctor,
    variables: dict[str, str],
    said: str,
    run_command: RunCommand,
    bagua_net: Path,
    environment: dict[str, str],
) -> None:
    """With these variables `import bagua` raises in a job. The commands import it, too, and go on."""
    result, report = doctor(**variables)
    findings = [finding for name in failed(report) for finding in report["sections"][name]["findings"]]
    assert any(said in finding["text"] for finding in findings)
    assert result.stderr == ""
    for command in ([bagua_net], [sys.executable, "-m", "bagua.cli.net"]):
        result = run_command([*command, "disable"], environment | variables)
        assert (result.returncode, result.stderr) == (0, "")


# --- library ---------------------------------------------------------------------------------------------------------

_TABLE = 'struct {{ const char* name; void* slots[21]; }} ncclNetPlugin_v{} = {{"{}"}};\n'
_ALL_TABLES = "".join(_TABLE.format(table, "BaguaNet") for table in range(5, 13))
_VERSION = 'const char version[] = "Bagua-Net {} active: table v";\n'


def test_a_good_library(build_library: BuildLibrary) -> None:
    section = check_library(build_library("libnccl-net.so", _ALL_TABLES + _VERSION.format(bagua.__version__)))
    assert section.status is Status.OK


def test_whether_the_loader_finds_it_again(build_library: BuildLibrary) -> None:
    """A library that stays loaded and bears the default name is found by that name; another one is not."""
    plain = build_library("libnccl-net.so", _ALL_TABLES)
    assert check_library(plain).facts["reopens_by_name"] is False
    options = ("-Wl,-z,nodelete", "-Wl,-soname,libnccl-net.so")
    assert check_library(build_library("libnccl-net.so", _ALL_TABLES, *options)).facts["reopens_by_name"] is True


def test_a_file_that_is_no_library(tmp_path: Path) -> None:
    file = tmp_path / "libnccl-net.so"
    file.write_text("not a library")
    opened, version = check_library(file).findings
    assert opened.status is Status.FAIL
    assert "libnccl-net.so does not open: " in opened.text
    assert opened.remedy.startswith("reinstall bagua")
    assert version.text.startswith("the library does not tell its version")


def test_a_library_that_crashes(build_library: BuildLibrary) -> None:
    text = "__attribute__((constructor)) static void crash(void) { __builtin_trap(); }"
    opened = check_library(build_library("libnccl-net.so", text)).findings[0]
    assert "does not open: opening it ended the process with code -4" in opened.text


def test_a_library_that_hangs(build_library: BuildLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library_check, "_OPEN_TIMEOUT_S", 0.5)
    text = "int pause(void); __attribute__((constructor)) static void hang(void) { pause(); }"
    opened = check_library(build_library("libnccl-net.so", text)).findings[0]
    assert "does not open: opening it did not end within 0.5 s" in opened.text


def test_a_library_without_some_tables(build_library: BuildLibrary) -> None:
    text = "".join(_TABLE.format(table, "BaguaNet") for table in range(5, 11))
    opened = check_library(build_library("libnccl-net.so", text)).findings[0]
    assert opened.status is Status.FAIL
    assert "lacks NCCL's tables v11, v12" in opened.text


def test_somebody_elses_library(build_library: BuildLibrary) -> None:
    opened = check_library(build_library("libnccl-net.so", _ALL_TABLES.replace("BaguaNet", "Other"))).findings[0]
    assert opened.status is Status.FAIL
    assert "calls itself 'Other' and not BaguaNet" in opened.text


def test_a_library_of_another_version(build_library: BuildLibrary) -> None:
    version = check_library(build_library("libnccl-net.so", _ALL_TABLES + _VERSION.format("0.9.0"))).findings[1]
    assert version.status is Status.FAIL
    assert version.text == f"the library is version 0.9.0, and the package is {bagua.__version__}"


# --- activation ------------------------------------------------------------------------------------------------------


@pytest.fixture
def here(tmp_path: Path) -> Surroundings:
    library = tmp_path / "lib" / "libnccl-net.so"
    library.parent.mkdir()
    library.touch()
    return Surroundings(library)


def test_without_torch(here: Surroundings) -> None:
    finding = only(check_activation(_ASKED, here, None, []))
    assert finding.status is Status.FAIL
    assert finding.text == "ENABLE_BAGUA_NET=1 acts where Python imports torch, and there is no torch here"
    assert "bagua-net run -- CMD" in finding.remedy


def test_an_old_torch(here: Surroundings) -> None:
    finding = only(check_activation(_ASKED, here, replace(_TORCH, version="2.4.1"), []))
    assert finding.status is Status.FAIL
    assert finding.text == "torch 2.4.1 loads no extensions by itself; 2.5 and newer do"


def test_torch_told_not_to_load_extensions(here: Surroundings) -> None:
    variables = {**_ASKED, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    finding = only(check_activation(variables, here, _TORCH, []))
    assert finding.status is Status.FAIL
    assert finding.text == "TORCH_DEVICE_BACKEND_AUTOLOAD=0 keeps torch from activating the plugin"


def test_no_entry_point(here: Surroundings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activation_check, "entry_points", lambda **_: [])
    finding = only(check_activation(_ASKED, here, _TORCH, []))
    assert finding.status is Status.FAIL
    assert finding.text == "the entry point that torch calls is not installed: bagua runs from a source tree"


def test_the_installed_entry_point_is_found(here: Surroundings) -> None:
    section = check_activation(_ASKED, here, _TORCH, [])
    assert section.status is Status.OK
    assert section.findings[0].text == "jobs that import torch take the plugin: ENABLE_BAGUA_NET=1, torch 2.10.0+cu128"
    required = check_activation({"BAGUA_NET_REQUIRED": "1"}, here, _TORCH, [])
    assert required.facts["way"] == "BAGUA_NET_REQUIRED=1"


@pytest.mark.parametrize("variables", [{}, _ASKED])
def test_ways_that_need_no_python(variables: dict[str, str], here: Surroundings) -> None:
    path = str(here.library)
    section = check_activation({**variables, "NCCL_NET_PLUGIN": path}, here, None, [])
    assert only(section).text == f"every job takes the plugin: NCCL_NET_PLUGIN={path}"
    by_name = replace(here, loader_path=(here.library.parent,))
    assert only(check_activation(variables, by_name, None, [])).text.endswith("LD_LIBRARY_PATH leads to it")
    config = replace(here, config=(ConfigSetting("NCCL_NET_PLUGIN", path, Path("/etc/nccl.conf")),))
    assert only(check_activation(variables, config, None, [])).text.endswith("/etc/nccl.conf sets NCCL_NET_PLUGIN")


def test_another_transport_is_found_though_nothing_was_asked(here: Surroundings) -> None:
    variables = {"NCCL_NET_PLUGIN": str(here.library), "NCCL_NET": "Socket"}
    assert only(check_activation(variables, here, None, [])).status is Status.FAIL


def _nccl(*release: int, owner: str = "system", problem: str = "") -> NcclLibrary:
    found = NcclRelease(*release) if release else None
    return NcclLibrary(Path("/usr/lib/libnccl.so.2"), owner, "the loader's search", found, problem)


def test_old_nccls_look_for_the_file_elsewhere(
    here: Surroundings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / ".nccl.conf"
    config = replace(here, config=(ConfigSetting("NCCL_NET_PLUGIN", str(here.library), file),))
    monkeypatch.setattr(nccl_config_file, "password_database_file", lambda: Path("/home/me/.nccl.conf"))
    home = {"HOME": str(tmp_path)}
    _, warning = check_activation(home, config, None, [_nccl(2, 29, 7)]).findings
    assert warning.status is Status.WARN
    assert warning.text.startswith("NCCL 2.29.7 looks for the user's file at /home/me/.nccl.conf, the home directory")
    assert warning.remedy.startswith("run `NCCL_CONF_FILE=/home/me/.nccl.conf bagua-net enable`")
    assert len(check_activation(home, config, None, [_nccl(2, 30, 7)]).findings) == 1
    named = {**home, "NCCL_CONF_FILE": str(file)}
    assert len(check_activation(named, config, None, [_nccl(2, 23, 4)]).findings) == 1
    _, warning = check_activation(named, config, None, [_nccl(2, 22, 3)]).findings
    assert warning.text == f"NCCL 2.22.3 does not know NCCL_CONF_FILE, and will not read {file}"
    monkeypatch.setattr(nccl_config_file, "password_database_file", lambda: None)
    assert len(check_activation(home, config, None, [_nccl(2, 29, 7)]).findings) == 1


# --- NCCL ------------------------------------------------------------------------------------------------------------


def test_no_nccl() -> None:
    finding = only(check_nccl([], None, {}, None, reopens_by_name=True))
    assert finding.status is Status.FAIL
    assert finding.text == "no NCCL on this machine: GPU jobs cannot run here"
    assert finding.remedy.startswith("install a CUDA build of torch")
    cpu = only(check_nccl([], replace(_TORCH, version="2.13.0+cpu", has_cuda=False), {}, None, reopens_by_name=True))
    assert cpu.text.endswith("(torch 2.13.0+cpu is a build without CUDA)")


@pytest.mark.parametrize(
    ("library", "status", "text"),
    [
        (_nccl(2, 28, 9), Status.OK, "takes table v11"),
        (
            _nccl(2, 11, 4),
            Status.FAIL,
            "NCCL 2.11.4 (the system's, /usr/lib/libnccl.so.2, from the loader's search) is ",
        ),
        (_nccl(2, 31, 0), Status.WARN, "is newer than 2.30, the newest that this version of bagua knows"),
        (_nccl(problem="no such symbol"), Status.FAIL, "cannot be found out: no such symbol"),
        (_nccl(), Status.FAIL, "cannot be found out: its text names none"),
        (
            _nccl(2, 21, 5, problem="libcudart.so.12 is missing"),
            Status.FAIL,
            "does not load: libcudart.so.12 is missing",
        ),
    ],
)
def test_each_nccl(library: NcclLibrary, status: Status, text: str, here: Surroundings) -> None:
    finding = only(check_nccl([library], None, {}, here, reopens_by_name=True))
    assert finding.status is status
    assert text in finding.text
    assert finding.remedy or status is Status.OK


@pytest.mark.parametrize(("minor", "forgets"), [(27, False), (28, True), (29, True), (30, False)])
def test_an_nccl_that_forgets(minor: int, forgets: bool, here: Surroundings) -> None:
    library = _nccl(2, minor, 7)
    findings = check_nccl([library], None, {}, here, reopens_by_name=False).findings
    assert len(findings) == 1 + forgets
    if forgets:
        assert findings[1].status is Status.WARN
        assert findings[1].text.startswith(f"NCCL 2.{minor}.7 forgets the plugin when a process destroys its last")
    assert len(check_nccl([library], None, {}, here, reopens_by_name=True).findings) == 1


def test_only_the_first_nccl_can_fail(here: Surroundings) -> None:
    section = check_nccl([_nccl(2, 28, 9, owner="torch"), _nccl(2, 11, 4)], _TORCH, {}, here, reopens_by_name=True)
    assert [finding.status for finding in section.findings] == [Status.OK, Status.WARN]
    assert "(torch's, " in section.findings[0].text


def test_an_nccl_that_looks_by_name(here: Surroundings) -> None:
    finding = only(check_nccl([_nccl(2, 20, 5)], None, {}, here, reopens_by_name=True))
    assert finding.status is Status.FAIL
    assert finding.text.endswith("finds plugins by name only, and LD_LIBRARY_PATH does not lead to the plugin")
    assert finding.remedy == "start the job with `bagua-net run --by-name -- CMD`"
    by_name = replace(here, loader_path=(here.library.parent,))
    assert only(check_nccl([_nccl(2, 20, 5)], None, {}, by_name, reopens_by_name=True)).status is Status.OK
    spoilt = only(
        check_nccl([_nccl(2, 20, 5)], None, {"NCCL_NET_PLUGIN": "/x/libnccl-net.so"}, by_name, reopens_by_name=True)
    )
    assert spoilt.text.endswith("NCCL_NET_PLUGIN=/x/libnccl-net.so is a path")


# --- network and settings --------------------------------------------------------------------------------------------

_ETH0 = native.Interface("eth0", "192.0.2.1", 25000, 0, "/sys/devices/x", False, True, "first")
_LO = native.Interface("lo", "127.0.0.1", 0, -1, "", True, False, "loopback, and eth0 is usable")


def test_interfaces_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "interfaces", lambda _: [_ETH0, replace(_LO, address="")])
    section = network_check.check_interfaces({})
    assert only(section).text == "used: eth0"
    assert section.table[1:] == (
        ("eth0", "192.0.2.1", "25 Gb/s", "0", "yes", "first"),
        ("lo", "-", "unknown", "-", "no", "loopback, and eth0 is usable"),
    )


def test_only_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "interfaces", lambda _: [replace(_LO, used=True)])
    finding = only(network_check.check_interfaces({}))
    assert finding.status is Status.WARN
    assert finding.text == "only loopback is used (lo): jobs of one host work, jobs of several do not"


@pytest.mark.parametrize(
    ("used", "named"),
    [
        ([replace(_ETH0, name="docker0", address="172.17.0.1", pci_path="")], "docker0 (172.17.0.1)"),
        ([_ETH0, replace(_ETH0, name="bridge", address="172.17.0.1", pci_path="")], "bridge (172.17.0.1)"),
        ([_ETH0, replace(_LO, used=True)], "loopback (lo)"),
        ([replace(_ETH0, address="172.17.0.1")], None),  # a real network may have that address
    ],
)
def test_interfaces_that_lead_to_no_other_host(
    monkeypatch: pytest.MonkeyPatch, used: list[native.Interface], named: str | None
) -> None:
    monkeypatch.setattr(native, "interfaces", lambda _: used)
    finding = only(network_check.check_interfaces({}))
    assert finding.status is (Status.OK if named is None else Status.WARN)
    assert named is None or named in finding.text


_ETH1 = replace(_ETH0, name="eth1", address="192.0.2.2", used=False, reason="skipped: not eth0")


@pytest.mark.parametrize(
    ("rows", "status", "text"),
    [
        (
            [_ETH0, _ETH1],
            Status.WARN,
            "1 of 2 NICs with a link and an address are used; not eth1 (25 Gb/s, skipped: not eth0)",
        ),
        ([_ETH0, replace(_ETH1, speed_mbps=1000)], Status.OK, "not eth1 (1 Gb/s, skipped: not eth0)"),
        ([replace(_ETH0, speed_mbps=0), _ETH1], Status.OK, "not eth1 (25 Gb/s"),  # nothing to compare it with
        ([_ETH0, replace(_ETH1, used=True)], None, ""),
        ([_ETH0, replace(_ETH1, address="")], None, ""),  # a port that nobody has set up
        ([_ETH0, replace(_ETH1, pci_path="")], None, ""),  # a bridge
    ],
)
def test_nics_that_are_left_out(
    monkeypatch: pytest.MonkeyPatch, rows: list[native.Interface], status: Status | None, text: str
) -> None:
    monkeypatch.setattr(native, "interfaces", lambda _: rows)
    monkeypatch.setattr(interface_state, "has_lost_carrier", lambda _: False)
    section = network_check.check_interfaces({})
    assert len(section.findings) == (1 if status is None else 2)
    if status is not None:
        assert section.findings[1].status is status
        assert text in section.findings[1].text
    if status is Status.WARN:
        assert section.findings[1].remedy.startswith("set NCCL_SOCKET_IFNAME=eth0,eth1 if ")


def test_a_nic_without_a_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "interfaces", lambda _: [_ETH0, _ETH1, replace(_ETH1, name="docker0", pci_path="")])
    monkeypatch.setattr(interface_state, "has_lost_carrier", lambda name: name != "eth0")
    _, finding = network_check.check_interfaces({}).findings
    assert finding.status is Status.WARN
    assert finding.text == "eth1 (192.0.2.2) is switched on but has no link: it is not RUNNING"


@pytest.mark.parametrize(("flags", "lost"), [(0x1003, True), (0x1043, False), (0x1002, False)])
def test_the_kernels_flags(monkeypatch: pytest.MonkeyPatch, flags: int, lost: bool) -> None:
    """Up without RUNNING; up and RUNNING; switched off."""
    monkeypatch.setattr(interface_state.fcntl, "ioctl", lambda *_: struct.pack("16sH", b"eth1", flags) + bytes(238))
    assert interface_state.has_lost_carrier("eth1") is lost


def test_flags_of_real_interfaces() -> None:
    assert not interface_state.has_lost_carrier("lo")
    assert not interface_state.has_lost_carrier("no-such-nic")


def test_no_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: object) -> None:
        raise ValueError("NCCL_SOCKET_IFNAME=eth9 matches nothing of lo, eth0; correct it")

    monkeypatch.setattr(native, "interfaces", refuse)
    finding = only(network_check.check_interfaces({}))
    assert finding == Finding(Status.FAIL, "NCCL_SOCKET_IFNAME=eth9 matches nothing of lo, eth0", "correct it")


def test_rdma() -> None:
    port = rdma.RdmaPort("mlx5_0", "1", "400 Gb/sec (4X NDR)")
    assert only(network_check.check_rdma([], {})).status is Status.OK
    assert only(network_check.check_rdma([port], {"NCCL_IB_DISABLE": "1"})).status is Status.OK
    section = network_check.check_rdma([port], {})
    assert only(section).status is Status.WARN
    assert "mlx5_0:1 (400 Gb/sec (4X NDR)), which Bagua-Net replaces by TCP" in only(section).text
    assert only(section).remedy.startswith("set ENABLE_BAGUA_NET=0 to keep it, or NCCL_IB_DISABLE=1")
    assert section.facts["ports"] == [
        {"device": "mlx5_0", "port": "1", "rate": "400 Gb/sec (4X NDR)", "state": "ACTIVE"}
    ]


def test_rdma_that_cannot_be_used() -> None:
    up = rdma.RdmaPort("mlx5_0", "1", "400 Gb/sec")
    down = rdma.RdmaPort("mlx5_1", "1", "", "DOWN")
    finding = only(network_check.check_rdma([], {}, [down]))
    assert finding.status is Status.WARN
    assert finding.text == "this host has RDMA devices, but no port of them is active: mlx5_1:1 (DOWN)"
    # A second port without a cable beside one that works says nothing.
    assert "mlx5_0:1 (400 Gb/sec), which Bagua-Net replaces" in only(network_check.check_rdma([up], {}, [down])).text
    hidden = only(network_check.check_rdma([up], {}, has_device_files=False))
    assert "(mlx5_0:1), which this environment cannot use: /dev/infiniband is missing" in hidden.text
    for ports, inactive in (([up], []), ([], [down])):
        finding = only(network_check.check_rdma(ports, {"NCCL_IB_DISABLE": "1"}, inactive, has_device_files=False))
        assert finding.status is Status.OK


def test_ports_and_device_files_are_found(tmp_path: Path) -> None:
    for device, state in (("mlx5_0", "4: ACTIVE"), ("mlx5_1", "1: DOWN")):
        port = tmp_path / device / "ports" / "1"
        port.mkdir(parents=True)
        (port / "state").write_text(state + "\n")
    assert [port.state for port in rdma.all_ports(tmp_path)] == ["ACTIVE", "DOWN"]
    assert [port.device for port in rdma.active_ports(tmp_path)] == ["mlx5_0"]
    assert not rdma.has_device_files(tmp_path)
    (tmp_path / "uverbs0").touch()
    assert rdma.has_device_files(tmp_path)


def test_unknown_knobs_are_warned_about() -> None:
    section = check_settings({"BAGUA_NET_STREAMS": "4"}, [], [])
    assert only(section).status is Status.WARN
    assert only(section).text.startswith("BAGUA_NET_STREAMS is not a Bagua-Net setting")
    assert "bagua-net settings" in only(section).remedy


def test_knobs_in_a_configuration_file_are_checked() -> None:
    """NCCL puts everything from its file into the environment, where the library finds it."""
    bad = ConfigSetting("BAGUA_NET_NSTREAMS", "lots", Path("/etc/nccl.conf"))
    assert only(check_settings({}, [bad], [])).status is Status.FAIL
    section = check_settings({"BAGUA_NET_NSTREAMS": "4"}, [bad], [])
    assert [finding.status for finding in section.findings] == [Status.OK, Status.WARN]
    assert section.findings[1].text.endswith("in /etc/nccl.conf has no effect: the environment sets it, too")


def test_several_bad_knobs_are_several_findings() -> None:
    section = check_settings({"BAGUA_NET_NSTREAMS": "lots", "BAGUA_NET_NWORKERS": "-1"}, [], [])
    names = [finding.text.partition("=")[0] for finding in section.findings]
    assert names == ["BAGUA_NET_NSTREAMS", "BAGUA_NET_NWORKERS"]
    assert all(finding.remedy for finding in section.findings)
    crossed = only(check_settings({"BAGUA_NET_MIN_CHUNKSIZE": "1M", "BAGUA_NET_MAX_CHUNKSIZE": "64K"}, [], []))
    assert crossed.remedy == "Lower BAGUA_NET_MIN_CHUNKSIZE or raise BAGUA_NET_MAX_CHUNKSIZE."


def test_ctrl_c_is_no_traceback(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(examination, "examine", interrupt)
    assert main(["doctor"]) == 130
    assert capsys.readouterr().err == ""


def test_one_bad_setting_is_one_failure(doctor: Doctor) -> None:
    _, report = doctor(ENABLE_BAGUA_NET="1", BAGUA_NET_NSTREAMS="lots")
    assert failed(report) == ["settings"]
    assert report["sections"]["self_test"]["status"] == "skip"


def test_a_machine_without_gpu_needs_no_nccl(tmp_path: Path) -> None:
    assert check_nccl([], None, {}, None, reopens_by_name=True, has_gpu=False).status is Status.SKIP
    assert not gpu_presence.has_gpu(tmp_path)
    (tmp_path / "nvidia0").touch()
    assert gpu_presence.has_gpu(tmp_path)


def test_a_message_with_semicolons_is_not_cut_short() -> None:
    finding = split_message(Status.FAIL, "rank 0; rank 1: closed; see the log")
    assert finding == Finding(Status.FAIL, "rank 0; rank 1: closed", "see the log")


# --- self-test -------------------------------------------------------------------------------------------------------

_DRIVER = """#!{python}
import json, sys, time
fault = {fault!r}
def say(**event):
    print(json.dumps(event), flush=True)
say(event="listening", handles=["00", "11"])
for line in sys.stdin:
    word = line.split()[0]
    if word == fault == "connect":
        time.sleep(600)
    elif word == "connect":
        say(event="connected")
    elif word == "verify" == fault:
        say(event="verified", bytes=1, wrong_elements=3, first_wrong=17)
    elif word == "verify" and fault == "error":
        say(event="error", message="the peer 127.0.0.1 closed the connection; see its log")
        sys.exit(1)
    elif word == "verify" and fault == "crash":
        sys.exit("terminate called")
    elif word == "verify":
        say(event="verified", bytes=1, wrong_elements=0, first_wrong=None)
    elif word == "run":
        say(event="result", seconds=[0.002, 0.001])
    else:
        break
"""


@pytest.fixture
def faulty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Finding]:
    """The finding of a self-test with a driver that has this fault."""

    def run(fault: str) -> Finding:
        driver = tmp_path / "bagua-net-driver"
        driver.write_text(_DRIVER.format(python=sys.executable, fault=fault))
        driver.chmod(0o755)
        monkeypatch.setattr(self_test, "driver_path", lambda: driver)
        return check_loopback({}, Path("/lib/libnccl-net.so")).findings[0]

    return run


def test_a_self_test_that_passes(faulty: Callable[[str], Finding]) -> None:
    assert faulty("").status is Status.OK


def test_wrong_data(faulty: Callable[[str], Finding]) -> None:
    finding = faulty("verify")
    assert finding.status is Status.FAIL
    assert finding.text == "6 elements of 1048576 bytes arrived wrong"


def test_an_error_of_the_driver(faulty: Callable[[str], Finding]) -> None:
    finding = faulty("error")
    assert finding.status is Status.FAIL
    assert "the peer 127.0.0.1 closed the connection" in finding.text
    assert finding.remedy == "see its log"


def test_a_driver_that_ends(faulty: Callable[[str], Finding]) -> None:
    finding = faulty("crash")
    assert finding.status is Status.FAIL
    assert "exited with code 1" in finding.text
    assert "terminate called" in finding.remedy


def test_a_driver_that_says_nothing(faulty: Callable[[str], Finding], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_test, "_STEP_TIMEOUT_S", 1.0)
    finding = faulty("connect")
    assert finding.status is Status.FAIL
    assert "no answer from self-test, rank 0; self-test, rank 1" in f"{finding.text}; {finding.remedy}"


def test_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    from bagua.net import library

    monkeypatch.setattr(library, "package_directories", lambda: [Path("/none")])
    finding = only(check_loopback({}, Path("/lib/libnccl-net.so")))
    assert finding.status is Status.FAIL
    assert finding.text == "the load driver bagua-net-driver is not installed (sought: /none/bin/bagua-net-driver)"
    assert finding.remedy.startswith("install the package with `pip install .`")


def test_the_self_test_ignores_the_choice_of_interface(doctor: Doctor) -> None:
    """It says whether the library works; which interface is used is another section."""
    _, report = doctor(ENABLE_BAGUA_NET="1", NCCL_SOCKET_IFNAME="=nosuch0", NCCL_SOCKET_FAMILY="AF_INET6")
    assert failed(report) == ["interfaces"]
