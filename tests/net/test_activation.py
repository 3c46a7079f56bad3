"""Every way in, in fresh interpreters: `import torch`, `import bagua` and `bagua.net.activate`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from support.fresh_process import RunCommand, RunPython

import bagua.net

_SHOW = """
import json, os
print(json.dumps({name: value for name, value in os.environ.items() if "NCCL" in name or "BAGUA" in name}))
"""
_IMPORT_TORCH = "import torch, sys\nassert 'bagua.net.autoload' in sys.modules\n" + _SHOW
_IMPORT_BAGUA = "import bagua" + _SHOW


def _shown(output: str) -> dict[str, str]:
    shown = json.loads(output.splitlines()[-1])
    return {name: value for name, value in shown.items() if name not in ("NCCL_IB_DISABLE", "_BAGUA_NET_SAID")}


@pytest.fixture(params=["import torch", "import bagua"])
def script(request: pytest.FixtureRequest) -> str:
    return _IMPORT_TORCH if request.param == "import torch" else _IMPORT_BAGUA


def test_enabled(script: str, run_python: RunPython, environment: dict[str, str]) -> None:
    result = run_python(script, {**environment, "ENABLE_BAGUA_NET": "1"})
    assert result.returncode == 0, result.stderr
    library = _shown(result.stdout)["NCCL_NET_PLUGIN"]
    assert Path(library).is_absolute()
    assert Path(library).samefile(bagua.net.library_path())
    assert _shown(result.stdout) == {"ENABLE_BAGUA_NET": "1", "NCCL_NET_PLUGIN": library}
    assert result.stderr == ""


def test_ranks_of_a_job_look_for_what_holds_them_up(run_python: RunPython, environment: dict[str, str]) -> None:
    script = "import bagua, threading\nprint([one.name for one in threading.enumerate()][1:])"
    variables = {**environment, "ENABLE_BAGUA_NET": "1"}
    assert run_python(script, variables).stdout == "[]\n"
    result = run_python(script, {**variables, "WORLD_SIZE": "2"})
    assert (result.returncode, result.stdout, result.stderr) == (0, "['bagua-net-blame']\n", "")


def test_switched_off(run_python: RunPython, environment: dict[str, str]) -> None:
    variables = {"ENABLE_BAGUA_NET": "0", "BAGUA_NET_REQUIRED": "1"}
    result = run_python(_IMPORT_BAGUA, environment | variables)
    assert result.returncode == 0, result.stderr
    assert _shown(result.stdout) == variables
    assert result.stderr == ""


def test_not_asked(run_python: RunPython, environment: dict[str, str]) -> None:
    result = run_python(_IMPORT_BAGUA, environment)
    assert result.returncode == 0, result.stderr
    assert _shown(result.stdout) == {}
    assert result.stderr == ""


def test_required_also_names_the_plugin(run_python: RunPython, environment: dict[str, str]) -> None:
    result = run_python(_IMPORT_BAGUA, {**environment, "BAGUA_NET_REQUIRED": "1"})
    assert result.returncode == 0, result.stderr
    shown = _shown(result.stdout)
    assert shown["NCCL_NET"] == "BaguaNet"
    assert Path(shown["NCCL_NET_PLUGIN"]).samefile(bagua.net.library_path())


@pytest.mark.parametrize(("name", "value"), [("NCCL_NET_PLUGIN", "ofi"), ("NCCL_NET", "Socket")])
def test_the_users_own_setting_is_kept(
    name: str, value: str, run_python: RunPython, environment: dict[str, str]
) -> None:
    result = run_python(_IMPORT_BAGUA, {**environment, "ENABLE_BAGUA_NET": "1", name: value})
    assert result.returncode == 0, result.stderr
    assert _shown(result.stdout) == {"ENABLE_BAGUA_NET": "1", name: value}
    assert result.stderr.count(f"Bagua-Net: {name}={value} (set in the environment) is kept") == 1
    assert len(result.stderr.splitlines()) == 2


def test_a_setting_of_the_configuration_file_is_kept(run_python: RunPython, environment: dict[str, str]) -> None:
    file = Path(environment["HOME"], ".nccl.conf")
    file.write_text("NCCL_DEBUG=WARN\nNCCL_NET_PLUGIN=ofi\n")
    result = run_python(_IMPORT_BAGUA, {**environment, "ENABLE_BAGUA_NET": "1"})
    assert "NCCL_NET_PLUGIN" not in _shown(result.stdout)
    assert f"NCCL_NET_PLUGIN=ofi (set in {file}) is kept" in result.stderr


def test_required_and_another_transport_contradict(
    script: str, run_python: RunPython, environment: dict[str, str]
) -> None:
    result = run_python(script, {**environment, "BAGUA_NET_REQUIRED": "1", "NCCL_NET": "Socket"})
    assert result.returncode != 0
    assert "BAGUA_NET_REQUIRED=1, but NCCL_NET=Socket (set in the environment) is kept" in result.stderr
    assert "unset NCCL_NET or set it to BaguaNet" in result.stderr


def test_a_bad_value_does_not_break_the_import(script: str, run_python: RunPython, environment: dict[str, str]) -> None:
    result = run_python(script, {**environment, "ENABLE_BAGUA_NET": "maybe"})
    assert result.returncode == 0, result.stderr
    assert _shown(result.stdout) == {"ENABLE_BAGUA_NET": "maybe"}
    assert result.stderr == (
        "Bagua-Net: not activated, NCCL uses its own transport: ENABLE_BAGUA_NET=maybe: must be 1, true, yes or on, or "
        "else 0, false, no or off\n"
    )


@pytest.mark.parametrize(
    "variables",
    [
        {"ENABLE_BAGUA_NET": "maybe", "BAGUA_NET_REQUIRED": "1"},
        {"ENABLE_BAGUA_NET": "1", "BAGUA_NET_REQUIRED": "maybe"},
    ],
)
def test_a_bad_value_breaks_it_where_the_plugin_is_required(
    variables: dict[str, str], run_python: RunPython, environment: dict[str, str]
) -> None:
    result = run_python(_IMPORT_BAGUA, environment | variables)
    assert result.returncode != 0
    assert "=maybe: must be 1, true, yes or on" in result.stderr


def test_a_missing_library_does_not_break_the_import(
    run_python: RunPython, environment: dict[str, str], without_library: dict[str, str]
) -> None:
    result = run_python(_IMPORT_BAGUA, {**environment, **without_library, "ENABLE_BAGUA_NET": "1"}, "-S")
    assert result.returncode == 0, result.stderr
    assert _shown(result.stdout) == {"ENABLE_BAGUA_NET": "1"}
    assert len(result.stderr.splitlines()) == 1
    assert "the NCCL network plugin libnccl-net.so is not installed (sought: " in result.stderr
    assert "install the package with `pip install .`" in result.stderr


def test_a_missing_library_breaks_it_where_the_plugin_is_required(
    run_python: RunPython, environment: dict[str, str], without_library: dict[str, str]
) -> None:
    result = run_python(_IMPORT_BAGUA, {**environment, **without_library, "BAGUA_NET_REQUIRED": "1"}, "-S")
    assert result.returncode != 0
    assert "libnccl-net.so is not installed" in result.stderr


def test_torch_can_be_told_not_to_load_us(run_python: RunPython, environment: dict[str, str]) -> None:
    variables = {"ENABLE_BAGUA_NET": "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    script = "import torch, os\nassert 'NCCL_NET_PLUGIN' not in os.environ\nimport bagua" + _SHOW
    result = run_python(script, environment | variables)
    assert result.returncode == 0, result.stderr
    assert "NCCL_NET_PLUGIN" in _shown(result.stdout)


def test_set_between_the_imports(run_python: RunPython, environment: dict[str, str]) -> None:
    """`import bagua` found nothing to do; `import torch` does it."""
    script = "import os, bagua\nos.environ['ENABLE_BAGUA_NET'] = '1'\nimport torch" + _SHOW
    assert "NCCL_NET_PLUGIN" in _shown(run_python(script, environment).stdout)


def test_activate_tells_and_repeats_nothing(run_python: RunPython, environment: dict[str, str]) -> None:
    script = """
import os, bagua.net
assert bagua.net.activate().state.value == "not asked"
os.environ["ENABLE_BAGUA_NET"] = "1"
first = bagua.net.activate()
before = dict(os.environ)
second = bagua.net.activate()
assert first.state is second.state is bagua.net.ActivationState.ACTIVE
assert dict(first.changes) == {"NCCL_NET_PLUGIN": str(bagua.net.library_path())}
assert dict(second.changes) == {} and dict(os.environ) == before
from bagua.net.activation import original_environment
assert "NCCL_NET_PLUGIN" not in original_environment() and "NCCL_NET_PLUGIN" in os.environ
"""
    result = run_python(script, environment)
    assert result.returncode == 0, result.stderr


def test_activate_reports_what_it_kept(run_python: RunPython, environment: dict[str, str]) -> None:
    script = """
import bagua.net
result = bagua.net.activate()
assert result.state is bagua.net.ActivationState.KEPT
assert result.kept == (bagua.net.KeptSetting("NCCL_NET", "Socket", "the environment"),), result.kept
assert not result.changes and len(result.warnings) == 1
"""
    result = run_python(script, {**environment, "ENABLE_BAGUA_NET": "1", "NCCL_NET": "Socket"})
    assert result.returncode == 0, result.stderr


def test_activate_raises_what_the_imports_only_say(run_python: RunPython, environment: dict[str, str]) -> None:
    script = "import os, bagua.net\nos.environ['ENABLE_BAGUA_NET'] = 'maybe'\nbagua.net.activate()"
    result = run_python(script, environment)
    assert result.returncode != 0
    assert "EnvironmentValueError: ENABLE_BAGUA_NET=maybe: must be" in result.stderr


@pytest.mark.slow
def test_torchrun_says_it_once(run_command: RunCommand, environment: dict[str, str], tmp_path: Path) -> None:
    """torchrun imports torch itself, and so does each rank."""
    script = tmp_path / "train.py"
    script.write_text(f"import torch\nopen(f'{tmp_path}/' + __import__('os').environ['LOCAL_RANK'], 'w').close()\n")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", script]
    result = run_command(command, {**environment, "ENABLE_BAGUA_NET": "1", "NCCL_NET": "Socket"})
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "0").exists()
    assert (tmp_path / "1").exists()
    assert result.stderr.count("NCCL_NET=Socket (set in the environment) is kept") == 1


@pytest.mark.parametrize(
    ("variable", "value", "count"), [("LOCAL_RANK", "0", 1), ("LOCAL_RANK", "1", 0), ("RANK", "3", 0)]
)
def test_only_local_rank_0_speaks(
    variable: str, value: str, count: int, run_python: RunPython, environment: dict[str, str]
) -> None:
    asked = {"ENABLE_BAGUA_NET": "1", "NCCL_NET": "Socket", variable: value}
    result = run_python(_IMPORT_BAGUA, environment | asked)
    assert result.stderr.count("is kept") == count


def test_imports_neither_torch_nor_native_code(run_python: RunPython, environment: dict[str, str]) -> None:
    """Also with the plugin asked for: that runs inside `import torch`, where torch is half imported."""
    script = """
import sys
sys.modules["torch"] = None  # any import of it fails
import bagua, bagua.net, bagua.net.autoload
bagua.net.autoload.autoload()
heavy = {"torch", "numpy", "bagua.net._core", "asyncio", "importlib.metadata", "subprocess", "tempfile", "logging"}
loaded = {name for name in heavy if sys.modules.get(name) is not None}
assert not loaded, loaded
"""
    for variables in ({}, {"ENABLE_BAGUA_NET": "1"}):
        result = run_python(script, environment | variables)
        assert result.returncode == 0, result.stderr
