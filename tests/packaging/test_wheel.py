"""What a user gets: the source distribution, the wheel, and both ways to install, outside this tree.

Wheel and editable install are made from the tree in the build folder of `make install`, whose object files they find
up to date: minutes less than compiling again. That the source distribution would give the same wheel follows from its
files, which are compared; `make wheel` builds from it.
"""

from __future__ import annotations

import configparser
import fcntl
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from email.parser import Parser
from pathlib import Path

import pytest
from support.sweeps import rest_is_deep

REPOSITORY = Path(__file__).resolve().parents[2]
SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")
EXTENSION = "bagua/net/_core" + SUFFIX
KERNELS = "bagua/kernels/_minmax_uint8" + SUFFIX
LIBRARY = "bagua/net/lib/libnccl-net.so"
DRIVER = "bagua/net/bin/bagua-net-driver"
COMPILED = {EXTENSION, KERNELS, LIBRARY, DRIVER}
BUILD_DEADLINE_S = 360

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
    """A folder that `make` has filled, in one worker of this run; the others wait for that one. One at a time, since
    they share a build folder."""
    is_worker = "PYTEST_XDIST_WORKER" in os.environ
    base = tmp_path_factory.getbasetemp().parent if is_worker else tmp_path_factory.getbasetemp()
    folder = base / name
    with (base / "packaging.lock").open("w") as lock:
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
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    def make(folder: Path) -> None:
        pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, REPOSITORY)

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

    def make(folder: Path) -> None:
        installation = make_environment(folder / "venv")
        pip("--python", installation.python, "install", "--no-deps", "--no-index", wheel)

    return installation_in(made_once(tmp_path_factory, "installed", make) / "venv")


@pytest.fixture(scope="session")
def editable(tmp_path_factory: pytest.TempPathFactory) -> Installation:
    def make(folder: Path) -> None:
        installation = make_environment(folder / "venv")
        # pip and the build backend come from the environment that runs the tests, but not the bagua that is in it.
        backend = folder / "backend"
        backend.mkdir()
        for entry in Path(sysconfig.get_path("purelib")).iterdir():
            if "bagua" not in entry.name and entry.suffix != ".pth":
                (backend / entry.name).symlink_to(entry)
        (installation.site_packages / "backend.pth").write_text(f"{backend}\n")
        options = ["--no-deps", "--no-index", "--no-build-isolation"]
        pip("install", *options, "--editable", REPOSITORY, python=installation.python)

    return installation_in(made_once(tmp_path_factory, "editable", make) / "venv")


# --- the source distribution -----------------------------------------------------------------------------------------


@pytest.mark.deep
def test_source_distribution_has_the_sources_and_nothing_built(source_distribution: Path) -> None:
    with tarfile.open(source_distribution) as archive:
        files = {
            member.name.partition("/")[2]: archive.extractfile(member).read()  # type: ignore[union-attr]
            for member in archive.getmembers()
            if member.isfile()
        }
    names = set(files)
    for folder in ("net_plugin", "third_party", "bagua", "tools"):
        for path in (REPOSITORY / folder).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                assert files[str(path.relative_to(REPOSITORY))] == path.read_bytes()
    for needed in ("CMakeLists.txt", "pyproject.toml", "README.md", "LICENSE"):
        assert files[needed] == (REPOSITORY / needed).read_bytes()
    unwanted = re.compile(r"^(build|\.venv|\.git|dist)(/|$)|\.(so|o|a|whl|pyc)$|(^|/)(__pycache__|\.\w+_cache)(/|$)")
    assert sorted(name for name in names if unwanted.search(name)) == []


# --- the wheel -------------------------------------------------------------------------------------------------------


def test_wheel_holds_exactly_what_is_meant(wheel: Path) -> None:
    info = f"bagua-{wheel.name.split('-')[1]}.dist-info"
    metadata = {f"{info}/{name}" for name in ("METADATA", "WHEEL", "RECORD", "entry_points.txt")}
    licenses = ("libsodium/LICENSE", "libsodium/LICENSE.sha256", "boringssl/LICENSE")
    metadata |= {f"{info}/licenses/LICENSE", *(f"{info}/licenses/third_party/{name}" for name in licenses)}
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if not name.endswith("/")}
    # The package with the old name stands beside bagua in the wheel.
    own = source_files("*.py") | source_files("*.pyi")
    sources = {name.removeprefix("bagua/lightning/") if "/lightning_bagua/" in name else name for name in own}
    assert names == sources | {"bagua/py.typed", "bagua/_version.py"} | COMPILED | metadata


def test_wheel_is_for_this_python_and_this_machine(wheel: Path) -> None:
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    assert f"-{tag}-{tag}-linux_" in wheel.name or f"-{tag}-{tag}-manylinux" in wheel.name


def test_metadata(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = Parser().parsestr(archive.read(name).decode())
    assert metadata["Name"] == "bagua"
    assert metadata["License-Expression"] == "MIT AND ISC AND BSD-2-Clause AND Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.11"
    required = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert required == [], "the plugin must install beside any torch, and without one"


def test_entry_points_name_things_that_exist(wheel: Path, installed: Installation) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith("entry_points.txt")]
        groups = configparser.ConfigParser()
        groups.optionxform = str  # type: ignore[assignment,method-assign]
        groups.read_string(archive.read(name).decode())
    assert set(groups["console_scripts"]) == {"bagua", "bagua-net", "bagua-net-bench", "baguarun"}
    assert dict(groups["torch.backends"]) == {
        "bagua_net": "bagua.net.autoload:autoload",
        "bagua_lightning": "bagua.lightning_name:install",
    }
    for target in [*groups["console_scripts"].values(), *groups["torch.backends"].values()]:
        module, _, function = target.partition(":")
        assert installed.evaluate(f"callable({module}.{function})", module) == "True"


@pytest.mark.parametrize("command", ["bagua", "bagua-net", "bagua-net-bench", "baguarun"])
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
    source = REPOSITORY / "tests" / "cpp" / "abi" / "dlopen_plain.c"
    run(compiler, "-std=c11", "-Wall", "-Wextra", "-Werror", source, "-o", program, "-ldl")
    run(program, installed.site_packages / LIBRARY, cwd=tmp_path)


# --- one version -----------------------------------------------------------------------------------------------------


def test_version_is_the_same_everywhere(wheel: Path, installed: Installation) -> None:
    versions = {
        "name of the wheel": wheel.name.split("-")[1],
        "bagua.__version__": installed.evaluate("bagua.__version__", "bagua"),
        "metadata": installed.evaluate("importlib.metadata.version('bagua')", "importlib.metadata"),
        "compiled library": installed.evaluate("bagua.net._core.version()", "bagua.net._core"),
        "bagua-net --version": run(installed.script("bagua-net"), "--version").split()[-1],
    }
    assert len(set(versions.values())) == 1, versions


def test_lightning_bagua_has_no_module_and_needs_this_version(tmp_path: Path) -> None:
    specification = importlib.util.spec_from_file_location("build_wheels", REPOSITORY / "tools/release/build_wheels.py")
    assert specification is not None
    assert specification.loader is not None
    build_wheels = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(build_wheels)
    wheel = build_wheels.build_lightning_wheel(Path("bagua-1.2.3.dev4+gabc.tar.gz"), tmp_path)
    with zipfile.ZipFile(wheel) as archive:
        assert [name for name in archive.namelist() if "dist-info" not in name] == []
        (metadata,) = (archive.read(name).decode() for name in archive.namelist() if name.endswith("/METADATA"))
    assert "Version: 1.2.3.dev4+gabc\nSummary" in metadata
    assert "Requires-Dist: bagua[lightning]==1.2.3.dev4+gabc" in metadata


def git(folder: Path, *arguments: str) -> str:
    settings = ("-c", "user.name=Tester", "-c", "user.email=tester@example.com")
    return run("git", *settings, *arguments, cwd=folder, GIT_CONFIG_GLOBAL="/dev/null").strip()


def test_version_comes_from_the_tag(tmp_path: Path) -> None:
    specification = importlib.util.spec_from_file_location("git_version", REPOSITORY / "tools/release/git_version.py")
    assert specification is not None
    assert specification.loader is not None
    git_version = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(git_version)

    assert git_version.version_of(tmp_path, "1.0.0") == "1.0.0.dev0+unknown"
    git(tmp_path, "init", "--quiet")
    (tmp_path / "file").write_text("one")
    git(tmp_path, "add", "file")
    git(tmp_path, "commit", "--quiet", "--message", "one")
    commit = git(tmp_path, "rev-parse", "--short=8", "HEAD")
    assert git_version.version_of(tmp_path, "1.0.0") == f"1.0.0.dev1+g{commit}"
    git(tmp_path, "tag", "v1.2.0rc1")
    assert git_version.version_of(tmp_path, "1.0.0") == "1.2.0rc1"
    (tmp_path / "file").write_text("two")
    assert re.fullmatch(r"1\.2\.0\.dev0\+g\w+\.dirty", git_version.version_of(tmp_path, "1.0.0"))
    git(tmp_path, "commit", "--quiet", "--all", "--message", "two")
    assert re.fullmatch(r"1\.2\.0\.dev1\+g\w+", git_version.version_of(tmp_path, "1.0.0"))
    git(tmp_path, "tag", "v1.2.0")
    assert git_version.version_of(tmp_path, "1.0.0") == "1.2.0"
    git(tmp_path, "commit", "--quiet", "--allow-empty", "--message", "three")
    assert re.fullmatch(r"1\.2\.1\.dev1\+g\w+", git_version.version_of(tmp_path, "1.0.0"))
    (tmp_path / "folder").mkdir()
    assert git_version.version_of(tmp_path / "folder", "1.0.0") == "1.0.0.dev0+unknown", "of another project"
    git(tmp_path, "tag", "v9.1")
    with pytest.raises(ValueError, match=r"tag 'v9\.1' is not a version; release tags are"):
        git_version.version_of(tmp_path, "1.0.0")
    (tmp_path / "PKG-INFO").write_text("Metadata-Version: 2.4\nName: bagua\nVersion: 3.1.4\n")
    assert git_version.version_of(tmp_path, "1.0.0") == "3.1.4"


# --- installed and editable alike ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", rest_is_deep(["installed", "editable"], 0))
def test_installation_finds_its_compiled_files(kind: str, request: pytest.FixtureRequest) -> None:
    installation: Installation = request.getfixturevalue(kind)
    for function in ("library_path", "driver_path"):
        found = Path(installation.evaluate(f"bagua.net.library.{function}()", "bagua.net.library"))
        assert found.is_absolute()
        assert found.is_file()
        assert found.is_relative_to(installation.site_packages)
    extension = Path(installation.evaluate("bagua.net._core.__file__", "bagua.net._core"))
    assert extension.is_relative_to(installation.site_packages)


@pytest.mark.deep
def test_editable_install_takes_python_from_the_tree(editable: Installation) -> None:
    origin = Path(editable.evaluate("bagua.__file__", "bagua"))
    assert origin == REPOSITORY / "bagua" / "__init__.py"
