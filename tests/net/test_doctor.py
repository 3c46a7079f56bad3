"""`bagua-net doctor` as a command: what it says, and what `--report` writes, in which no secret is. What each of its
checks finds is in test_doctor_checks.py and test_doctor_network.py."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.fresh_process import BuildNccl, Completed, RunCommand, RunNet

import bagua
import bagua.net
from bagua.cli.net import main
from bagua.cli.net_doctor import _conclusion
from bagua.cli.terminal import Terminal
from bagua.net.doctor import examination
from bagua.net.doctor.finding import Report, Section, ok, skip, warn

_ASKED = {"ENABLE_BAGUA_NET": "1"}
_SECTIONS = ["library", "activation", "nccl", "interfaces", "rdma", "settings", "tuning", "protection", "self_test"]
_SECTIONS += ["choice"]

Doctor = Callable[..., tuple[Completed, dict[str, Any]]]


@pytest.fixture
def machine(build_nccl: BuildNccl) -> dict[str, str]:
    """One that has an NCCL."""
    return {"LD_LIBRARY_PATH": str(build_nccl(22809).parent)}


@pytest.fixture
def doctor(net: RunNet, machine: dict[str, str]) -> Doctor:
    """With --json."""

    def run(**variables: str) -> tuple[Completed, dict[str, Any]]:
        result = net("doctor", "--json", **machine, **variables)
        return result, json.loads(result.stdout)

    return run


def failed(report: dict[str, Any]) -> list[str]:
    return [name for name, section in report["sections"].items() if section["status"] == "fail"]


def test_all_is_well(doctor: Doctor) -> None:
    result, report = doctor(**_ASKED)
    assert failed(report) == []
    assert result.returncode == 0
    assert report["usable"] is True
    assert list(report["sections"]) == _SECTIONS
    facts = {name: section["facts"] for name, section in report["sections"].items()}
    assert facts["library"]["path"] == str(bagua.net.library_path())
    assert facts["library"]["version"] == report["bagua_version"] == bagua.__version__
    assert facts["library"]["tables"] == [5, 6, 7, 8, 9, 10, 11, 12]
    assert facts["activation"] == {"way": "ENABLE_BAGUA_NET=1"}
    assert {"version": "2.28.9", "table": 11}.items() <= facts["nccl"]["libraries"][-1].items()
    assert any(row["used"] for row in facts["interfaces"]["interfaces"])
    assert facts["settings"]["environment"]["ENABLE_BAGUA_NET"] == "1"
    assert facts["self_test"]["passed"] is True
    assert facts["self_test"]["busbw_gb_per_s"] > 0


def test_under_run(net: RunNet, bagua_net: Path, build_nccl: BuildNccl) -> None:
    """What `run` arranges, the doctor finds sufficient, also for NCCL 2.18, which is served by name."""
    for code, options in ((22809, []), (21805, ["--by-name"])):
        machine = {"LD_LIBRARY_PATH": str(build_nccl(code).parent)}
        result = net("run", *options, "--", bagua_net, "doctor", **machine)
        assert result.returncode == 0, result.stdout
        assert "every job takes the plugin" in result.stdout


def test_enabled_by_file(doctor: Doctor, net: RunNet, environment: dict[str, str]) -> None:
    net("enable")
    result, report = doctor()
    assert result.returncode == 0
    file = Path(environment["HOME"], ".nccl.conf")
    assert report["sections"]["activation"]["facts"] == {"way": f"{file} sets NCCL_NET_PLUGIN"}
    assert report["sections"]["settings"]["facts"]["config_files"] == [str(file)]


@pytest.mark.parametrize(
    ("variables", "sections", "text"),
    [
        ({"ENABLE_BAGUA_NET": "0"}, ["activation"], "ENABLE_BAGUA_NET=0 switches the plugin off"),
        (_ASKED | {"NCCL_NET": "Socket"}, ["activation"], "NCCL_NET=Socket (set in the environment) is kept"),
        (_ASKED | {"BAGUA_NET_NSTREAMS": "lots"}, ["settings"], "BAGUA_NET_NSTREAMS=lots: must be"),
        ({"ENABLE_BAGUA_NET": "maybe"}, ["settings"], "ENABLE_BAGUA_NET=maybe"),
        # The self-test says whether the library works; which interface is used is another section.
        (_ASKED | {"NCCL_SOCKET_IFNAME": "=no0", "NCCL_SOCKET_FAMILY": "AF_INET6"}, ["interfaces"], "no0"),
    ],
)
def test_what_keeps_a_job_from_the_plugin(
    variables: dict[str, str], sections: list[str], text: str, doctor: Doctor
) -> None:
    result, report = doctor(**variables)
    assert result.returncode == 1
    assert report["usable"] is False
    assert failed(report) == sections
    findings = [one for one in report["sections"][sections[0]]["findings"] if one["status"] == "fail"]
    assert text in findings[0]["text"]
    assert all(one["remedy"] for one in findings)
    assert (report["sections"]["self_test"]["status"] == "skip") == (sections == ["settings"])


def test_the_report_for_people(net: RunNet, machine: dict[str, str]) -> None:
    result = net("doctor", **machine)
    assert result.returncode == 1
    lines = result.stdout.splitlines()
    text = " ".join(result.stdout.split())
    assert "Activation FAIL nothing asks for the plugin: ENABLE_BAGUA_NET and NCCL_NET_PLUGIN are not set" in text
    assert "are not set -> export ENABLE_BAGUA_NET=1" in text
    assert text.endswith(" A job started in this environment would NOT use the plugin. Failed checks: Activation.")
    assert "\x1b" not in result.stdout, "colour is for terminals"
    assert all("/" in line or len(line) <= 80 for line in lines), "only paths are longer"
    result = net("doctor", **machine, **_ASKED)
    assert result.returncode == 0
    last = " ".join(result.stdout.rpartition("\n\n")[2].split())  # after warnings, if this machine gives any
    assert last.endswith("A job started in this environment would use the plugin.")
    assert "FAIL" not in result.stdout


def test_the_last_line_counts_warnings() -> None:
    terminal = Terminal(80, is_coloured=False)
    sections = [Section("settings", "Settings", (warn("a"), ok("b"))), Section("rdma", "RDMA", (ok("c"),))]
    use = "A job started in this environment would use the plugin."
    assert _conclusion(Report("1", tuple(sections[1:])), terminal) == use
    said = " ".join(_conclusion(Report("1", tuple(sections)), terminal).split())
    assert said == f"No check failed, 1 warning (Settings). {use}"
    sections += [Section("nccl", "NCCL", (skip("no GPU"), warn("d"), warn("e")))]
    said = " ".join(_conclusion(Report("1", tuple(sections)), terminal).split())
    assert said.startswith("No check failed, 3 warnings (Settings, NCCL). ")


def test_a_secret_file_that_is_missing_fails_once(doctor: Doctor, tmp_path: Path) -> None:
    _, report = doctor(**_ASKED, BAGUA_NET_SECRET_FILE=str(tmp_path / "none"))
    assert failed(report) == ["protection"]
    assert report["sections"]["self_test"]["status"] == "skip"


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


def test_ctrl_c_is_no_traceback(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(examination, "examine", interrupt)
    assert main(["doctor"]) == 130
    assert capsys.readouterr().err == ""


_SECRETS = {
    "BAGUA_BENCH_SECRET": "bench-word-4711",
    "BAGUA_NET_SECRET_FILE": "/absent/job-word-4711",  # some put the secret itself here
    "BAGUA_NET_SECRTE": "typo-word-4711",
    "NCCL_MY_TOKEN": "tok",
    "NCCL_COMM_ID": "other-host-4711:29500",
    "NCCL_RAS_ADDR": "ras-host-4711:28028",
    "BAGUA_NODE_DOMAIN_NAMES": "node-a-4711,node-b-4711",
    "NCCL_NET": "redis://user:pass-word-4711@192.0.2.9",
}


@pytest.fixture
def text(net: RunNet, tmp_path: Path) -> str:
    file = tmp_path / "report.json"
    result = net("doctor", "--report", file, **_SECRETS, BAGUA_NET_NSTREAMS="3", NCCL_DEBUG="WARN")
    assert result.returncode == 0, result.stderr
    assert str(file) in result.stdout
    return file.read_text()


def test_no_secret_is_in_it(text: str) -> None:
    assert "4711" not in text
    assert '"tok"' not in text


def test_what_a_report_needs_is_in_it(text: str) -> None:
    report = json.loads(text)
    assert report["bagua_version"] == bagua.__version__
    assert report["sections"]["library"]["status"] == "ok"
    assert report["machine"].keys() == {"system", "architecture", "libc", "python_version", "cpus_usable"}
    shown = report["variables"]
    assert (shown["BAGUA_NET_NSTREAMS"], shown["NCCL_DEBUG"]) == ("3", "WARN")
    assert shown["NCCL_MY_TOKEN"] == shown["BAGUA_NET_SECRTE"] == "(left out)"
    assert report["sections"]["settings"]["facts"]["environment"]["NCCL_MY_TOKEN"] == "(left out)"


def test_the_secret_of_a_job_and_of_a_file_of_nccl(net: RunNet, environment: dict[str, str], tmp_path: Path) -> None:
    """The id of the secret is left out, because a weak secret can be guessed from it. So is the home directory."""
    secret = Path(environment["HOME"], "job.secret")
    secret.write_text("word-of-the-job-4711-of-32-bytes-")
    secret.chmod(0o600)
    Path(environment["HOME"], ".nccl.conf").write_text("NCCL_OTHER_KEY=conf-4711\nNCCL_SHORT_KEY=q\n")
    plain = net("doctor", "--json", BAGUA_NET_SECRET_FILE=str(secret))
    key_id = json.loads(plain.stdout)["sections"]["protection"]["facts"]["key_id"]
    assert key_id
    file = tmp_path / "report.json"
    net("doctor", "--report", file, BAGUA_NET_SECRET_FILE=str(secret))
    text = file.read_text()
    assert json.loads(text)["sections"]["interfaces"]["facts"]["interfaces"]
    for word in ("4711", key_id, environment["HOME"], '"q"'):
        assert word not in text


def test_a_file_that_cannot_be_written(net: RunNet, tmp_path: Path) -> None:
    result = net("doctor", "--report", tmp_path / "nowhere" / "file")
    assert result.returncode == 1
    assert "cannot be written (No such file or directory)" in result.stderr


def test_it_is_of_one_host(net: RunNet) -> None:
    result = net("doctor", "--report", "--peer", "192.0.2.1")
    assert result.returncode == 2
    assert "without --peer" in result.stderr
