"""The autotune service of Bagua 0.9: a real server and clients, over loopback in one process."""

from __future__ import annotations

import copy
import http.client
import json
import math
import pickle
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from bagua.bagua_define import (
    BaguaCoreTelemetrySpan,
    BaguaHyperparameter,
    TensorDeclaration,
    TensorDtype,
    get_tensor_declaration_bytes,
)
from bagua.legacy import autotune_client
from bagua.service import AutotuneClient, AutotuneService, make_autotune_server

MIB = 1 << 20
TENSORS = [
    TensorDeclaration(name, size * MIB // 4, "f32") for name, size in zip("ABCDE", (2, 8, 10, 20, 30), strict=True)
]


@pytest.fixture
def serve() -> Iterator[Any]:
    running = []

    def start(**options: Any) -> AutotuneClient:
        server = make_autotune_server(AutotuneService(**options))
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        running.append((server, thread))
        return AutotuneClient("127.0.0.1", server.server_port)

    yield start
    for server, thread in running:
        server.shutdown()
        thread.join()
        server.server_close()


def names(hyperparameters: dict[str, Any]) -> list[list[str]]:
    return [[tensor["name"] for tensor in bucket] for bucket in hyperparameters["buckets"]]


def test_a_declaration_is_a_dictionary_too() -> None:
    """Bagua 0.9's was a TypedDict, and its own tests make one of a dictionary."""
    as_dictionary = {"name": "A", "num_elements": 123, "dtype": TensorDtype.F32}
    declared = TensorDeclaration(as_dictionary)
    assert declared == as_dictionary == TensorDeclaration("A", 123, "f32") == TensorDeclaration(**as_dictionary)
    assert (declared["num_elements"], declared.num_elements, declared.dtype) == (123, 123, "f32")
    assert json.loads(json.dumps(declared)) == declared.dict() == as_dictionary
    assert get_tensor_declaration_bytes(as_dictionary) == get_tensor_declaration_bytes(declared) == 492
    assert pickle.loads(pickle.dumps(declared)).name == copy.deepcopy(declared).name == "A"
    declared.dtype = "f16"
    assert declared.bytes() == 246
    hyperparameters = BaguaHyperparameter(is_hierarchical_reduce=False).update({"buckets": [[declared]]})
    assert hyperparameters.buckets == [[declared]]
    for wrong in ({"name": "A"}, {**as_dictionary, "size": 1}):
        with pytest.raises(TypeError, match="Give name, num_elements, dtype"):
            TensorDeclaration(wrong)
    with pytest.raises(TypeError, match="Give name, num_elements, dtype"):
        TensorDeclaration("A", 123)


def test_the_fastest_bucket_size_is_found_by_two_ranks(serve: Any) -> None:
    client = serve(world_size=2, autotune_level=1, sampling_confidence_time_s=0, warmup_time_s=0)
    assert client.health_check()
    answer = client.register_tensors("net", TENSORS).json()["recommended_hyperparameters"]
    assert answer["bucket_size"] == 10 * MIB
    seen = set()
    for iteration in range(1000):
        hyperparameters = BaguaHyperparameter().update(answer)
        size = hyperparameters.bucket_size
        seen.add(size)
        # 25 MiB is best. Of one iteration the first report counts.
        assert client.report_metrics("net", 0, iteration, hyperparameters, 100 / abs(math.log(size / (26 * MIB)))).ok
        assert client.report_metrics("net", 1, iteration, hyperparameters, 1e9).ok
        asked = [client.ask_hyperparameters("net", rank, iteration).json() for rank in range(2)]
        assert asked[0] == asked[1]
        answer = asked[1]["recommended_hyperparameters"]
        if asked[1]["is_autotune_completed"]:
            break
    assert iteration <= 60
    assert len(seen) > 4
    assert answer["bucket_size"] == 25 * MIB
    assert names(answer) == [["A", "B", "C", "D"], ["E"]]


@pytest.mark.parametrize(("ranks", "warmup_time_s", "samples"), [(1, 1e6, 0), (2, 0, 1)])
def test_samples_wait_for_the_warmup_and_for_all_ranks(
    serve: Any, ranks: int, warmup_time_s: float, samples: int
) -> None:
    """One rank alone asks. Its first question ends a sample, before which nobody had asked."""
    client = serve(world_size=ranks, autotune_level=1, sampling_confidence_time_s=0, warmup_time_s=warmup_time_s)
    answers = [client.register_tensors("net", TENSORS).json()["recommended_hyperparameters"]]
    for iteration in range(5):
        client.report_metrics("net", 0, iteration, BaguaHyperparameter().update(answers[-1]), 1.0)
        asked = client.ask_hyperparameters("net", 0, iteration).json()
        assert not asked["is_autotune_completed"]
        answers.append(asked["recommended_hyperparameters"])
    assert len({answer["bucket_size"] for answer in answers}) == 1 + samples


def test_after_max_samples_the_best_is_kept(serve: Any) -> None:
    client = serve(world_size=1, autotune_level=1, max_samples=4, sampling_confidence_time_s=0, warmup_time_s=0)
    answer = client.register_tensors("net", TENSORS).json()["recommended_hyperparameters"]
    completed = []
    for iteration in range(6):
        hyperparameters = BaguaHyperparameter().update(answer)
        client.report_metrics("net", 0, iteration, hyperparameters, 1.0 + (answer["bucket_size"] == 2 * MIB))
        asked = client.ask_hyperparameters("net", 0, iteration).json()
        answer = asked["recommended_hyperparameters"]
        completed.append(asked["is_autotune_completed"])
    assert completed == [False] * 3 + [True] * 3
    assert answer["bucket_size"] == 2 * MIB


def test_buckets(serve: Any) -> None:
    """Without tuning: by size, by dtype, all in one, and in the order in which tensors become ready."""
    client = serve(world_size=1, default_bucket_size=20 * MIB)
    assert names(client.register_tensors("net", TENSORS).json()["recommended_hyperparameters"]) == [
        ["A", "B", "C"],
        ["D"],
        ["E"],
    ]
    mixed = [*TENSORS[:2], TensorDeclaration("half", 5, TensorDtype.F16), *TENSORS[2:]]
    answer = client.register_tensors("mixed", mixed).json()["recommended_hyperparameters"]
    assert names(answer) == [["half"], ["A", "B", "C"], ["D"], ["E"]]
    answer = client.register_tensors("whole", TENSORS, whether_to_bucket=False).json()["recommended_hyperparameters"]
    assert names(answer) == [["A", "B", "C", "D", "E"]]
    spans = [BaguaCoreTelemetrySpan(1, "tensor_ready", name, -start, 0) for start, name in enumerate("ABCDE")]
    assert client.report_tensor_execution_order(spans).json() == {}
    asked = client.ask_hyperparameters("net", 0, 1).json()
    assert asked["is_autotune_completed"]
    assert names(asked["recommended_hyperparameters"]) == [["E"], ["D"], ["C", "B", "A"]]


def test_what_is_not_understood_is_refused(serve: Any) -> None:
    client = serve(world_size=1)
    assert client.ask_hyperparameters("nobody", 0, 0).status_code == 405
    assert client.report_metrics("nobody", 0, 0, BaguaHyperparameter(), 1.0).status_code == 405
    assert client.register_tensors("net", TENSORS).ok
    assert client.ask_hyperparameters("net", 1, 0).status_code == 400
    for speed in (float("nan"), -1.0, 10**400, 5e-324):
        assert client.report_metrics("net", 0, 0, BaguaHyperparameter(), speed).status_code == 400, speed
    bad_tensor = {"name": "A", "num_elements": -1, "dtype": "f32"}
    for path, message in {
        "register_tensors": {"model_name": "net", "tensor_list": [bad_tensor]},
        "report_tensor_execution_order": {"spans": [{"action": "tensor_ready", "tensor_name": 5}]},
        "ask_hyperparameters": {"model_name": ["net"]},
        "report_metrics": [],
    }.items():
        connection = http.client.HTTPConnection(client.service_addr, client.service_port, timeout=30)
        connection.request("POST", f"/api/v1/{path}", json.dumps(message))
        answer = connection.getresponse()
        assert answer.status == 400, path
        assert json.loads(answer.read())["error"]
        connection.close()


def test_a_service_that_is_not_there_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(autotune_client.time, "sleep", pauses.append)
    client = AutotuneClient("127.0.0.1", 1)
    assert not client.health_check()
    with pytest.raises(ConnectionError, match=r"asked 4 times at 127\.0\.0\.1:1"):
        client.ask_hyperparameters("net", 0, 0)
    assert len(pauses) == 6


def test_without_flask_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flask", None)
    with pytest.raises(ImportError, match="pip install flask"):
        make_autotune_server(AutotuneService(1))
