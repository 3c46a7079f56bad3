"""`bagua-net doctor --report`: what it writes, and that no secret is in it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.fresh_process import RunNet

import bagua

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
