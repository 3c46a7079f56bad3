"""The doctor's section on protection."""

from __future__ import annotations

from pathlib import Path

import pytest

from bagua.net.doctor.finding import Section, Status
from bagua.net.doctor.protection_check import check_protection


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
