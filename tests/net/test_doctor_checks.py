"""The checks of `bagua-net doctor`: library, activation, NCCL, settings, self-test and protection. Each thing that can
be wrong is found, named, and comes with a remedy."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from support.fake_driver import install_fake_driver
from support.fresh_process import BuildLibrary

import bagua
from bagua import gpu_presence
from bagua.net import library as installed_library
from bagua.net import nccl_config_file
from bagua.net.activation import Surroundings
from bagua.net.doctor import activation_check, library_check, self_test
from bagua.net.doctor.activation_check import check_activation
from bagua.net.doctor.finding import Finding, Section, Status, split_message
from bagua.net.doctor.library_check import check_library
from bagua.net.doctor.nccl_check import check_nccl, check_tuning
from bagua.net.doctor.protection_check import check_protection
from bagua.net.doctor.self_test import check_loopback
from bagua.net.doctor.settings_check import check_settings
from bagua.net.nccl_config_file import ConfigSetting
from bagua.net.nccl_library import NcclLibrary, TorchInstallation
from bagua.net.nccl_release import NcclRelease

_ASKED = {"ENABLE_BAGUA_NET": "1"}
_TORCH = TorchInstallation(Path("/site/torch"), "2.10.0+cu128", has_cuda=True)


def only(section: Section) -> Finding:
    (finding,) = section.findings
    return finding


@pytest.fixture
def here(tmp_path: Path) -> Surroundings:
    library = tmp_path / "lib" / "libnccl-net.so"
    library.parent.mkdir()
    library.touch()
    return Surroundings(library)


def test_a_message_with_semicolons_is_not_cut_short() -> None:
    finding = split_message(Status.FAIL, "rank 0; rank 1: closed; see the log")
    assert finding == Finding(Status.FAIL, "rank 0; rank 1: closed", "see the log")


# --- library ---------------------------------------------------------------------------------------------------------

_TABLE = 'struct {{ const char* name; void* slots[21]; }} ncclNetPlugin_v{} = {{"{}"}};\n'
_ALL_TABLES = "".join(_TABLE.format(table, "BaguaNet") for table in range(5, 13))
_VERSION = 'const char version[] = "Bagua-Net {} active: table v";\n'
_AT_LOAD = "int pause(void); __attribute__((constructor)) static void at_load(void) {{ {}; }}"


@pytest.mark.parametrize(
    ("text", "opens", "version"),
    [
        (_ALL_TABLES + _VERSION.format(bagua.__version__), "", ""),
        (_ALL_TABLES.replace("v12", "v99"), "lacks NCCL's tables v12", "does not tell its version"),
        (
            _ALL_TABLES.replace("BaguaNet", "Other"),
            "calls itself 'Other' and not BaguaNet",
            "does not tell its version",
        ),
        (_ALL_TABLES + _VERSION.format("0.9.0"), "", f"is version 0.9.0, and the package is {bagua.__version__}"),
        (_AT_LOAD.format("__builtin_trap()"), "does not open: opening it ended the process with code -4", "not tell"),
        (_AT_LOAD.format("pause()"), "does not open: opening it did not end within 0.5 s", "not tell"),
    ],
)
def test_libraries(
    text: str, opens: str, version: str, build_library: BuildLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library_check, "_OPEN_TIMEOUT_S", 0.5 if "pause()" in text else 60.0)
    section = check_library(build_library("libnccl-net.so", text))
    assert (section.status is Status.OK) == (not opens and not version)
    for finding, told in zip(section.findings, (opens, version), strict=True):
        assert told in finding.text
        assert (finding.status is Status.OK) == (told == "")


def test_a_file_that_is_no_library(tmp_path: Path) -> None:
    file = tmp_path / "libnccl-net.so"
    file.write_text("not a library")
    opened, _ = check_library(file).findings
    assert opened.status is Status.FAIL
    assert "libnccl-net.so does not open: " in opened.text
    assert opened.remedy.startswith("reinstall bagua")


def test_whether_the_loader_finds_it_again(build_library: BuildLibrary) -> None:
    """A library that stays loaded and bears the default name is found by that name; another one is not."""
    plain = build_library("libnccl-net.so", _ALL_TABLES)
    assert check_library(plain).facts["reopens_by_name"] is False
    options = ("-Wl,-z,nodelete", "-Wl,-soname,libnccl-net.so")
    assert check_library(build_library("libnccl-net.so", _ALL_TABLES, *options)).facts["reopens_by_name"] is True


# --- activation ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("torch", "variables", "has_entry_point", "text"),
    [
        (None, {}, True, "ENABLE_BAGUA_NET=1 acts where Python imports torch, and there is no torch here"),
        (replace(_TORCH, version="2.4.1"), {}, True, "torch 2.4.1 loads no extensions by itself; 2.5 and newer do"),
        (_TORCH, {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}, True, "TORCH_DEVICE_BACKEND_AUTOLOAD=0 keeps torch from"),
        (_TORCH, {}, False, "the entry point that torch calls is not installed"),
        (_TORCH, {}, True, ""),
    ],
)
def test_where_torch_activates_the_plugin(
    torch: TorchInstallation | None,
    variables: dict[str, str],
    has_entry_point: bool,
    text: str,
    here: Surroundings,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not has_entry_point:
        monkeypatch.setattr(activation_check, "entry_points", lambda **_: [])
    section = check_activation(_ASKED | variables, here, torch, [])
    assert section.status is (Status.FAIL if text else Status.OK)
    assert text in section.findings[0].text
    assert section.findings[0].remedy or not text


@pytest.mark.parametrize("variables", [{}, _ASKED])
def test_ways_that_need_no_python(variables: dict[str, str], here: Surroundings) -> None:
    path = str(here.library)
    section = check_activation({**variables, "NCCL_NET_PLUGIN": path}, here, None, [])
    assert only(section).text == f"every job takes the plugin: NCCL_NET_PLUGIN={path}"
    by_name = replace(here, loader_path=(here.library.parent,))
    assert only(check_activation(variables, by_name, None, [])).text.endswith("LD_LIBRARY_PATH leads to it")
    config = replace(here, config=(ConfigSetting("NCCL_NET_PLUGIN", path, Path("/etc/nccl.conf")),))
    assert only(check_activation(variables, config, None, [])).text.endswith("/etc/nccl.conf sets NCCL_NET_PLUGIN")
    other = {**variables, "NCCL_NET_PLUGIN": path, "NCCL_NET": "Socket"}
    assert only(check_activation(other, here, None, [])).status is Status.FAIL


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


def test_no_nccl(tmp_path: Path) -> None:
    finding = only(check_nccl([], None, {}, None, reopens_by_name=True))
    assert finding.status is Status.FAIL
    assert finding.text == "no NCCL on this machine: GPU jobs cannot run here"
    assert finding.remedy.startswith("install a CUDA build of torch")
    cpu = only(check_nccl([], replace(_TORCH, version="2.13.0+cpu", has_cuda=False), {}, None, reopens_by_name=True))
    assert cpu.text.endswith("(torch 2.13.0+cpu is a build without CUDA)")
    # A machine without a GPU needs none.
    assert check_nccl([], None, {}, None, reopens_by_name=True, has_gpu=False).status is Status.SKIP
    assert not gpu_presence.has_gpu(tmp_path)
    (tmp_path / "nvidia0").touch()
    assert gpu_presence.has_gpu(tmp_path)


@pytest.mark.parametrize(
    ("library", "status", "text"),
    [
        (_nccl(2, 28, 9), Status.OK, "takes table v11"),
        (
            _nccl(2, 11, 4),
            Status.FAIL,
            "NCCL 2.11.4 (the system's, /usr/lib/libnccl.so.2, from the loader's search) is",
        ),
        (_nccl(2, 31, 0), Status.WARN, "is newer than 2.30, the newest that this version of bagua knows"),
        (_nccl(problem="no such symbol"), Status.FAIL, "cannot be found out: no such symbol"),
        (_nccl(), Status.FAIL, "cannot be found out: its text names none"),
        (
            _nccl(2, 21, 5, problem="libcudart.so.12 is missing"),
            Status.FAIL,
            "does not load: libcudart.so.12 is missing",
        ),
        (_nccl(2, 20, 5), Status.FAIL, "finds plugins by name only, and LD_LIBRARY_PATH does not lead to the plugin"),
    ],
)
def test_each_nccl(library: NcclLibrary, status: Status, text: str, here: Surroundings) -> None:
    finding = only(check_nccl([library], None, {}, here, reopens_by_name=True))
    assert finding.status is status
    assert text in finding.text
    assert finding.remedy or status is Status.OK


@pytest.mark.parametrize("setting", ["NCCL_ALGO=Tree", "NCCL_MAX_NCHANNELS=2", "BAGUA_NET_RAILS=2"])
def test_a_choice_of_the_users_is_named(setting: str) -> None:
    name, _, value = setting.partition("=")
    assert only(check_tuning({name: value}, settings_fail=False)).text.endswith(f": {setting} is set")
    # What the plugin's tuner would not choose either, and the default.
    ours = only(check_tuning({"NCCL_ALGO": "^NVLS", "BAGUA_NET_RAILS": "auto"}, settings_fail=False)).text
    assert ours.startswith("the plugin chooses")


@pytest.mark.parametrize(("minor", "forgets"), [(27, False), (28, True), (29, True), (30, False)])
def test_an_nccl_that_forgets(minor: int, forgets: bool, here: Surroundings) -> None:
    library = _nccl(2, minor, 7)
    findings = check_nccl([library], None, {}, here, reopens_by_name=False).findings
    assert [one.status for one in findings[1:]] == [Status.WARN] * forgets
    assert len(check_nccl([library], None, {}, here, reopens_by_name=True).findings) == 1


def test_only_the_first_nccl_can_fail(here: Surroundings) -> None:
    section = check_nccl([_nccl(2, 28, 9, owner="torch"), _nccl(2, 11, 4)], _TORCH, {}, here, reopens_by_name=True)
    assert [finding.status for finding in section.findings] == [Status.OK, Status.WARN]
    assert "(torch's, " in section.findings[0].text


def test_an_nccl_that_looks_by_name(here: Surroundings) -> None:
    by_name = replace(here, loader_path=(here.library.parent,))
    old = [_nccl(2, 20, 5)]
    assert only(check_nccl(old, None, {}, by_name, reopens_by_name=True)).status is Status.OK
    spoilt = only(check_nccl(old, None, {"NCCL_NET_PLUGIN": "/x/libnccl-net.so"}, by_name, reopens_by_name=True))
    assert spoilt.text.endswith("NCCL_NET_PLUGIN=/x/libnccl-net.so is a path")
    assert spoilt.remedy == "start the job with `bagua-net run --by-name -- CMD`"


# --- settings --------------------------------------------------------------------------------------------------------


def test_settings() -> None:
    unknown = only(check_settings({"BAGUA_NET_STREAMS": "4"}, [], []))
    assert unknown.status is Status.WARN
    assert unknown.text.startswith("BAGUA_NET_STREAMS is not a Bagua-Net setting")
    assert unknown.remedy.startswith("Correct its name")
    gateway = {"BAGUA_NET_PROMETHEUS_ADDRESS": "joe:p:w@d@gateway:9091"}
    section = check_settings(gateway | {"NCCL_DEBUG_FILE": "nccl.%h.log"}, [], [])
    assert only(section).remedy == "Unset it for the ranks."
    told = {"BAGUA_NET_PROMETHEUS_ADDRESS": "joe:...@gateway:9091", "NCCL_DEBUG_FILE": "nccl.%h.log"}
    assert section.facts["environment"] == {name: value for name, _, value in section.table[1:]} == told
    (name, value), file = *gateway.items(), Path("/etc/nccl.conf")
    section = check_settings({}, [ConfigSetting(name, value, file), ConfigSetting("NCCL_NET", "BaguaNet", file)], [])
    assert "p:w@d" not in str(section)
    assert "BaguaNet" in str(section.facts["config"])
    # NCCL puts everything from its file into the environment, where the library finds it.
    bad = ConfigSetting("BAGUA_NET_NSTREAMS", "lots", Path("/etc/nccl.conf"))
    assert only(check_settings({}, [bad], [])).status is Status.FAIL
    section = check_settings({"BAGUA_NET_NSTREAMS": "4"}, [bad], [])
    assert [finding.status for finding in section.findings] == [Status.OK, Status.WARN]
    assert section.findings[1].text.endswith("in /etc/nccl.conf has no effect: the environment sets it, too")
    section = check_settings({"BAGUA_NET_NSTREAMS": "lots", "BAGUA_NET_NWORKERS": "-1"}, [], [])
    names = [finding.text.partition("=")[0] for finding in section.findings]
    assert names == ["BAGUA_NET_NSTREAMS", "BAGUA_NET_NWORKERS"]
    crossed = only(check_settings({"BAGUA_NET_MIN_CHUNKSIZE": "1M", "BAGUA_NET_MAX_CHUNKSIZE": "64K"}, [], []))
    assert crossed.remedy == "Lower BAGUA_NET_MIN_CHUNKSIZE or raise BAGUA_NET_MAX_CHUNKSIZE."


# --- self-test -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("at", "fault", "says"),
    [
        ("", "", ""),
        ("verify", "wrong", "6 elements of 1048576 bytes arrived wrong"),
        ("verify", "error", "injected: the peer 10.0.0.9 refused the connection"),
        ("verify", "exit", "exited with code 3 in the middle of the run; its last words: fake driver: gave up"),
        ("connect", "hang", "no answer from self-test, rank 0; self-test, rank 1"),
    ],
)
def test_drivers_with_faults(at: str, fault: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver, library = install_fake_driver(tmp_path), tmp_path / "libnccl-net.so"
    library.touch()
    monkeypatch.setattr(self_test, "driver_path", lambda: driver)
    if fault == "hang":
        monkeypatch.setattr(self_test, "_STEP_TIMEOUT_S", 3.0)
    finding = check_loopback({"FAKE_DRIVER_FAULT": json.dumps({"at": at, "do": fault})}, library).findings[0]
    assert finding.status is (Status.FAIL if fault else Status.OK)
    assert says in f"{finding.text}; {finding.remedy}"


def test_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed_library, "package_directories", lambda: [Path("/none")])
    finding = only(check_loopback({}, Path("/lib/libnccl-net.so")))
    assert finding.status is Status.FAIL
    assert finding.text == "the load driver bagua-net-driver is not installed (sought: /none/bin/bagua-net-driver)"
    assert finding.remedy.startswith("install the package with `pip install .`")


def section(**environment: str) -> Section:
    return check_protection(environment, settings_fail=False)


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    file = tmp_path / "secret"
    file.write_bytes(b"s" * 32)
    file.chmod(0o600)
    return file


def test_without_a_secret_nothing_is_claimed() -> None:
    result = section()
    assert result.status is Status.OK
    assert "not encrypted" in result.findings[0].text
    assert result.facts["key_id"] == ""
    assert result.facts["parts"]["data"].startswith("nothing")


def test_a_secret_and_encryption(secret: Path) -> None:
    result = section(BAGUA_NET_SECRET_FILE=str(secret), BAGUA_NET_ENCRYPTION="1", NCCL_OOB_NET_ENABLE="1")
    assert result.status is Status.OK
    assert len(result.facts["key_id"]) == 16
    assert result.facts["key_id"] in result.findings[0].text
    assert "AES-256-GCM" in result.facts["parts"]["data"]
    assert "first contact" in result.facts["parts"]["NCCL's bootstrap"]
    assert result.facts["parts"]["torch's store"].startswith("nothing")
    assert "s" * 32 not in str(result)
    only_chacha = section(BAGUA_NET_SECRET_FILE=str(secret), BAGUA_NET_ENCRYPTION="chacha20")
    assert only_chacha.facts["parts"]["data"] == "ChaCha20-Poly1305"
    assert only_chacha.facts["key_id"] == result.facts["key_id"]


def test_a_secret_that_everyone_can_read_is_warned_of(secret: Path) -> None:
    secret.chmod(0o644)
    result = section(BAGUA_NET_SECRET_FILE=str(secret))
    assert result.status is Status.WARN
    assert any("chmod o-r" in finding.remedy for finding in result.findings)


def test_a_secret_that_the_plugin_refuses_fails(secret: Path) -> None:
    secret.write_bytes(b"short")
    result = section(BAGUA_NET_SECRET_FILE=str(secret))
    assert result.status is Status.FAIL
    assert "5 bytes" in result.findings[0].text
    assert "bagua-net secret new" in result.findings[0].remedy
    assert section(BAGUA_NET_SECRET_FILE=str(secret) + "-missing").status is Status.FAIL


def test_tls_of_gloo_and_the_statistics_page() -> None:
    parts = section(GLOO_DEVICE_TRANSPORT="TCP_TLS", BAGUA_NET_STATS="0").facts["parts"]
    assert parts["gloo"] == "its own TLS"
    assert parts["statistics page"] == "switched off"


def test_bad_settings_are_corrected_first() -> None:
    assert check_protection({}, settings_fail=True).status is Status.SKIP
