"""What a user gets: the source distribution, the wheel built from it, and both ways to install, outside this tree.

The package is compiled twice here, from the source distribution and as an editable install: by the pytest worker that
needs it first; the others wait and take what it made.
"""

from __future__ import annotations

import configparser
import fcntl
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from email.parser import Parser
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")
EXTENSION = "bagua/net/_core" + SUFFIX
KERNELS = "bagua/kernels/_minmax_uint8" + SUFFIX
LIBRARY = "bagua/net/lib/libnccl-net.so"
DRIVER = "bagua/net/bin/bagua-net-driver"
COMPILED = {EXTENSION, KERNELS, LIBRARY, DRIVER}
BUILD_DEADLINE_S = 360
# Which files are there does not depend on the optimizer, which takes most of the time; `make install` builds with it.
UNOPTIMIZED = (
    "--config-settings=cmake.build-type=Debug",
    "--config-settings=cmake.define.CMAKE_CXX_FLAGS_DEBUG=-O0",
)

pytestmark = pytest.mark.timeout(2 * BUILD_DEADLINE_S)


def run(*command: str | Path, timeout: float = 60, cwd: Path | None = None, **variables: str) -> str:
    """Runs outside the source tree unless told otherwise; a failure shows the output."""
    done = subprocess.run(
        [str(word) for word in command],
        capture_output=True,
        text=True,
        timeout=timeout,
        stdin=subprocess.DEVNULL,
        cwd=cwd or Path("/"),
        env={**clean_environment(), **variables},
    )
    assert done.returncode == 0, f"{command} exited with {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def clean_environment() -> dict[str, str]:
    """This process's, without what would find our files, or switch them on, by another way than the one tested."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("NCCL_", "BAGUA_"))
        and name not in {"ENABLE_BAGUA_NET", "PYTHONPATH", "LD_LIBRARY_PATH"}
    }
    # The build backend looks for cmake and ninja, which are in this interpreter's environment, on the PATH as well.
    kept["PATH"] = f"{Path(sys.executable).parent}:{kept.get('PATH', '')}"
    kept["PYTHONSAFEPATH"] = "1"
    return kept


def pip(
    *arguments: str | Path, python: Path | None = None, timeout: float = BUILD_DEADLINE_S, cwd: Path | None = None
) -> str:
    return run(
        python or sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments, timeout=timeout, cwd=cwd
    )


def source_files(pattern: str) -> set[str]:
    return {str(path.relative_to(REPOSITORY)) for path in (REPOSITORY / "bagua").rglob(pattern)}


def made_once(tmp_path_factory: pytest.TempPathFactory, name: str, make: Callable[[Path], None]) -> Path:
    """A folder that `make` has filled, in one worker of this run; the others wait for that one."""
    is_worker = "PYTEST_XDIST_WORKER" in os.environ
    base = tmp_path_factory.getbasetemp().parent if is_worker else tmp_path_factory.getbasetemp()
    folder = base / name
    with (base / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (base / f"{name}.done").exists():
            shutil.rmtree(folder, ignore_errors=True)  # of a worker that failed
            folder.mkdir()
            make(folder)
            (base / f"{name}.done").touch()
    return folder


@pytest.fixture(scope="session")
def source_distribution(tmp_path_factory: pytest.TempPathFactory) -> Path:
    def make(folder: Path) -> None:
        call = "import sys; from scikit_build_core.build import build_sdist; build_sdist(sys.argv[1])"
        run(sys.executable, "-c", call, folder, timeout=120, cwd=REPOSITORY)

    (archive,) = made_once(tmp_path_factory, "sdist", make).iterdir()
    return archive


@pytest.fixture(scope="session")
def wheel(source_distribution: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the source distribution, so that a file that it lacks is found here."""

    def make(folder: Path) -> None:
        pip("wheel", "--no-deps", "--no-build-isolation", *UNOPTIMIZED, "--wheel-dir", folder, source_distribution)

    (built,) = made_once(tmp_path_factory, "wheel", make).iterdir()
    return built


@dataclass(frozen=True)
class Installation:
    python: Path
    site_packages: Path

    def script(self, name: str) -> Path:
        return self.python.parent / name

    def evaluate(self, expression: str, modules: str) -> str:
        return run(self.python, "-W", "error", "-c", f"import {modules}; print({expression})").strip()


def make_environment(folder: Path) -> Installation:
    venv.create(folder, with_pip=False, symlinks=True)
    return installation_in(folder)


def installation_in(folder: Path) -> Installation:
    python = folder / "bin" / "python"
    site_packages = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    return Installation(python, Path(site_packages))


@pytest.fixture(scope="session")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installation:
    """The wheel in an environment that holds nothing else: no torch, no pip."""
    installation = make_environment(tmp_path_factory.mktemp("installed") / "venv")
    pip("--python", installation.python, "install", "--no-deps", "--no-index", wheel)
    return installation


@pytest.fixture(scope="session")
def editable(tmp_path_factory: pytest.TempPathFactory) -> Installation:
    """An editable install of a copy of this tree: a build must not touch the tree that other tests read."""

    def make(folder: Path) -> None:
        tree = folder / "tree"
        shutil.copytree(
            REPOSITORY, tree, ignore=shutil.ignore_patterns(".git", ".venv", "build", "dist", "__pycache__", ".*_cache")
        )
        installation = make_environment(folder / "venv")
        # pip and the build backend come from the environment that runs the tests, but not the bagua that is in it.
        backend = folder / "backend"
        backend.mkdir()
        for entry in Path(sysconfig.get_path("purelib")).iterdir():
            if "bagua" not in entry.name and entry.suffix != ".pth":
                (backend / entry.name).symlink_to(entry)
        (installation.site_packages / "backend.pth").write_text(f"{backend}\n")
        options = ["--no-deps", "--no-index", "--no-build-isolation", *UNOPTIMIZED]
        pip("install", *options, "--editable", tree, python=installation.python)

    return installation_in(made_once(tmp_path_factory, "editable", make) / "venv")


# --- the source distribution -----------------------------------------------------------------------------------------


def test_source_distribution_has_the_sources_and_nothing_built(source_distribution: Path) -> None:
    with tarfile.open(source_distribution) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for needed in ("CMakeLists.txt", "pyproject.toml", "README.md", "LICENSE", "net_plugin/abi/exports.map"):
        assert needed in names
    assert source_files("*.py") <= names
    unwanted = re.compile(r"^(build|\.venv|\.git|dist)(/|$)|\.(so|o|a|whl|pyc)$|(^|/)(__pycache__|\.\w+_cache)(/|$)")
    assert sorted(name for name in names if unwanted.search(name)) == []


# --- the wheel -------------------------------------------------------------------------------------------------------


def test_wheel_holds_exactly_what_is_meant(wheel: Path) -> None:
    info = f"{PROJECT['name']}-{PROJECT['version']}.dist-info"
    metadata = {f"{info}/{name}" for name in ("METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE")}
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if not name.endswith("/")}
    assert names == source_files("*.py") | source_files("*.pyi") | {"bagua/py.typed"} | COMPILED | metadata


def test_wheel_is_for_this_python_and_this_machine(wheel: Path) -> None:
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    assert f"-{tag}-{tag}-linux_" in wheel.name or f"-{tag}-{tag}-manylinux" in wheel.name


def test_metadata(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = Parser().parsestr(archive.read(name).decode())
    assert metadata["Name"] == "bagua"
    assert metadata["Version"] == PROJECT["version"]
    assert metadata["License-Expression"] == "MIT"
    assert metadata["Requires-Python"] == ">=3.11"
    required = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert required == [], "the plugin must install beside any torch, and without one"


def test_entry_points_name_things_that_exist(wheel: Path, installed: Installation) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith("entry_points.txt")]
        groups = configparser.ConfigParser()
        groups.optionxform = str  # type: ignore[assignment,method-assign]
        groups.read_string(archive.read(name).decode())
    assert set(groups["console_scripts"]) == {"bagua-net", "bagua-net-bench"}
    assert dict(groups["torch.backends"]) == {"bagua_net": "bagua.net.autoload:autoload"}
    for target in [*groups["console_scripts"].values(), *groups["torch.backends"].values()]:
        module, _, function = target.partition(":")
        assert installed.evaluate(f"callable({module}.{function})", module) == "True"


@pytest.mark.parametrize("command", ["bagua-net", "bagua-net-bench"])
def test_commands_run(installed: Installation, command: str) -> None:
    assert "usage: " + command in run(installed.script(command), "--help")


def test_compiled_driver_is_executable(installed: Installation) -> None:
    assert os.access(installed.site_packages / DRIVER, os.X_OK)


# --- the library in it -----------------------------------------------------------------------------------------------


def test_plain_c_program_opens_the_library(installed: Installation, tmp_path: Path) -> None:
    """As NCCL does it: a C program without our headers, far from the source tree."""
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    assert compiler, "a C compiler comes with the C++ compiler that the build needs; set CC"
    program = tmp_path / "dlopen_plain"
    source = REPOSITORY / "tests" / "cpp" / "dlopen_plain.c"
    run(compiler, "-std=c11", "-Wall", "-Wextra", "-Werror", source, "-o", program, "-ldl")
    run(program, installed.site_packages / LIBRARY, cwd=tmp_path)


# --- one version -----------------------------------------------------------------------------------------------------


def test_version_is_the_same_everywhere(installed: Installation) -> None:
    cmake = re.search(r"project\(bagua VERSION ([\d.]+)", (REPOSITORY / "CMakeLists.txt").read_text())
    changelog = re.search(r"^## \[?(\d[\w.]*)", (REPOSITORY / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert cmake
    assert changelog
    versions = {
        "pyproject.toml": PROJECT["version"],
        "CMakeLists.txt": cmake[1],
        "CHANGELOG.md, newest entry": changelog[1],
        "bagua.__version__": installed.evaluate("bagua.__version__", "bagua"),
        "metadata": installed.evaluate("importlib.metadata.version('bagua')", "importlib.metadata"),
        "compiled library": installed.evaluate("bagua.net._core.version()", "bagua.net._core"),
        "bagua-net --version": run(installed.script("bagua-net"), "--version").split()[-1],
    }
    assert set(versions.values()) == {PROJECT["version"]}, versions


# --- installed and editable alike ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["installed", "editable"])
def test_installation_finds_its_compiled_files(kind: str, request: pytest.FixtureRequest) -> None:
    installation: Installation = request.getfixturevalue(kind)
    for function in ("library_path", "driver_path"):
        found = Path(installation.evaluate(f"bagua.net.library.{function}()", "bagua.net.library"))
        assert found.is_absolute()
        assert found.is_file()
        assert found.is_relative_to(installation.site_packages)
    extension = Path(installation.evaluate("bagua.net._core.__file__", "bagua.net._core"))
    assert extension.is_relative_to(installation.site_packages)


def test_editable_install_takes_python_from_the_tree(editable: Installation) -> None:
    origin = Path(editable.evaluate("bagua.__file__", "bagua"))
    assert origin == editable.site_packages.parents[3] / "tree" / "bagua" / "__init__.py"
