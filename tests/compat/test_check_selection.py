"""`make check`: from changed files to tests, on this tree; and which files count as changed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from support.git_repository import Repository
from support.import_arrows import REPOSITORY, differences_of_rows

_TOOLS = str(REPOSITORY / "tools")
if _TOOLS not in sys.path:
    sys.path.append(_TOOLS)  # behind everything else: `tools` holds programs, not an installed package

from check import selection  # noqa: E402
from check.__main__ import changed_since, test_commands  # noqa: E402
from check.lines import LINES  # noqa: E402

from bagua.net.bench.errors import BenchError  # noqa: E402

commands_of = test_commands  # pytest would collect it by its name
del test_commands

TRAINING = "tests/distributed/test_wrapper.py"
SCREEN = "tests/net/test_top.py"
ARROWS = "tests/compat/test_imports.py"
CACHES = "tests/contrib/test_cache_codec.py"
CHECKPOINTS = "tests/contrib/test_checkpoint.py"


@pytest.fixture(scope="module")
def arrows() -> selection.Arrows:
    return selection.Arrows()


@pytest.mark.parametrize(
    ("changed", "selected", "left_out"),
    [
        pytest.param(
            "bagua/engine/bucket.py",
            {TRAINING, ARROWS, CHECKPOINTS, "tests/unit/test_comm_scheduler.py", "tests/judges/test_torch_ddp.py"},
            {SCREEN, CACHES, "tests/kernels/test_minmax_uint8_launch.py", "tests/unit/test_host_port.py", "wire_test"},
            id="engine",
        ),
        pytest.param(
            "net_plugin/wire/frames.cc",
            {SCREEN, ARROWS, "tests/net/test_plugin_faults.py", "wire_test", "comm_test", "abi_scenario_test"},
            {TRAINING, "tests/codecs/test_codecs.py", "ring_schedule_test", "rate_estimator_test"},
            id="wire",
        ),
        pytest.param(
            "docs/how-to/trace.md",
            {"tests/unit/test_docs.py", "tests/distributed/test_page_programs.py"},
            {TRAINING, SCREEN, ARROWS, "wire_test"},
            id="page",
        ),
        pytest.param(
            "bagua/net/top/app.py", {SCREEN, ARROWS}, {TRAINING, "wire_test"}, id="net, which core does not know"
        ),
        pytest.param(
            "bagua/net/activation/plan.py",
            {SCREEN, TRAINING, "tests/kernels/test_minmax_uint8.py"},
            {"wire_test"},
            id="net, at each import of bagua",
        ),
        pytest.param(
            "bagua/contrib/caching/codec.py",
            {CACHES, ARROWS, "tests/distributed/test_cache_example.py", "tests/docs/test_api_pages.py"},
            {TRAINING, SCREEN, "tests/judges/test_torch_ddp.py", "tests/contrib/test_fuse_memory.py"},
            id="contrib, which the core does not know",
        ),
        pytest.param("bagua/kernels/csrc/lanes.h", {TRAINING, "tests/codecs/test_codecs.py"}, {SCREEN}, id="kernels"),
        pytest.param("bagua/engine/no_more.py", {TRAINING, ARROWS}, {SCREEN}, id="deleted module"),
        pytest.param("tools/netlab/lab.py", {"tests/net/test_netlab.py"}, {SCREEN, TRAINING}, id="tool"),
        pytest.param(
            "tools/bench/ring_schedule.cc", {SCREEN, "ring_schedule_test"}, {TRAINING, "wire_test"}, id="driver"
        ),
        pytest.param("tests/net/test_top.py", {SCREEN}, {ARROWS, "tests/net/test_cli.py"}, id="test"),
        pytest.param("tests/net/conftest.py", {SCREEN, "tests/net/test_cli.py"}, {TRAINING}, id="fixtures"),
        pytest.param("tests/net/test_no_more.py", set(), {SCREEN}, id="deleted test"),
    ],
)
def test_a_change_selects_what_it_reaches(
    arrows: selection.Arrows, changed: str, selected: set[str], left_out: set[str]
) -> None:
    found = selection.select([changed], arrows)
    names = {*found.tests, *found.cpp_tests}
    assert not found.everything
    assert selected - names == set()
    assert left_out & names == set()


@pytest.mark.parametrize(
    "changed",
    [
        *("Makefile", "constraints.txt", "pyproject.toml", "CMakeLists.txt", "net_plugin/CMakeLists.txt", ".ci/run"),
        *(
            "bagua/job/presence.py",
            "bagua/collectives/reduce_op.py",
            "bagua/net/autoload.py",
            "bagua/env.py",
            "third_party/libsodium/LICENSE",
        ),
        *("tests/conftest.py", "tests/support/ranks.py", "some/new/file"),
    ],
)
def test_what_all_stand_on_runs_everything(arrows: selection.Arrows, changed: str) -> None:
    found = selection.select([changed], arrows)
    assert found.everything
    assert found.reasons == [f"{changed} -> everything"]
    assert not any(word.startswith("tests/") for command in commands_of(found, []) for word in command)


def test_each_folder_of_tests_has_a_line() -> None:
    tests = REPOSITORY / "tests"
    folders = {path.name for path in tests.iterdir() if path.is_dir() and any(path.rglob("test_*.py"))}
    assert differences_of_rows("LINES", {name: set() for name in LINES if "/" not in name}, folders) == []
    assert [name for name in LINES if not (tests / name).exists()] == []


def test_each_line_names_something(arrows: selection.Arrows) -> None:
    patterns = {pattern for line in LINES.values() for pattern in line}
    assert [pattern for pattern in patterns if not arrows.matching([pattern])] == []


def test_a_folder_without_a_line_is_an_error(arrows: selection.Arrows, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(LINES, "kernels")
    with pytest.raises(ValueError, match=r"tests/kernels has no line in tools/check/lines.py\nSay there"):
        selection.select(["bagua/engine/bucket.py"], arrows)


def test_changed_are_committed_and_other_files_of_the_tree(tmp_path: Path) -> None:
    repository = Repository(tmp_path / "repository")
    for name in ("same", "edited", "committed", "deleted", "old name"):
        (repository.root / name).write_text(f"{name}\n" * 20)
    (repository.root / ".gitignore").write_text("ignored\n")
    repository.git("add", ".")
    repository.git("commit", "--quiet", "--message", "first")
    base = repository.git("rev-parse", "HEAD").strip()
    (repository.root / "committed").write_text("again")
    repository.git("commit", "--quiet", "--all", "--message", "second")
    repository.git("mv", "old name", "new näme")
    (repository.root / "edited").write_text("again")
    (repository.root / "deleted").unlink()
    (repository.root / "untracked").touch()
    (repository.root / "ignored").touch()
    changed = ["committed", "deleted", "edited", "new näme", "old name", "untracked"]
    assert changed_since(repository.root, base) == changed
    assert changed_since(repository.root, "HEAD~1") == changed
    for wrong in ("", "no-such-branch", "-x"):
        with pytest.raises(BenchError, match=rf"BASE is '{wrong}', which names no commit .*\n.*make check BASE=main"):
            changed_since(repository.root, wrong)
