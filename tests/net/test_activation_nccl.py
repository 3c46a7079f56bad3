"""Which NCCL there is, and which table each release takes."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.fresh_process import BuildLibrary, BuildNccl

from bagua.net import nccl_library
from bagua.net.nccl_library import find_nccl_libraries, find_torch
from bagua.net.nccl_release import NcclRelease, wheel_release


@pytest.mark.parametrize(
    ("first", "last", "table"),
    [
        ((2, 4, 8), (2, 11, 4), None),
        ((2, 12, 10), (2, 12, 12), 5),
        ((2, 13, 4), (2, 18, 6), 6),
        ((2, 19, 1), (2, 19, 4), 7),
        ((2, 20, 3), (2, 23, 4), 8),
        ((2, 24, 3), (2, 25, 1), 9),
        ((2, 26, 2), (2, 27, 7), 10),
        ((2, 28, 3), (2, 29, 7), 11),
        ((2, 30, 3), (3, 0, 0), 12),
    ],
)
def test_table_of_each_release(first: tuple[int, int, int], last: tuple[int, int, int], table: int | None) -> None:
    assert NcclRelease(*first).table == NcclRelease(*last).table == table


def test_release_from_code_and_text() -> None:
    assert NcclRelease.from_code(2804) == (2, 8, 4)
    assert NcclRelease.from_code(20906) == (2, 9, 6)
    assert NcclRelease.from_code(22809) == (2, 28, 9)
    assert NcclRelease.from_text("2.28.9+cuda12.9") == (2, 28, 9)
    assert NcclRelease.from_text("2.28") == (2, 28, 0)
    assert NcclRelease.from_text("unknown") is None
    assert str(NcclRelease(2, 28, 9)) == "2.28.9"


def test_what_changed_when() -> None:
    assert [NcclRelease(2, minor, 5).takes_path for minor in (20, 21)] == [False, True]
    assert [NcclRelease(2, minor, 5).reads_config_variable for minor in (22, 23)] == [False, True]
    assert [NcclRelease(2, minor, 5).reads_home_variable for minor in (29, 30)] == [False, True]
    assert [NcclRelease(2, minor, 5).is_newer_than_known for minor in (30, 31)] == [False, True]


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A site-packages with the metadata of an NCCL wheel and a torch."""
    site = tmp_path / "site"
    for name in ("nvidia_nccl_cu12-2.28.9.dist-info", "torch-2.10.0+cu128.dist-info", "nvidia/nccl/lib", "torch/lib"):
        (site / name).mkdir(parents=True)
    (site / "torch" / "__init__.py").touch()
    return site


def test_the_wheel_is_known_from_its_metadata(site: Path) -> None:
    assert wheel_release([str(site)]) == ("nvidia-nccl-cu12", NcclRelease(2, 28, 9))
    assert wheel_release([]) is None


def test_torchs_nccl_comes_first(site: Path, tmp_path: Path, build_nccl: BuildNccl) -> None:
    wheel = site / "nvidia/nccl/lib/libnccl.so.2"
    build_nccl(22809).rename(wheel)
    system = build_nccl(21805)
    variables = {"LD_LIBRARY_PATH": f"{tmp_path}/none:{system.parent}"}
    first, second = find_nccl_libraries(variables, [str(site)], [system])
    assert (first.owner, first.path, first.origin) == ("torch", wheel, "nvidia-nccl-cu12 2.28.9")
    assert first.release == (2, 28, 9)
    assert (second.owner, second.path, second.origin) == ("system", system, "LD_LIBRARY_PATH")
    assert second.release == (2, 18, 5)


def test_the_systems_alone(tmp_path: Path, build_nccl: BuildNccl) -> None:
    system = build_nccl(23007)
    (found,) = find_nccl_libraries({}, [str(tmp_path)], [tmp_path / "none", system])
    assert (found.owner, found.release, found.problem) == ("system", (2, 30, 7), "")
    assert find_nccl_libraries({}, [str(tmp_path)], []) == []


def test_a_library_that_does_not_load_is_read_as_text(tmp_path: Path) -> None:
    file = tmp_path / "libnccl.so.2"
    file.write_bytes(b"\0" * 5000 + b"NCCL version 2.21.5 compiled with CUDA")
    (found,) = find_nccl_libraries({}, [], [file])
    assert found.release == (2, 21, 5)
    assert "libnccl.so.2" in found.problem
    file.write_bytes(b"")
    (found,) = find_nccl_libraries({}, [], [file])
    assert found.release is None


def test_a_library_that_crashes_or_hangs(build_library: BuildLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    file = build_library("libnccl.so.2", "int ncclGetVersion(int* v) { __builtin_trap(); return *v; }")
    (found,) = find_nccl_libraries({}, [], [file])
    assert found.release is None
    assert found.problem == "loading it ended with code -4"
    monkeypatch.setattr(nccl_library, "_ASK_TIMEOUT_S", 0.5)
    file = build_library("libnccl.so.2", "int pause(void); int ncclGetVersion(int* v) { pause(); return *v; }")
    (found,) = find_nccl_libraries({}, [], [file])
    assert found.problem == "it did not answer within 0.5 s"


def test_nccl_inside_of_torch(site: Path) -> None:
    cpu = find_torch([str(site)])
    assert cpu is not None
    assert not cpu.has_cuda
    assert find_torch([]) is None
    torch = site / "torch" / "lib" / "libtorch_cuda.so"
    torch.write_bytes(b"code NCCL version 2.27.5+cuda12.9 code")
    assert find_torch([str(site)]) == nccl_library.TorchInstallation(site / "torch", "2.10.0+cu128", has_cuda=True)
    (found,) = find_nccl_libraries({}, [str(site)], [])
    assert (found.owner, found.release, found.origin) == ("torch", (2, 27, 5), "linked into torch 2.10.0+cu128")
