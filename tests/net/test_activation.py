"""Every way in, in fresh interpreters: `import torch`, `import bagua` and `bagua.net.activate`. What is decided is in
test_activation_plan.py."""

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
_ASKED = {"ENABLE_BAGUA_NET": "1"}
_OURS = {"NCCL_NET_PLUGIN": str(bagua.net.library_path())}


def _shown(output: str) -> dict[str, str]:
    shown = json.loads(output.splitlines()[-1])
    return {name: value for name, value in shown.items() if name not in ("NCCL_IB_DISABLE", "_BAGUA_NET_SAID")}


@pytest.mark.parametrize(
    ("script", "variables", "changes", "says"),
    [
        (_IMPORT_TORCH, _ASKED, _OURS, []),
        (_IMPORT_BAGUA, _ASKED, _OURS, []),
        (_IMPORT_BAGUA, {}, {}, []),
        (_IMPORT_BAGUA, {"ENABLE_BAGUA_NET": "0", "BAGUA_NET_REQUIRED": "1"}, {}, []),
        (_IMPORT_BAGUA, {"BAGUA_NET_REQUIRED": "1"}, {**_OURS, "NCCL_NET": "BaguaNet"}, []),
        (_IMPORT_BAGUA, _ASKED | {"NCCL_NET": "Socket"}, {}, ["NCCL_NET=Socket (set in the environment) is kept", ""]),
        (
            _IMPORT_BAGUA,
            {"ENABLE_BAGUA_NET": "maybe"},
            {},
            ["not activated, NCCL uses its own transport: ENABLE_BAGUA"],
        ),
    ],
)
def test_what_an_import_sets_and_says(
    script: str,
    variables: dict[str, str],
    changes: dict[str, str],
    says: list[str],
    run_python: RunPython,
    environment: dict[str, str],
) -> None:
    result = run_python(script, environment | variables)
    assert result.returncode == 0, result.stderr
    assert _shown(result.stdout) == variables | changes
    lines = result.stderr.splitlines()
    assert [said in line for said, line in zip(says, lines, strict=True)] == [True] * len(says)


@pytest.mark.parametrize(
    ("script", "variables", "says"),
    [
        (_IMPORT_BAGUA, {"BAGUA_NET_REQUIRED": "1", "NCCL_NET": "Socket"}, "BAGUA_NET_REQUIRED=1, but NCCL_NET=Socket"),
        (_IMPORT_BAGUA, {"ENABLE_BAGUA_NET": "maybe", "BAGUA_NET_REQUIRED": "1"}, "ENABLE_BAGUA_NET=maybe: must be 1"),
        (_IMPORT_BAGUA, {"ENABLE_BAGUA_NET": "1", "BAGUA_NET_REQUIRED": "maybe"}, "BAGUA_NET_REQUIRED=maybe: must be"),
    ],
)
def test_an_import_fails_only_where_the_plugin_is_required(
    script: str, variables: dict[str, str], says: str, run_python: RunPython, environment: dict[str, str]
) -> None:
    result = run_python(script, environment | variables)
    assert result.returncode != 0
    assert says in result.stderr


def test_a_missing_library(run_python: RunPython, environment: dict[str, str], without_library: dict[str, str]) -> None:
    """It breaks an import only where the plugin is required."""
    for variables, code in (_ASKED, 0), ({"BAGUA_NET_REQUIRED": "1"}, 1):
        result = run_python(_IMPORT_BAGUA, {**environment, **without_library, **variables}, "-S")
        assert result.returncode == code, result.stderr
        assert "the NCCL network plugin libnccl-net.so is not installed (sought: " in result.stderr
        assert "install the package with `pip install .`" in result.stderr
        assert code or _shown(result.stdout) == variables


def test_ranks_of_a_job_look_for_what_holds_them_up(run_python: RunPython, environment: dict[str, str]) -> None:
    script = "import bagua, threading\nprint([one.name for one in threading.enumerate()][1:])"
    variables = environment | _ASKED
    assert run_python(script, variables).stdout == "[]\n"
    result = run_python(script, {**variables, "WORLD_SIZE": "2"})
    assert (result.returncode, result.stdout, result.stderr) == (0, "['bagua-net-blame']\n", "")


def test_torch_can_be_told_not_to_load_us_and_fails_with_us(run_python: RunPython, environment: dict[str, str]) -> None:
    variables = {**_ASKED, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    script = f"""
import os, sys, torch
assert "NCCL_NET_PLUGIN" not in os.environ and "bagua" not in sys.modules
os.environ |= {{"BAGUA_NET_REQUIRED": "1", "NCCL_NET": "Socket"}}
try:
    torch._import_device_backends()  # as `import torch` does otherwise
except RuntimeError as error:
    assert "BAGUA_NET_REQUIRED=1, but NCCL_NET=Socket" in str(error.__cause__), error.__cause__
else:
    raise AssertionError
del os.environ["BAGUA_NET_REQUIRED"], os.environ["NCCL_NET"]
for name in [name for name in sys.modules if name.split(".")[0] == "bagua"]:
    del sys.modules[name]  # half imported
import bagua
{_SHOW}"""
    result = run_python(script, environment | variables)
    assert result.returncode == 0, result.stderr
    assert "NCCL_NET_PLUGIN" in _shown(result.stdout)


def test_activate_tells_and_repeats_nothing(run_python: RunPython, environment: dict[str, str]) -> None:
    """It raises what the imports only say."""
    script = """
import os, bagua.net
assert bagua.net.activate().state.value == "not asked"
os.environ["ENABLE_BAGUA_NET"] = "1"
os.environ["NCCL_NET"] = "Socket"
kept = bagua.net.activate()
assert kept.state is bagua.net.ActivationState.KEPT
assert kept.kept == (bagua.net.KeptSetting("NCCL_NET", "Socket", "the environment"),), kept.kept
assert not kept.changes and len(kept.warnings) == 1
del os.environ["NCCL_NET"]
first = bagua.net.activate()
before = dict(os.environ)
second = bagua.net.activate()
assert first.state is second.state is bagua.net.ActivationState.ACTIVE
assert dict(first.changes) == {"NCCL_NET_PLUGIN": str(bagua.net.library_path())}
assert dict(second.changes) == {} and dict(os.environ) == before
from bagua.net.activation import original_environment
assert "NCCL_NET_PLUGIN" not in original_environment() and "NCCL_NET_PLUGIN" in os.environ
os.environ["ENABLE_BAGUA_NET"] = "maybe"
bagua.net.activate()
"""
    result = run_python(script, environment)
    assert "EnvironmentValueError: ENABLE_BAGUA_NET=maybe: must be" in result.stderr


def test_a_process_says_it_for_those_that_it_starts(run_python: RunPython, environment: dict[str, str]) -> None:
    """As a launcher does that imports bagua, or torch."""
    script = "import bagua, subprocess, sys; subprocess.run([sys.executable, '-c', 'import bagua'], check=True)"
    result = run_python(script, environment | _ASKED | {"NCCL_NET": "Socket"})
    assert (result.returncode, result.stderr.count("NCCL_NET=Socket (set in the environment) is kept")) == (0, 1)


@pytest.mark.deep
@pytest.mark.slow
def test_torchrun_says_it_once(run_command: RunCommand, environment: dict[str, str], tmp_path: Path) -> None:
    """torchrun imports torch itself, and so does each rank; of several, the first speaks (below)."""
    script = tmp_path / "train.py"
    script.write_text(f"import torch\nopen(f'{tmp_path}/' + __import__('os').environ['LOCAL_RANK'], 'w').close()\n")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1", script]
    result = run_command(command, environment | _ASKED | {"NCCL_NET": "Socket"})
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "0").exists()
    assert result.stderr.count("NCCL_NET=Socket (set in the environment) is kept") == 1


@pytest.mark.parametrize(
    ("variable", "value", "count"), [("LOCAL_RANK", "0", 1), ("LOCAL_RANK", "1", 0), ("RANK", "3", 0)]
)
def test_only_local_rank_0_speaks(
    variable: str, value: str, count: int, run_python: RunPython, environment: dict[str, str]
) -> None:
    result = run_python(_IMPORT_BAGUA, environment | _ASKED | {"NCCL_NET": "Socket", variable: value})
    assert result.stderr.count("is kept") == count


@pytest.mark.parametrize("variables", [{}, _ASKED])
def test_imports_neither_torch_nor_native_code(
    variables: dict[str, str], run_python: RunPython, environment: dict[str, str]
) -> None:
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
    result = run_python(script, environment | variables)
    assert result.returncode == 0, result.stderr
