"""What activation decides, for machines and environments made up here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from bagua.env import EnvironmentValueError, read_switch
from bagua.net.activation import (
    ActivationError,
    ActivationResult,
    ActivationState,
    KeptSetting,
    Surroundings,
    Target,
    plan,
)
from bagua.net.nccl_config_file import ConfigSetting
from bagua.net.nccl_release import NcclRelease
from bagua.net.plugin_setting import PluginPathError

_ASKED = {"ENABLE_BAGUA_NET": "1"}
_OLD_NCCL = ("nvidia-nccl-cu12", NcclRelease(2, 20, 5))


@pytest.fixture
def here(tmp_path: Path) -> Surroundings:
    library = tmp_path / "site-packages" / "lib" / "libnccl-net.so"
    library.parent.mkdir(parents=True)
    library.touch()
    return Surroundings(library)


def in_process(variables: Mapping[str, str], here: Surroundings) -> ActivationResult:
    return plan(variables, Target.THIS_PROCESS, here)


def in_new_process(variables: Mapping[str, str], here: Surroundings) -> ActivationResult:
    return plan(variables, Target.NEW_PROCESS, here)


def test_switches_are_read_as_the_library_does(here: Surroundings) -> None:
    for value in ("1", "true", "YES", " on ", "\ton\n"):
        assert read_switch({"A": value}, "A") is True
        assert in_process({"ENABLE_BAGUA_NET": value}, here).state is ActivationState.ACTIVE
    for value in ("0", "false", "No", " off"):
        assert read_switch({"A": value}, "A") is False
        off = in_process({"ENABLE_BAGUA_NET": value, "BAGUA_NET_REQUIRED": "1"}, here)
        assert off == ActivationResult(ActivationState.OFF)
    assert read_switch({"A": " "}, "A") is None
    for name in ("ENABLE_BAGUA_NET", "BAGUA_NET_REQUIRED"):
        with pytest.raises(EnvironmentValueError, match=f"^{name}=10: must be 1, true, yes or on, or else 0"):
            in_process({**_ASKED, name: "10"}, here)


@pytest.mark.parametrize("variables", [{}, {"ENABLE_BAGUA_NET": ""}, {"ENABLE_BAGUA_NET": "  "}])
def test_nothing_is_even_looked_at_unless_asked(variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Surroundings, "of_this_host", lambda *_: pytest.fail("looked around"))
    assert plan(variables, Target.THIS_PROCESS) == ActivationResult(ActivationState.NOT_ASKED)


def test_which_variables_are_set(here: Surroundings) -> None:
    path, folder = str(here.library), str(here.library.parent)
    assert in_process(_ASKED, here).changes == {"NCCL_NET_PLUGIN": path}
    required = {"NCCL_NET_PLUGIN": path, "NCCL_NET": "BaguaNet"}
    assert in_process({"BAGUA_NET_REQUIRED": "yes"}, here).changes == required
    assert in_process({"BAGUA_NET_ENCRYPTION": "chacha20"}, here).changes == required
    assert in_process({"BAGUA_NET_ENCRYPTION": "0"}, here).state is ActivationState.NOT_ASKED
    # A new process gets the library path too, and by name nothing else.
    by_name = {"ENABLE_BAGUA_NET": "1", "LD_LIBRARY_PATH": folder}
    assert in_new_process({}, here).changes == {"NCCL_NET_PLUGIN": path, **by_name}
    assert plan({}, Target.NEW_PROCESS_BY_NAME, here).changes == by_name
    assert in_new_process({}, replace(here, torch_nccl=_OLD_NCCL)).changes == by_name
    before = in_new_process({**_ASKED, "LD_LIBRARY_PATH": "/a:/b"}, here).changes
    assert before == {"NCCL_NET_PLUGIN": path, "LD_LIBRARY_PATH": f"{folder}:/a:/b"}


def test_planning_again_changes_nothing(here: Surroundings) -> None:
    for target in (Target.NEW_PROCESS, Target.NEW_PROCESS_BY_NAME):
        variables = dict(plan({"LD_LIBRARY_PATH": "/a"}, target, here).changes)
        again = replace(here, loader_path=tuple(map(Path, variables["LD_LIBRARY_PATH"].split(":"))))
        assert plan(variables, target, again).changes == {}
        assert in_process(variables, again).changes == {}
        assert in_process(variables, again).state is ActivationState.ACTIVE


def test_an_old_nccl_in_a_running_process(here: Surroundings) -> None:
    """It finds plugins by name alone, and the loader's path was read when the process began."""
    with pytest.raises(
        ActivationError, match=r"^NCCL 2\.20\.5 \(nvidia-nccl-cu12\) finds plugins only .*\nStart the job"
    ):
        in_process(_ASKED, replace(here, torch_nccl=_OLD_NCCL))
    found = replace(here, torch_nccl=_OLD_NCCL, loader_path=(here.library.parent,))
    assert in_process(_ASKED, found) == ActivationResult(ActivationState.ACTIVE, {}, here.library)


def test_somebody_elses_library_first_in_the_path(here: Surroundings, tmp_path: Path) -> None:
    (tmp_path / "libnccl-net.so").touch()
    path = (tmp_path, here.library.parent)
    variables = {"LD_LIBRARY_PATH": ":".join(map(str, path))}
    changes = in_new_process(variables, replace(here, loader_path=path)).changes
    assert changes["LD_LIBRARY_PATH"] == f"{here.library.parent}:{variables['LD_LIBRARY_PATH']}"
    assert in_process(_ASKED, replace(here, loader_path=path)).changes == {"NCCL_NET_PLUGIN": str(here.library)}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("NCCL_NET_PLUGIN", value) for value in ("ofi", "none", "", "/elsewhere/libnccl-net.so", "libnccl-net.so")),
        *(("NCCL_NET", value) for value in ("Socket", "IB", "", "AWS Libfabric")),
    ],
)
def test_the_users_choice_is_kept(name: str, value: str, here: Surroundings) -> None:
    """In the environment or in a configuration file."""
    file = Path("/etc/nccl.conf")
    for result, place in (
        (in_process({**_ASKED, name: value}, here), "the environment"),
        (in_new_process({name: value}, here), "the environment"),
        (in_process(_ASKED, replace(here, config=(ConfigSetting(name, value, file),))), str(file)),
    ):
        assert result.state is ActivationState.KEPT
        assert result.kept == (KeptSetting(name, value, place),)
        assert result.changes == {}
        (warning,) = result.warnings
        assert warning.startswith(f"{name}={value} (set in {place}) is kept: NCCL ")
        assert "\nTo use" in warning


def test_required_and_another_transport_contradict(here: Surroundings) -> None:
    with pytest.raises(ActivationError, match=r"^BAGUA_NET_REQUIRED=1, but NCCL_NET=Socket .* is kept"):
        in_process({"BAGUA_NET_REQUIRED": "1", "NCCL_NET": "Socket"}, here)
    with pytest.raises(ActivationError, match=r"^BAGUA_NET_ENCRYPTION=1, but NCCL_NET=Socket .* is kept"):
        in_process({**_ASKED, "BAGUA_NET_ENCRYPTION": "1", "NCCL_NET": "Socket"}, here)
    assert in_process({**_ASKED, "BAGUA_NET_ENCRYPTION": "0", "NCCL_NET": "Socket"}, here).state is ActivationState.KEPT
    # Another build of ours may be: NCCL then checks the name of what it loads.
    result = in_process({"BAGUA_NET_REQUIRED": "1", "NCCL_NET_PLUGIN": "/build/libnccl-net.so"}, here)
    assert result.changes == {"NCCL_NET": "BaguaNet"}


@pytest.mark.parametrize("form", ["{0}", "ofi,{0}", "libnccl-net.so", "{1}/../lib/libnccl-net.so", "bagua"])
def test_values_that_name_our_library(form: str, here: Surroundings) -> None:
    """By a path, by its name, and by a suffix that leads to it."""
    (here.library.parent / "libnccl-net-bagua.so").symlink_to(here.library)
    value = form.format(here.library, here.library.parent)
    surroundings = replace(here, loader_path=(here.library.parent,))
    active = ActivationResult(ActivationState.ACTIVE, {}, here.library)
    assert in_process({**_ASKED, "NCCL_NET_PLUGIN": value}, surroundings) == active
    config = replace(surroundings, config=(ConfigSetting("NCCL_NET_PLUGIN", value, Path("/etc/nccl.conf")),))
    assert in_process(_ASKED, config).state is ActivationState.ACTIVE


@pytest.mark.parametrize("name", ["BaguaNet", "baguanet", "BAGUANET"])
def test_our_own_name_is_no_conflict(name: str, here: Surroundings) -> None:
    """NCCL compares names without regard to case. The environment wins over the files."""
    variables = {**_ASKED, "NCCL_NET": name, "BAGUA_NET_REQUIRED": "1"}
    other = replace(here, config=(ConfigSetting("NCCL_NET", "Socket", Path("/etc/nccl.conf")),))
    for surroundings in (here, other):
        assert in_process(variables, surroundings).changes == {"NCCL_NET_PLUGIN": str(here.library)}


def test_a_path_that_nccl_would_cut(tmp_path: Path) -> None:
    long = Surroundings(tmp_path / ("d" * 250) / "libnccl-net.so")
    with pytest.raises(PluginPathError, match=r"is \d+ bytes long; NCCL reads at most 254\nInstall bagua"):
        in_process(_ASKED, long)
    with pytest.raises(PluginPathError, match="contains a comma, where NCCL would cut it\nInstall bagua in another"):
        in_process(_ASKED, Surroundings(Path("/opt/a,b/libnccl-net.so")))
    with pytest.raises(PluginPathError, match="contains a line feed"):
        in_process(_ASKED, Surroundings(Path("/opt/a\nb/libnccl-net.so")))
    assert plan({}, Target.NEW_PROCESS_BY_NAME, long).state is ActivationState.ACTIVE
