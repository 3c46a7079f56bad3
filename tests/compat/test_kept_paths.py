"""Bagua 0.9's import paths and signatures, of support.kept_interface, are there."""

from __future__ import annotations

import ast
import importlib
import inspect
import pickle
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.kept_interface import ATTRIBUTES, PATHS, SIGNATURES


def look_up(path: str) -> Any:
    found: Any = importlib.import_module("bagua.torch_api")
    for part in path.split("."):
        if not hasattr(found, part) and inspect.ismodule(found):
            # A module of a package is its attribute once somebody has imported it: another test, or nobody yet.
            importlib.import_module(f"{found.__name__}.{part}")
        found = getattr(found, part)
    return found


def check_signature(function: Callable[..., Any], specified: str) -> list[str]:
    """What a caller of the specified signature would trip over."""
    stub = ast.parse(f"def stub({specified}): pass").body[0]
    assert isinstance(stub, ast.FunctionDef)
    wanted = stub.args.args
    defaults = [None] * (len(wanted) - len(stub.args.defaults)) + stub.args.defaults
    parameters = [one for one in inspect.signature(function).parameters.values() if one.name != "self"]
    has_keywords = any(one.kind is one.VAR_KEYWORD for one in parameters)
    positional = [one for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD]
    problems = []
    for position, (argument, default) in enumerate(zip(wanted, defaults, strict=True)):
        if position >= len(positional) or positional[position].name != argument.arg:
            given = positional[position].name if position < len(positional) else "nothing"
            problems.append(f"parameter {position} is {given}, must be {argument.arg}")
        elif default is not None and not is_default(positional[position].default, default):
            problems.append(f"{argument.arg}={positional[position].default!r}, must be {ast.unparse(default)}")
    problems += [
        f"{added.name} is new and has no default"
        for added in parameters
        if added not in positional[: len(wanted)]
        and added.default is inspect.Parameter.empty
        and added.kind not in (added.VAR_POSITIONAL, added.VAR_KEYWORD)
    ]
    if stub.args.kwarg is not None and not has_keywords:
        problems.append("takes no further keywords")
    return problems


def is_default(given: Any, specified: ast.expr) -> bool:
    text = ast.unparse(specified)
    if given is inspect.Parameter.empty:
        return False
    if text == "...":
        return True
    if text == "ReduceOp.SUM":
        return bool(given == look_up("ReduceOp").SUM)
    value = ast.literal_eval(text)
    # A list as a default may be an empty tuple: it is only read.
    return (list(given) == value) if isinstance(value, list) else (given == value and type(given) is type(value))


def test_paths_have_their_names() -> None:
    missing = {
        path: sorted(name for name in names if not hasattr(importlib.import_module(path), name))
        for path, names in PATHS.items()
    }
    assert {path: names for path, names in missing.items() if names} == {}


def test_all_names_what_is_there() -> None:
    problems = []
    for path in PATHS:
        module = importlib.import_module(path)
        names = getattr(module, "__all__", [])
        problems += [f"{path} has no {name}" for name in names if not hasattr(module, name)]
        problems += [f"{path} names {name} twice" for name in set(names) if list(names).count(name) > 1]
    assert problems == []


def test_signatures() -> None:
    problems = {path: check_signature(look_up(path), specified) for path, specified in SIGNATURES.items()}
    assert {path: found for path, found in problems.items() if found} == {}


def test_classes_have_their_attributes() -> None:
    missing = {
        path: sorted(name for name in names if inspect.getattr_static(look_up(path), name, None) is None)
        for path, names in ATTRIBUTES.items()
    }
    assert {path: names for path, names in missing.items() if names} == {}


def test_what_belongs_to_groups_is_not_at_the_top() -> None:
    api = importlib.import_module("bagua.torch_api")
    only_there = {"from_torch_group", "BaguaProcessGroup", "CommMember", "get_communicator"}
    assert [name for name in only_there if name in api.__all__ or hasattr(api, name)] == []


def test_star_import_gives_the_public_names() -> None:
    names: dict[str, Any] = {}
    exec("from bagua.torch_api import *", names)
    missing = PATHS["bagua.torch_api"] - set(names)
    assert missing == set()
    assert not [name for name in names if name.startswith("_") and name != "__builtins__"]


def test_names_that_are_the_same_object() -> None:
    distributed = look_up("data_parallel.distributed")
    assert distributed.DistributedDataParallel_V1_9_0 is look_up("data_parallel.DistributedDataParallel")
    assert issubclass(distributed.DistributedDataParallel_V1_9_0, torch.nn.Module)
    assert distributed.DistributedDataParallel_V1_9_0_Interface is distributed.DistributedDataParallel_V1_9_0
    for path in ("communication.ReduceOp", "data_parallel.functional.ReduceOp"):
        assert look_up(path) is look_up("ReduceOp")
    assert look_up("communication.comm.WORLD") is look_up("communication.CommMember.WORLD")


def test_kept_paths_of_contrib_are_what_contrib_has() -> None:
    """Also for pickles of Bagua 0.9, which name classes by these paths."""
    for path in (one for one in PATHS if re.search(r"contrib|model_parallel", one)):
        for name in PATHS[path]:
            found = getattr(importlib.import_module(path), name)
            assert found.__module__.startswith("bagua.contrib."), f"{path}.{name}"
            assert pickle.loads(f"c{path}\n{name}\n.".encode()) is found


def test_numbers_of_reduce_op() -> None:
    numbers = {"SUM": 0, "PRODUCT": 1, "MIN": 2, "MAX": 3, "BOR": 7, "BAND": 8, "BXOR": 9, "AVG": 10}
    assert {op.name: int(op) for op in look_up("ReduceOp")} == numbers


def test_operations_of_torch_by_their_numbers() -> None:
    translate, ops = look_up("data_parallel.functional.torch_reduce_op_to_bagua"), look_up("ReduceOp")
    assert [translate(dist.ReduceOp.SUM), translate(dist.ReduceOp.MAX)] == [ops.SUM, ops.MAX]
    with pytest.raises(ValueError, match="MIN"):
        translate(dist.ReduceOp.MIN)


def test_a_free_port_can_be_listened_on() -> None:
    port = look_up("env.find_free_network_port")()
    with socket.create_server(("", port)):
        assert port > 0


def test_import_gives_torch_its_methods() -> None:
    look_up("BaguaModule")
    given = {
        torch.nn.Module: ["with_bagua", "bagua_build_params", *ATTRIBUTES["BaguaModule"]],
        torch.Tensor: [path.removeprefix("BaguaTensor.") for path in SIGNATURES if path.startswith("BaguaTensor.")],
        dist.ProcessGroup: [
            *("bagua_patch", "bagua_pg", "bagua_get_global_communicator"),
            *("bagua_get_inter_node_communicator", "bagua_get_intra_node_communicator"),
        ],
    }
    for kind, names in given.items():
        assert [name for name in names if inspect.getattr_static(kind, name, None) is None] == []
    assert check_signature(dist.ProcessGroup.bagua_patch, "stream=None") == []


def test_a_module_that_is_not_wrapped_can_still_be_looked_through() -> None:
    """torch.compile, for one, reads every attribute that `dir` names."""
    look_up("BaguaModule")
    module = torch.nn.Linear(1, 1)
    for name in dir(module):
        getattr(module, name)


def test_registered_algorithms() -> None:
    registry = look_up("algorithms.GlobalAlgorithmRegistry")
    assert "gradient_allreduce" in registry.available_algorithms()
    # What the documentation of 0.9 names as the way to see them.
    assert str(registry) == f"Registered Algorithms: {', '.join(registry.available_algorithms())}"


def run_fresh(program: str) -> None:
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True, timeout=120)


def test_bagua_alone_loads_no_torch() -> None:
    run_fresh("import sys, bagua; assert not {'torch', 'numpy', 'bagua.torch_api'} & set(sys.modules)")


def test_what_imports_load_and_set_up() -> None:
    """The compiler takes half a second. Where a part of torch that we need loads it, that is torch's choice."""
    run_fresh(
        "import sys, threading, bagua\n"
        "assert not {'torch', 'bagua.comm_hooks'} & set(sys.modules)\n"
        "import torch.distributed.fsdp, torch.distributed.tensor\n"
        "before = set(sys.modules)\n"
        "hook = bagua.comm_hooks.bytegrad\n"
        "import bagua.comm_hooks as hooks\n"
        "assert hook is hooks.bytegrad and callable(hook)\n"
        "try:\n    bagua.no_such_name\n"
        "except AttributeError as error:\n    assert 'no_such_name' in str(error)\n"
        "else:\n    raise AssertionError\n"
        "import bagua.torch_api\n"
        "assert not torch.distributed.is_initialized() and not torch.cuda.is_initialized()\n"
        "assert threading.active_count() == 1, threading.enumerate()\n"
        "loaded = {name.split('.')[0] for name in sys.modules}\n"
        "assert not {'flask', 'redis', 'pytorch_lightning', 'lightning'} & loaded\n"
        "parts = {'bagua.legacy.autotune_service', 'bagua.lightning', 'bagua.contrib'}\n"
        "assert not parts & set(sys.modules)\n"
        "import bagua.codecs, bagua.fsdp, bagua.torch_api.checkpoint\n"
        "import bagua.torch_api.data_parallel, bagua.torch_api.model_parallel.moe, bagua.torch_api.sharded_replicas\n"
        "from bagua.torch_api import contrib\n"
        "assert 'SyncBatchNorm' in dir(contrib)\n"
        "assert not {'torch._dynamo', 'torch._inductor', 'triton'} & (set(sys.modules) - before)"
    )


class TestComparison:
    """The comparison above finds what it must find."""

    @pytest.mark.parametrize(
        ("source", "is_compatible"),
        [
            ("lambda a, b=1: 0", True),
            ("lambda a=3, b=1, c=None: 0", True),
            ("lambda b=1, a=3: 0", False),
            ("lambda a, b=2: 0", False),
            ("lambda a, b=True: 0", False),
            ("lambda a, b: 0", False),
            ("lambda a: 0", False),
            ("lambda a, *, b=1: 0", False),
            ("lambda a, b=1, *, c: 0", False),
            ("lambda a, b=1, **more: 0", True),
        ],
    )
    def test_of_a_and_b(self, source: str, is_compatible: bool) -> None:
        assert (check_signature(eval(source), "a, b=1") == []) is is_compatible
