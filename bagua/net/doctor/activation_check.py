"""Would NCCL be told of the plugin? By whom: the environment, a configuration file, or torch's autoload?"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib.metadata import entry_points
from pathlib import Path

from bagua.env import EnvironmentValueError, read_switch
from bagua.net import nccl_config_file
from bagua.net.activation import ActivationState, Surroundings, Target, demanding_setting, plan, way_to_plugin
from bagua.net.doctor.finding import Finding, Section, Status, fail, ok, skip, split_message, warn
from bagua.net.nccl_library import NcclLibrary, TorchInstallation

_ENTRY_POINT = "bagua.net.autoload:autoload"
_WAYS_IN = (
    "export ENABLE_BAGUA_NET=1 for jobs that import torch, start the job with `bagua-net run -- CMD`, or write NCCL's "
    "configuration file with `bagua-net enable`"
)
_WAYS_WITHOUT_TORCH = "start the job with `bagua-net run -- CMD`, or run `bagua-net enable` once"
_FIRST_TORCH_WITH_AUTOLOAD = (2, 5)


def check_activation(
    environment: Mapping[str, str],
    surroundings: Surroundings,
    torch: TorchInstallation | None,
    nccl: Iterable[NcclLibrary],
) -> Section:
    findings, way = _findings(environment, surroundings, torch, list(nccl))
    return Section("activation", "Activation", tuple(findings), {"way": way})


def _findings(
    environment: Mapping[str, str],
    surroundings: Surroundings,
    torch: TorchInstallation | None,
    nccl: list[NcclLibrary],
) -> tuple[list[Finding], str | None]:
    try:
        is_asked = read_switch(environment, "ENABLE_BAGUA_NET")
        demanding = demanding_setting(environment)
        asking = dict(environment) if is_asked is not None else {**environment, "ENABLE_BAGUA_NET": "1"}
        result = plan(asking, Target.THIS_PROCESS, surroundings)
    except EnvironmentValueError:
        return [skip("not checked: a setting has a bad value, see Settings")], None
    except (ValueError, RuntimeError) as error:
        return [split_message(Status.FAIL, str(error))], None
    if result.state is ActivationState.OFF:
        return [fail("ENABLE_BAGUA_NET=0 switches the plugin off", "unset it, or set ENABLE_BAGUA_NET=1")], None
    if result.state is ActivationState.KEPT:
        return [split_message(Status.FAIL, warning) for warning in result.warnings], None

    direct = way_to_plugin(environment, surroundings)
    if direct is not None:
        source, file = direct
        findings = [ok(f"every job takes the plugin: {source}")]
        if file is not None:
            findings += _config_file_findings(environment, file, nccl)
        return findings, source
    if is_asked is None and demanding is None:
        return [fail("nothing asks for the plugin: ENABLE_BAGUA_NET and NCCL_NET_PLUGIN are not set", _WAYS_IN)], None
    variable = "ENABLE_BAGUA_NET=1" if is_asked or demanding is None else demanding
    finding = _check_autoload(variable, environment, torch)
    findings = [finding]
    if finding.status is Status.OK:
        findings.append(ok(f"jobs without Python need more: {_WAYS_WITHOUT_TORCH}"))
    return findings, variable if finding.status is Status.OK else None


def _check_autoload(variable: str, environment: Mapping[str, str], torch: TorchInstallation | None) -> Finding:
    if torch is None:
        return fail(f"{variable} acts where Python imports torch, and there is no torch here", _WAYS_WITHOUT_TORCH)
    if environment.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") != "1":
        setting = f"TORCH_DEVICE_BACKEND_AUTOLOAD={environment['TORCH_DEVICE_BACKEND_AUTOLOAD']}"
        return fail(
            f"{setting} keeps torch from activating the plugin",
            "unset it, put `import bagua` before `import torch`, or start the job with `bagua-net run -- CMD`",
        )
    version = _major_minor(torch.version)
    if version is not None and version < _FIRST_TORCH_WITH_AUTOLOAD:
        return fail(
            f"torch {torch.version} loads no extensions by itself; 2.5 and newer do",
            "put `import bagua` before the first collective, or start the job with `bagua-net run -- CMD`",
        )
    if not any(entry.value == _ENTRY_POINT for entry in entry_points(group="torch.backends")):
        return fail(
            "the entry point that torch calls is not installed: bagua runs from a source tree",
            "install the package with `pip install .`, or start the job with `bagua-net run -- CMD`",
        )
    return ok(f"jobs that import torch take the plugin: {variable}, torch {torch.version or 'of unknown version'}")


def _config_file_findings(environment: Mapping[str, str], file: Path, nccl: list[NcclLibrary]) -> list[Finding]:
    """Older NCCLs look for the file elsewhere."""
    release = next((library.release for library in nccl if library.release is not None), None)
    if release is None or file == nccl_config_file.SYSTEM_FILE:
        return []
    if environment.get("NCCL_CONF_FILE"):
        if release.reads_config_variable:
            return []
        return [
            warn(
                f"NCCL {release} does not know NCCL_CONF_FILE, and will not read {file}",
                "use NCCL 2.23 or newer, or unset NCCL_CONF_FILE and run `bagua-net enable` again",
            )
        ]
    other = nccl_config_file.password_database_file()
    if release.reads_home_variable or other is None or other == file:
        return []
    return [
        warn(
            f"NCCL {release} looks for the user's file at {other}, the home directory of the password database, and "
            f"not at {file}",
            f"run `NCCL_CONF_FILE={other} bagua-net enable`, or set HOME to {other.parent}",
        )
    ]


def _major_minor(version: str) -> tuple[int, int] | None:
    major, _, rest = version.partition(".")
    minor = rest.partition(".")[0]
    return (int(major), int(minor)) if major.isdecimal() and minor.isdecimal() else None
