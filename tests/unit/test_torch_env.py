"""What bagua.torch_api.env reads from the environment, and what bagua.torch_api exports."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import run_ranks

import bagua.torch_api
from bagua.env import SETTINGS as PACKAGE_SETTINGS
from bagua.env import WITHOUT_EFFECT, EnvironmentValueError
from bagua.torch_api import env, wrap_summary

# name of the function -> variable, value if it is not set, a text and what it means, a text that means nothing
SETTINGS = {
    "get_world_size": ("WORLD_SIZE", 1, "8", 8, "eight"),
    "get_rank": ("RANK", 0, "3", 3, "first"),
    "get_local_rank": ("LOCAL_RANK", 0, " 2 ", 2, "1.5"),
    "get_local_size": ("LOCAL_WORLD_SIZE", 1, "4", 4, "x"),
    "get_node_rank": ("NODE_RANK", 0, "5", 5, "x"),
    "get_master_addr": ("MASTER_ADDR", "127.0.0.1", "10.0.0.1", "10.0.0.1", None),
    "get_default_bucket_size": ("BAGUA_DEFAULT_BUCKET_SIZE", 52428800, "1024", 1024, "0"),
    "get_bagua_service_port": ("BAGUA_SERVICE_PORT", -1, "29501", 29501, "http"),
    "get_autotune_level": ("BAGUA_AUTOTUNE", 0, "1", 1, "on"),
    "get_autotune_max_samples": ("BAGUA_AUTOTUNE_MAX_SAMPLES", 60, "5", 5, "-1"),
    "get_autotune_sampling_confidence_time_s": ("BAGUA_AUTOTUNE_SAMPLING_CONFIDENCE_TIME_S", 5.0, "0.5", 0.5, "soon"),
    "get_autotune_warmup_time_s": ("BAGUA_AUTOTUNE_WARMUP_TIME_S", 30.0, "0", 0.0, "inf"),
    "get_autotune_server_wait_time": ("BAGUA_AUTOTUNE_SERVER_WAIT_TIME", 300, "60", 60, "x"),
    "get_is_output_autotune_log": ("BAGUA_IS_OUTPUT_AUTOTUNE_LOG", False, "1", True, "maybe"),
    "is_report_metrics_switch_on": ("BAGUA_REPORT_METRICS", False, "yes", True, "maybe"),
}


@pytest.fixture(autouse=True)
def _empty_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [*(variable for variable, *_ in SETTINGS.values()), "GROUP_RANK"]:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("function", SETTINGS)
def test_setting(monkeypatch: pytest.MonkeyPatch, function: str) -> None:
    """Read at every call; unset and blank are the same; what means nothing is an error that names it."""
    variable, default, text, value, nonsense = SETTINGS[function]
    read: Callable[[], object] = getattr(env, function)
    assert read() == default
    monkeypatch.setenv(variable, "  ")
    assert read() == default
    monkeypatch.setenv(variable, text)
    assert read() == value
    assert type(read()) is type(default)
    if nonsense is not None:
        monkeypatch.setenv(variable, nonsense)
        with pytest.raises(EnvironmentValueError, match=f"{variable}={nonsense}: must be"):
            read()


def test_a_size_may_have_a_suffix(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, size in (("10M", 10 << 20), ("10 MiB", 10 << 20), ("4kb", 4 << 10), ("1g", 1 << 30)):
        monkeypatch.setenv("BAGUA_DEFAULT_BUCKET_SIZE", text)
        assert env.get_default_bucket_size() == size
    for text in ("10T", "0M", "-1", "1.5M", "large"):
        monkeypatch.setenv("BAGUA_DEFAULT_BUCKET_SIZE", text)
        with pytest.raises(EnvironmentValueError, match=f"BAGUA_DEFAULT_BUCKET_SIZE={text}: must be .* such as 10M"):
            env.get_default_bucket_size()


def test_a_misspelt_algorithm_or_option() -> None:
    init = bagua.torch_api.algorithms.Algorithm.init
    # A KeyError in Bagua 0.9; its text is not in quotation marks, as that of other KeyErrors.
    for kind in (ValueError, KeyError, bagua.torch_api.algorithms.UnknownAlgorithmError):
        with pytest.raises(kind, match=r"^Unknown algorithm 'bytgrad'\. Did you mean 'bytegrad'\? Known .* async, "):
            init("bytgrad")
    message = (
        r"^gradient_allreduce has no option 'hierachical'\. Did you mean 'hierarchical'\?"
        r" Options of gradient_allreduce: hierarchical, average\.$"
    )
    with pytest.raises(TypeError, match=message):
        init("gradient_allreduce", hierachical=True)
    with pytest.raises(TypeError, match="qadam needs the option 'q_adam_optimizer'"):
        init("qadam")


def wrap_in_wrong_ways() -> None:
    bagua.torch_api.init_process_group()
    model: Any = torch.nn.Linear(2, 2)
    algorithm = bagua.torch_api.algorithms.Algorithm.init("gradient_allreduce")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"optimizers is empty\.\n(.*\n)Pass them: model\.with_bagua\(\[optimizer\]"):
        model.with_bagua([], algorithm)
    with pytest.raises(ValueError, match=r"^Unknown algorithm 'bytgrad'\. Did you mean 'bytegrad'\? Known"):
        model.with_bagua([optimizer], "bytgrad")
    with pytest.raises(TypeError, match=r"algorithm is 3, which is not an Algorithm\. Pass a name"):
        model.with_bagua([optimizer], 3)
    with pytest.raises(TypeError, match=r"the class \w+\. Pass an instance"):
        model.with_bagua([optimizer], type(algorithm))
    model.with_bagua([optimizer], algorithm)
    assert bagua.torch_api.get_backend(model.bagua_module_name) is model.bagua_ddp.scheduler
    with pytest.raises(ValueError, match="no module named 'nobody' is trained with Bagua"):
        bagua.torch_api.get_backend("nobody")


def test_wrong_arguments_of_with_bagua_and_the_backend_of_a_model() -> None:
    run_ranks(1, wrap_in_wrong_ways)


def test_a_switch_can_be_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    for text in ("0", "false", "off", "no"):
        monkeypatch.setenv("BAGUA_IS_OUTPUT_AUTOTUNE_LOG", text)
        assert env.get_is_output_autotune_log() is False
    monkeypatch.setenv("BAGUA_AUTOTUNE_SERVER_WAIT_TIME", "3")
    assert env.get_autotune_server_wait_time() == 30, "it is never short"


def test_node_rank_of_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    """GROUP_RANK counts only together with what else torchrun sets; other programs use the name, too."""
    monkeypatch.setenv("GROUP_RANK", "7")
    monkeypatch.setenv("NODE_RANK", "5")
    assert env.get_node_rank() == 5
    for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "1")
    assert env.get_node_rank() == 7


def test_dir_shows_what_is_public_and_no_more() -> None:
    shown = set(dir(bagua.torch_api))
    assert set(bagua.torch_api.__all__) < shown
    on_request = {"bucket", "checkpoint", "contrib", "model_parallel", "moe", "utils"}
    assert shown - set(bagua.torch_api.__all__) == on_request
    assert all(hasattr(bagua.torch_api, name) for name in shown)
    assert set(dir(bagua.torch_api.contrib)) >= {"CachedDataset", "fuse_optimizer"}
    assert not {"Any", "annotations", "importlib"} & set(dir(bagua.torch_api.contrib))


def test_unknown_names_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'all_you_need'"):
        _ = bagua.torch_api.all_you_need
    with pytest.raises(AttributeError, match=r"there is bagua\.comm_hooks: from bagua import comm_hooks"):
        _ = bagua.torch_api.comm_hooks


def test_variables_without_effect_are_named_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("BAGUA_REPORT_METRICS", "1")
    monkeypatch.setenv("BAGUA_IS_OUTPUT_AUTOTUNE_LOG", "0")
    wrap_summary._warn_of_variables.cache_clear()
    with caplog.at_level("WARNING", logger="bagua"):
        wrap_summary._warn_of_variables()
        wrap_summary._warn_of_variables()
    assert caplog.messages == ["BAGUA_REPORT_METRICS=1: no effect, for training uses no autotune service"]
    wrap_summary._warn_of_variables.cache_clear()


@pytest.mark.parametrize(
    ("variable", "level", "expected"),
    [(None, "NOTSET", "INFO"), (None, "DEBUG", "DEBUG"), (None, "ERROR", "ERROR"), ("warning", "ERROR", "WARNING")],
)
def test_the_level_that_a_program_has_set_stays_unless_the_variable_is_set(
    monkeypatch: pytest.MonkeyPatch, variable: str | None, level: str, expected: str
) -> None:
    logger = logging.getLogger("bagua")
    monkeypatch.setattr(logger, "level", logger.level)  # restored afterwards
    if variable is not None:
        monkeypatch.setenv("BAGUA_LOG_LEVEL", variable)
    logger.setLevel(level)
    wrap_summary.configure_logging()
    assert logging.getLevelName(logger.level) == expected


def test_what_is_loaded_when_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """There, not there, and there but lacking a package."""
    lazy = bagua.torch_api._LAZY
    monkeypatch.setitem(lazy, "now", "bagua.torch_api.env")
    assert bagua.torch_api.now is env
    for path in ("bagua.torch_api.later", "bagua.torch_api.later.still"):
        monkeypatch.setitem(lazy, "later", path)
        with pytest.raises(AttributeError, match=f"this version of Bagua has no {path}"):
            _ = bagua.torch_api.later

    def lacks_package(_: str) -> None:
        raise ModuleNotFoundError("No module named 'redis'", name="redis")

    monkeypatch.setattr("importlib.import_module", lacks_package)
    with pytest.raises(ModuleNotFoundError, match="redis"):
        _ = bagua.torch_api.now


def test_every_variable_that_the_package_names_is_declared() -> None:
    """`bagua-net run` warns of every other BAGUA_* variable."""
    literal = re.compile(r"[\"'](BAGUA_(?!NET_)[A-Z0-9_]+)[\"']")
    package = Path(bagua.__file__).parent
    sources = [path for path in package.rglob("*.py") if path != package / "env.py"]
    named = {name for path in sources for name in literal.findall(path.read_text(encoding="utf-8"))}
    assert "BAGUA_DEFAULT_BUCKET_SIZE" in named
    assert named <= PACKAGE_SETTINGS | WITHOUT_EFFECT
