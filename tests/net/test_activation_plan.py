"""What activation decides, for machines and environments made up here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from bagua.env import EnvironmentValueError, read_number, read_switch
from bagua.net import rdma
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
def library(tmp_path: Path) -> Path:
    path = tmp_path / "site-packages" / "lib" / "libnccl-net.so"
    path.parent.mkdir(parents=True)
    path.touch()
    return path


@pytest.fixture
def here(library: Path) -> Surroundings:
    return Surroundings(library)


def in_process(variables: Mapping[str, str], here: Surroundings) -> ActivationResult:
    return plan(variables, Target.THIS_PROCESS, here)


def in_new_process(variables: Mapping[str, str], here: Surroundings) -> ActivationResult:
    return plan(variables, Target.NEW_PROCESS, here)


@pytest.mark.parametrize("value", ["1", "true", "YES", " on "])
def test_spellings_of_yes(value: str, here: Surroundings) -> None:
    assert in_process({"ENABLE_BAGUA_NET": value}, here).state is ActivationState.ACTIVE


@pytest.mark.parametrize("value", ["0", "false", "No", " off"])
def test_spellings_of_no(value: str, here: Surroundings) -> None:
    result = in_process({"ENABLE_BAGUA_NET": value, "BAGUA_NET_REQUIRED": "1"}, here)
    assert result == ActivationResult(ActivationState.OFF)


@pytest.mark.parametrize("variables", [{}, {"ENABLE_BAGUA_NET": ""}, {"ENABLE_BAGUA_NET": "  "}])
def test_nothing_is_even_looked_at_unless_asked(variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Surroundings, "of_this_host", lambda *_: pytest.fail("looked around"))
    assert plan(variables, Target.THIS_PROCESS) == ActivationResult(ActivationState.NOT_ASKED)


@pytest.mark.parametrize("name", ["ENABLE_BAGUA_NET", "BAGUA_NET_REQUIRED"])
def test_a_bad_value_is_named(name: str, here: Surroundings) -> None:
    with pytest.raises(EnvironmentValueError, match=f"^{name}=2: must be 1, true, yes or on, or else 0"):
        in_process({**_ASKED, name: "2"}, here)


def test_in_this_process_only_the_path_is_set(here: Surroundings) -> None:
    assert in_process(_ASKED, here).changes == {"NCCL_NET_PLUGIN": str(here.library)}


def test_a_new_process_gets_the_library_path_too(here: Surroundings) -> None:
    folder = str(here.library.parent)
    expected = {"NCCL_NET_PLUGIN": str(here.library), "ENABLE_BAGUA_NET": "1", "LD_LIBRARY_PATH": folder}
    assert in_new_process({}, here).changes == expected
    before = in_new_process({**_ASKED, "LD_LIBRARY_PATH": "/a:/b"}, here).changes
    assert before["LD_LIBRARY_PATH"] == f"{folder}:/a:/b"
    assert "ENABLE_BAGUA_NET" not in before


def test_planning_again_changes_nothing(here: Surroundings) -> None:
    for target in (Target.NEW_PROCESS, Target.NEW_PROCESS_BY_NAME):
        variables = dict(plan({"LD_LIBRARY_PATH": "/a"}, target, here).changes)
        again = replace(here, loader_path=tuple(map(Path, variables["LD_LIBRARY_PATH"].split(":"))))
        assert plan(variables, target, again).changes == {}
        assert in_process(variables, again).changes == {}
        assert in_process(variables, again).state is ActivationState.ACTIVE


def test_by_name_sets_no_path(here: Surroundings) -> None:
    changes = plan({}, Target.NEW_PROCESS_BY_NAME, here).changes
    assert changes == {"ENABLE_BAGUA_NET": "1", "LD_LIBRARY_PATH": str(here.library.parent)}


def test_an_old_nccl_of_torch_is_served_by_name(here: Surroundings) -> None:
    changes = in_new_process({}, replace(here, torch_nccl=_OLD_NCCL)).changes
    assert changes == {"ENABLE_BAGUA_NET": "1", "LD_LIBRARY_PATH": str(here.library.parent)}


def test_an_old_nccl_cannot_be_served_in_a_running_process(here: Surroundings) -> None:
    with pytest.raises(
        ActivationError, match=r"^NCCL 2\.20\.5 \(nvidia-nccl-cu12\) finds plugins only .*\nStart the job"
    ):
        in_process(_ASKED, replace(here, torch_nccl=_OLD_NCCL))


def test_an_old_nccl_that_finds_us_by_name_is_left_alone(here: Surroundings) -> None:
    surroundings = replace(here, torch_nccl=_OLD_NCCL, loader_path=(here.library.parent,))
    assert in_process(_ASKED, surroundings) == ActivationResult(ActivationState.ACTIVE, {}, here.library)


def test_somebody_elses_library_first_in_the_path(here: Surroundings, tmp_path: Path) -> None:
    (tmp_path / "libnccl-net.so").touch()
    path = (tmp_path, here.library.parent)
    variables = {"LD_LIBRARY_PATH": ":".join(map(str, path))}
    changes = in_new_process(variables, replace(here, loader_path=path)).changes
    assert changes["LD_LIBRARY_PATH"] == f"{here.library.parent}:{variables['LD_LIBRARY_PATH']}"
    assert in_process(_ASKED, replace(here, loader_path=path)).changes == {"NCCL_NET_PLUGIN": str(here.library)}


@pytest.mark.parametrize("value", ["ofi", "none", "", "/elsewhere/libnccl-net.so", "libnccl-net.so"])
def test_another_plugin_is_kept(value: str, here: Surroundings) -> None:
    for result in (
        in_process({**_ASKED, "NCCL_NET_PLUGIN": value}, here),
        in_new_process({"NCCL_NET_PLUGIN": value}, here),
    ):
        assert result.state is ActivationState.KEPT
        assert result.kept == (KeptSetting("NCCL_NET_PLUGIN", value, "the environment"),)
        assert result.changes == {}
        (warning,) = result.warnings
        assert warning.startswith(f"NCCL_NET_PLUGIN={value} (set in the environment) is kept: NCCL loads it instead of")
        assert warning.endswith("\nTo use the plugin of this installation, unset NCCL_NET_PLUGIN.")


def test_another_build_of_ours_may_be_required(here: Surroundings) -> None:
    """NCCL then checks the name of what it loads."""
    result = in_process({"BAGUA_NET_REQUIRED": "1", "NCCL_NET_PLUGIN": "/build/libnccl-net.so"}, here)
    assert result.changes == {"NCCL_NET": "BaguaNet"}


@pytest.mark.parametrize("make", ["{0}", "ofi,{0}", "libnccl-net.so", "{0}/../libnccl-net.so"])
def test_values_that_name_our_library(make: str, here: Surroundings) -> None:
    value = make.format(here.library if "/.." not in make else here.library.parent)
    if value.startswith(str(here.library.parent) + "/.."):
        value = f"{here.library.parent}/../lib/libnccl-net.so"
    surroundings = replace(here, loader_path=(here.library.parent,))
    result = in_process({**_ASKED, "NCCL_NET_PLUGIN": value}, surroundings)
    assert result == ActivationResult(ActivationState.ACTIVE, {}, here.library)


def test_a_suffix_that_leads_to_our_library(here: Surroundings) -> None:
    (here.library.parent / "libnccl-net-bagua.so").symlink_to(here.library)
    surroundings = replace(here, loader_path=(here.library.parent,))
    assert in_process({**_ASKED, "NCCL_NET_PLUGIN": "bagua"}, surroundings).state is ActivationState.ACTIVE


@pytest.mark.parametrize("name", ["Socket", "IB", "", "AWS Libfabric"])
def test_another_transport_is_kept(name: str, here: Surroundings) -> None:
    result = in_process({**_ASKED, "NCCL_NET": name}, here)
    assert result.state is ActivationState.KEPT
    assert result.changes == {}
    (warning,) = result.warnings
    assert warning.startswith(f"NCCL_NET={name} (set in the environment) is kept: NCCL does not use the plugin\nTo use")


@pytest.mark.parametrize("name", ["BaguaNet", "baguanet", "BAGUANET"])
def test_our_own_name_is_no_conflict(name: str, here: Surroundings) -> None:
    """NCCL compares names without regard to case."""
    result = in_process({**_ASKED, "NCCL_NET": name, "BAGUA_NET_REQUIRED": "1"}, here)
    assert result.changes == {"NCCL_NET_PLUGIN": str(here.library)}


def test_required_sets_the_name(here: Surroundings) -> None:
    expected = {"NCCL_NET_PLUGIN": str(here.library), "NCCL_NET": "BaguaNet"}
    assert in_process({"BAGUA_NET_REQUIRED": "yes"}, here).changes == expected


def test_required_and_another_transport_contradict(here: Surroundings) -> None:
    with pytest.raises(ActivationError, match=r"^BAGUA_NET_REQUIRED=1, but NCCL_NET=Socket .* is kept"):
        in_process({"BAGUA_NET_REQUIRED": "1", "NCCL_NET": "Socket"}, here)


def test_configuration_files_count_as_the_users_own(here: Surroundings) -> None:
    file = Path("/etc/nccl.conf")
    net = ConfigSetting("NCCL_NET", "Socket", file)
    plugin = ConfigSetting("NCCL_NET_PLUGIN", "ofi", file)
    ours = ConfigSetting("NCCL_NET_PLUGIN", str(here.library), file)
    (kept,) = in_process(_ASKED, replace(here, config=(net,))).kept
    assert kept == KeptSetting("NCCL_NET", "Socket", "/etc/nccl.conf")
    (kept,) = in_process(_ASKED, replace(here, config=(plugin,))).kept
    assert kept == KeptSetting("NCCL_NET_PLUGIN", "ofi", "/etc/nccl.conf")
    assert in_process(_ASKED, replace(here, config=(ours,))).state is ActivationState.ACTIVE
    # The environment wins over the files.
    chosen = {**_ASKED, "NCCL_NET": "BaguaNet"}
    assert in_process(chosen, replace(here, config=(net,))).state is ActivationState.ACTIVE


def test_rdma_is_warned_about(here: Surroundings) -> None:
    with_rdma = replace(here, rdma_ports=(rdma.RdmaPort("mlx5_0", "1", "400 Gb/sec (4X NDR)"),))
    (warning,) = in_process(_ASKED, with_rdma).warnings
    assert warning.startswith("this host has an RDMA network, mlx5_0:1 (400 Gb/sec (4X NDR)), which Bagua-Net replaces")
    assert "ENABLE_BAGUA_NET=0 to keep it, or NCCL_IB_DISABLE=1" in warning
    assert in_process({**_ASKED, "NCCL_IB_DISABLE": "0"}, with_rdma).warnings == (warning,)
    assert in_process({**_ASKED, "NCCL_IB_DISABLE": "1"}, with_rdma).warnings == ()
    disabled = ConfigSetting("NCCL_IB_DISABLE", "1", Path("/etc/nccl.conf"))
    assert in_process(_ASKED, replace(with_rdma, config=(disabled,))).warnings == ()


def test_a_new_process_is_told_that_the_plugin_is_off(here: Surroundings) -> None:
    result = in_new_process({"ENABLE_BAGUA_NET": "0"}, here)
    assert (result.state, result.changes) == (ActivationState.OFF, {})
    assert result.warnings[0].startswith(
        "ENABLE_BAGUA_NET=0 is set: NCCL uses its own transport\nTo use the plugin, set it to 1"
    )


def test_a_path_that_nccl_would_cut(tmp_path: Path) -> None:
    long = Surroundings(tmp_path / ("d" * 250) / "libnccl-net.so")
    with pytest.raises(PluginPathError, match=r"is \d+ bytes long; NCCL reads at most 254\nInstall bagua"):
        in_process(_ASKED, long)
    with pytest.raises(PluginPathError, match="contains a comma, where NCCL would cut it\nInstall bagua in another"):
        in_process(_ASKED, Surroundings(Path("/opt/a,b/libnccl-net.so")))
    with pytest.raises(PluginPathError, match="contains a line feed"):
        in_process(_ASKED, Surroundings(Path("/opt/a\nb/libnccl-net.so")))
    assert plan({}, Target.NEW_PROCESS_BY_NAME, long).state is ActivationState.ACTIVE


def test_switches_and_numbers_are_read_as_the_library_does() -> None:
    assert read_switch({"A": "\ton\n"}, "A") is True
    assert read_switch({"A": "OFF"}, "A") is False
    assert read_switch({"A": " "}, "A") is None
    with pytest.raises(EnvironmentValueError, match=r"^A=10: must be"):
        read_switch({"A": "10"}, "A")
    assert [read_number({"A": value}, "A", 7) for value in ("0x10", "-1", "none", "", " 3 ")] == [16, -1, 7, 7, 3]
