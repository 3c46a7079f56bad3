"""Which environment makes which backend, and what a wrong spelling is answered with."""

from __future__ import annotations

from pathlib import Path

import pytest

from bagua.net.bench.nccl_ab.backend import (
    BEST_TUNED,
    bagua_net,
    bagua_net_variant,
    hand_tuned,
    ignored_variables,
    make_backends,
    own_transport,
    tuned_settings,
    worker_environment,
)

LIBRARY = Path("/opt/bagua/libnccl-net.so")
LOG = Path("/tmp/nccl.log")


def test_tuned_sets_threads_sockets_and_channels_over_the_default() -> None:
    settings = hand_tuned("4x2x16").settings
    assert settings == {
        **own_transport().settings,
        "NCCL_SOCKET_NTHREADS": "4",
        "NCCL_NSOCKS_PERTHREAD": "2",
        "NCCL_MIN_NCHANNELS": "16",
    }
    assert "NCCL_MIN_NCHANNELS" not in hand_tuned("4x2").settings


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("2", "THREADSxSOCKETS"),
        ("axb", "THREADSxSOCKETS"),
        ("2x2x8x1", "THREADSxSOCKETS"),
        ("0x2", "0 threads is outside NCCL's 1..16"),
        ("17x1", "17 threads is outside NCCL's 1..16"),
        ("16x8", "16 threads x 8 sockets is outside NCCL's 1..64"),
        ("2x2x65", "65 channels is outside 1..64"),
        ("", "best or none"),
    ],
)
def test_a_wrong_tuned_names_value_and_limit(text: str, said: str) -> None:
    with pytest.raises(ValueError, match="--tuned") as failure:
        hand_tuned(text)
    assert repr(text) in str(failure.value)
    assert said in str(failure.value)


def test_best_adds_eight_settings_which_with_the_default_are_the_nine_of_best_tuned() -> None:
    backends = make_backends(library=LIBRARY, tuned=tuned_settings(["best"]), variants=[], with_shared_memory=True)
    own = [backend for backend in backends if backend.is_own_tcp]
    assert [backend.name for backend in own] == [
        "NCCL default",
        "NCCL t2s4",
        "NCCL t4s1",
        "NCCL t1s2 8ch",
        "NCCL t2s2 8ch",
        "NCCL t2s4 8ch",
        "NCCL t4s2 8ch",
        "NCCL t1s1 16ch",
        "NCCL t2s2 16ch",
    ]
    assert [backend.name for backend in backends[9:]] == ["bagua-net", "shared memory"]
    assert not any(backend.is_own_tcp for backend in backends[9:])


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (None, ["2x2x8"]),
        (["none"], []),
        (["2x4", "4x4x16"], ["2x4", "4x4x16"]),
        (["2x4,4x4x16"], ["2x4", "4x4x16"]),
        (["best,3x3x4"], [*BEST_TUNED, "3x3x4"]),
        (["3x3x4", "best"], [*BEST_TUNED, "3x3x4"]),
        (["best, 2x2x8", "best"], list(BEST_TUNED)),
        (["2x2,2x2"], ["2x2", "2x2"]),
    ],
)
def test_tuned_is_repeated_or_a_list_and_best_stands_for_settings(words: list[str] | None, expected: list[str]) -> None:
    assert tuned_settings(words) == expected


@pytest.mark.parametrize("text", ["rails4", "rails4:", ":A=1", "rails4:BAGUA_NET_RAILS", "rails4:4=A", "x:A=1,"])
def test_a_wrong_variant_is_an_error_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="NAME:VARIABLE=VALUE") as failure:
        bagua_net_variant(text, bagua_net(LIBRARY))
    assert repr(text) in str(failure.value)


def test_two_backends_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="two backends are called 'NCCL t2s2'"):
        make_backends(library=LIBRARY, tuned=["2x2", "2x2"], variants=[], with_shared_memory=False)


def test_no_setting_of_the_caller_reaches_a_backend_that_it_would_change() -> None:
    inherited = {
        "PATH": "/usr/bin",
        "NCCL_NVLS_ENABLE": "0",
        "NCCL_IB_DISABLE": "1",
        "NCCL_NET_PLUGIN": "other",
        "NCCL_MIN_NCHANNELS": "32",
        "BAGUA_NET_NSTREAMS": "1",
        "ENABLE_BAGUA_NET": "0",
        "MASTER_PORT": "29500",
        "RANK": "3",
    }
    ours = worker_environment(bagua_net(LIBRARY), inherited, tcp_only=True, debug_file=LOG)
    assert ours["NCCL_NET_PLUGIN"] == str(LIBRARY)
    # What keeps the machine safe and its other networks off has to stay.
    assert ours["NCCL_NVLS_ENABLE"] == "0"
    assert ours["NCCL_IB_DISABLE"] == "1"
    for name in ("NCCL_MIN_NCHANNELS", "BAGUA_NET_NSTREAMS", "ENABLE_BAGUA_NET", "MASTER_PORT", "RANK", "NCCL_NET"):
        assert name not in ours, name
    default = worker_environment(own_transport(), inherited, tcp_only=True, debug_file=LOG)
    assert default["NCCL_NET"] == "Socket"
    assert default["ENABLE_BAGUA_NET"] == "0"
    assert "NCCL_NET_PLUGIN" not in default
    assert ignored_variables(inherited) == ["BAGUA_NET_NSTREAMS", "NCCL_MIN_NCHANNELS", "NCCL_NET_PLUGIN"]


def test_tcp_only_switches_other_transports_off_and_keeps_a_chosen_interface() -> None:
    chosen = {"NCCL_SOCKET_IFNAME": "eth0"}
    with_tcp = worker_environment(own_transport(), chosen, tcp_only=True, debug_file=LOG)
    assert with_tcp["NCCL_SOCKET_IFNAME"] == "eth0"
    assert (with_tcp["NCCL_P2P_DISABLE"], with_tcp["NCCL_SHM_DISABLE"]) == ("1", "1")
    assert worker_environment(own_transport(), {}, tcp_only=True, debug_file=LOG)["NCCL_SOCKET_IFNAME"] == "lo"
    free = worker_environment(own_transport(), {}, tcp_only=False, debug_file=LOG)
    assert not {"NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_SOCKET_IFNAME"} & free.keys()
