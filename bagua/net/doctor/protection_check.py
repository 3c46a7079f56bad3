"""Who could join, read or change the traffic of a job that is started here, and what is not protected."""

from __future__ import annotations

import os
from collections.abc import Mapping

from bagua.net import native, secret_file
from bagua.net.doctor.finding import Finding, Section, Status, fail, ok, skip, warn

_OFF = ("0", "false", "no", "off")


def check_protection(environment: Mapping[str, str], *, settings_fail: bool) -> Section:
    """`settings_fail`: some setting has a bad value, so that none can be relied on."""
    if settings_fail:
        return Section("protection", "Protection", (skip("not checked: correct the settings first"),))
    file = environment.get(secret_file.SECRET_FILE, "").strip()
    cipher = secret_file.cipher(environment)
    is_encrypted = bool(cipher)
    try:
        key_id = native.secret_key_id(file) if file else ""
        finding = _finding(file, key_id, is_encrypted=is_encrypted)
    except ValueError as error:
        what, *_, remedy = str(error).split("\n")
        return Section("protection", "Protection", (fail(what, remedy),))
    except RuntimeError as error:
        return Section("protection", "Protection", (Finding(Status.FAIL, str(error)),))
    findings = [finding]
    findings += [warn(*warning) for warning in secret_file.warnings(file)]
    table = (
        ("what", "protected by"),
        ("joining a connection", f"secret with key id {key_id}" if key_id else "token, which NCCL sends in the clear"),
        ("data", cipher or "nothing: it is sent in the clear"),
        ("NCCL's bootstrap", _bootstrap(environment, is_encrypted=is_encrypted)),
        ("torch's store", "nothing: whoever reaches its port can read and write"),
        ("gloo", _gloo(environment)),
        ("statistics page", _statistics(environment)),
    )
    facts = {"key_id": key_id, "encrypted": is_encrypted, "parts": dict(table[1:])}
    return Section("protection", "Protection", tuple(findings), facts, table)


def _finding(file: str, key_id: str, *, is_encrypted: bool) -> Finding:
    if is_encrypted:
        return ok(f"the plugin's traffic is encrypted, with the secret in {file} (key id {key_id})")
    if file:
        return ok(f"only ranks with the secret in {file} (key id {key_id}) can join; traffic is not encrypted")
    return ok("only ranks that NCCL has introduced can join; traffic is not encrypted")


def _bootstrap(environment: Mapping[str, str], *, is_encrypted: bool) -> str:
    if not is_encrypted:
        return "nothing: it is sent in the clear"
    if environment.get("NCCL_OOB_NET_ENABLE", "").strip() == "1":
        return "the plugin, but for the first contact"
    return "nothing; NCCL_OOB_NET_ENABLE=1 moves all but the first contact into the plugin"


def _gloo(environment: Mapping[str, str]) -> str:
    if environment.get("GLOO_DEVICE_TRANSPORT", "").strip() == "TCP_TLS":
        return "its own TLS"
    return "nothing; GLOO_DEVICE_TRANSPORT=TCP_TLS is its own TLS"


def _statistics(environment: Mapping[str, str]) -> str:
    if environment.get("BAGUA_NET_STATS", "").strip().lower() in _OFF:
        return "switched off"
    return f"for user {os.getuid()} and root only"
