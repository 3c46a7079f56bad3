"""What importing loads, and which names the core knows; who may import whom is in pyproject.toml, for `make lint`."""

from __future__ import annotations

import re
import subprocess
import sys

from support.fresh_process import TIMEOUT_S
from support.import_arrows import PACKAGE, REPOSITORY, module_name, python_files

# A worker process that is about torch, the screen of `bagua-net top`, what is for torchft, and what uses torch's store:
# imported where they are needed.
NEED_PACKAGES = {
    "bagua.torchft",
    "bagua.net.bench.nccl_ab.gpu_collectives",
    "bagua.net.top.app",
    *(f"bagua.distributed.regroup_{part}" for part in ("agent", "nodes", "store")),
}
ONLY_STANDARD_LIBRARY = """
import importlib, sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in {*sys.stdlib_module_names, "bagua"}:
            raise ImportError(f"{name} is not of the standard library")

sys.meta_path.insert(0, Blocked())
for module in sys.argv[1:]:
    importlib.import_module(module)
"""


def test_net_commands_and_launchers_load_only_the_standard_library() -> None:
    paths = [
        *PACKAGE.glob("*.py"),
        *python_files("net", "cli", "distributed", "script", "tuning", "service"),
        *(path for path in python_files("legacy") if path.stem.startswith(("autotune", "launcher"))),
    ]
    modules = sorted({module_name(path) for path in paths if path.stem != "__main__"} - NEED_PACKAGES)
    assert {"bagua.env", "bagua.net.autoload", "bagua.cli.net_bench", "bagua.script.baguarun"} <= set(modules)
    command = [sys.executable, "-P", "-W", "error", "-c", ONLY_STANDARD_LIBRARY, *modules]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr


def test_engine_and_collectives_name_no_algorithm() -> None:
    files = [path for path in python_files("torch_api/algorithms") if path.stem != "base"]
    sources = "".join(path.read_text() for path in files)
    defined = re.findall(r"(?:^class |Registry\.register\(\s*\")(\w+)", sources, re.MULTILINE)
    names = {path.stem for path in files}.union(defined) - {"__init__"}
    assert {"fragments", "GradientAllReduceAlgorithm", "low_precision_decentralized"} <= names
    wrong = [
        f"{path.relative_to(REPOSITORY)} names {name}"
        for path in python_files("job", "collectives", "replicas", "engine")
        for name in sorted(names & set(re.findall(r"\w+", path.read_text())))
    ]
    assert wrong == []
