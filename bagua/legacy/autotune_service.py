"""The autotune service, for scripts that use it by itself. Training needs none: see docs/how-to/train/tune.md.

JSON over HTTP under /api/v1, as routes of a Flask application. No torch; the server needs Flask (`pip install flask`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

from bagua.legacy.autotune_client import AutotuneClient
from bagua.legacy.autotune_messages import TensorDeclaration
from bagua.legacy.autotune_task_manager import AutotuneTaskManager

__all__ = ["AutotuneClient", "AutotuneService", "make_autotune_server"]

# All tensors of a large model have some megabytes.
_MAX_REQUEST_BYTES = 64 << 20
_MAX_TENSORS = 1_000_000
_MAX_ELEMENTS = 1 << 50
_NO_BUCKETS = 1 << 62
_MAX_SPEED = 1e30


class _BadRequestError(ValueError):
    """What a client has sent is not understood: status 400, with the text."""


class AutotuneService:
    """
    Args:
        world_size: ranks that ask.
        autotune_level: 1 or more searches for the fastest bucket size; 0 does not.
        max_samples: how many samples are taken at most.
        sampling_confidence_time_s: how long each bucket size is measured.
        warmup_time_s: before the first sample.
        is_output_autotune_log: log each sample.
        default_bucket_size: in bytes.
    """

    def __init__(
        self,
        world_size: int,
        autotune_level: int = 0,
        max_samples: int = 60,
        sampling_confidence_time_s: float = 5,
        warmup_time_s: float = 30,
        is_output_autotune_log: bool = False,
        default_bucket_size: int = 10 * 1024**2,
    ) -> None:
        if world_size < 1:
            raise ValueError(f"world_size={world_size}: must be at least 1")
        self.world_size = world_size
        self.autotune_level = autotune_level
        self.max_samples = max_samples
        self.sampling_confidence_time_s = sampling_confidence_time_s
        self.warmup_time_s = warmup_time_s
        self.is_output_autotune_log = is_output_autotune_log
        self.default_bucket_size = default_bucket_size
        self._lock = threading.Lock()
        self._managers: dict[str, AutotuneTaskManager] = {}

    def setup_app(self, app: Any) -> Any:
        """Add the routes to a Flask application. Returns it."""
        from flask import request

        if app.config.get("MAX_CONTENT_LENGTH") is None:
            app.config["MAX_CONTENT_LENGTH"] = _MAX_REQUEST_BYTES

        def add(name: str, answer: Callable[[Mapping[str, Any]], tuple[Any, int]]) -> None:
            def view() -> tuple[Any, int]:
                message = request.get_json(force=True, silent=True)
                try:
                    if not isinstance(message, dict):
                        raise _BadRequestError("the body is not a JSON object")
                    with self._lock:
                        return answer(message)
                except _BadRequestError as error:
                    return {"error": str(error)}, 400

            app.add_url_rule(f"/api/v1/{name}", name, view, methods=["POST"])

        add("register_tensors", self._register_tensors)
        add("report_metrics", self._report_metrics)
        add("ask_hyperparameters", self._ask_hyperparameters)
        add("report_tensor_execution_order", self._report_tensor_execution_order)
        app.add_url_rule("/api/v1/health_check", "health_check", lambda: ({"status": "ok"}, 200), methods=["GET"])
        return app

    # --- requests ----------------------------------------------------------------------------------------------------

    def _register_tensors(self, message: Mapping[str, Any]) -> tuple[Any, int]:
        name = _text(message, "model_name")
        tensors = _tensors(message)
        buckets = message.get("whether_to_bucket", True)
        self._managers[name] = manager = AutotuneTaskManager(
            name,
            tensors,
            self.world_size,
            self.default_bucket_size if buckets else _NO_BUCKETS,
            is_tuned=self.autotune_level >= 1 and bool(buckets),
            max_samples=self.max_samples,
            sampling_confidence_time_s=self.sampling_confidence_time_s,
            warmup_time_s=self.warmup_time_s,
            is_output_autotune_log=self.is_output_autotune_log,
        )
        return {"recommended_hyperparameters": manager.recommended_hyperparameters().dict()}, 200

    def _report_metrics(self, message: Mapping[str, Any]) -> tuple[Any, int]:
        manager = self._managers.get(_text(message, "model_name"))
        if manager is None:
            return _unknown(message)
        self._rank(message)
        speed, hyperparameters = message.get("speed"), message.get("hyperparameters")
        # 0: not known.
        if (
            not isinstance(speed, int | float)
            or isinstance(speed, bool)
            or not (speed == 0 or 1 / _MAX_SPEED <= speed <= _MAX_SPEED)
        ):
            raise _BadRequestError(f"speed is {speed!r:.40}; it must be 0 or from {1 / _MAX_SPEED:g} to {_MAX_SPEED:g}")
        if not isinstance(hyperparameters, dict):
            raise _BadRequestError("hyperparameters is not an object")
        manager.report_metrics(_integer(message, "train_iter"), float(speed), hyperparameters)
        return {}, 200

    def _ask_hyperparameters(self, message: Mapping[str, Any]) -> tuple[Any, int]:
        manager = self._managers.get(_text(message, "model_name"))
        if manager is None:
            return _unknown(message)
        recommended = manager.ask_hyperparameters(self._rank(message), _integer(message, "train_iter"))
        return {
            "recommended_hyperparameters": recommended.dict(),
            "is_autotune_completed": manager.is_autotune_completed,
        }, 200

    def _report_tensor_execution_order(self, message: Mapping[str, Any]) -> tuple[Any, int]:
        spans = message.get("spans")
        if not isinstance(spans, list):
            raise _BadRequestError("spans is not a list")
        ready: dict[str, int] = {}
        for span in spans:
            if not isinstance(span, dict):
                raise _BadRequestError("a span is not an object")
            if span.get("action") == "tensor_ready":
                ready.setdefault(_text(span, "tensor_name"), _integer(span, "start_time"))
        order = sorted(ready, key=lambda name: ready[name])
        for manager in self._managers.values():
            if any(tensor.name in ready for tensor in manager.tensors):
                manager.reorder(order)
        return {}, 200

    def _rank(self, message: Mapping[str, Any]) -> int:
        rank = _integer(message, "rank")
        if not 0 <= rank < self.world_size:
            raise _BadRequestError(f"rank is {rank}; there are {self.world_size} ranks")
        return rank


def make_autotune_server(service: AutotuneService, host: str = "127.0.0.1", port: int = 0) -> Any:
    """A server of the service, which `serve_forever()` runs and `shutdown()`, of another thread, ends.

    Args:
        port: 0: any free one; the server's `server_port` tells it.

    Raises:
        ImportError: Flask is not installed.
        OSError: the port is taken.
    """
    try:
        from flask import Flask
        from werkzeug.serving import WSGIRequestHandler, make_server
    except ImportError as error:
        raise ImportError(
            f"The autotune service needs Flask, which is not installed ({error}).\n"
            "It is an optional dependency of bagua.\n"
            "Install it: pip install flask"
        ) from error

    class Quiet(WSGIRequestHandler):
        def log_request(self, *_: object, **__: object) -> None:
            """Thousands of steps ask."""

    return make_server(host, port, service.setup_app(Flask("bagua.service")), threaded=True, request_handler=Quiet)


def _unknown(message: Mapping[str, Any]) -> tuple[Any, int]:
    return {"error": f"the model {message['model_name']!r} is not registered"}, 405


def _tensors(message: Mapping[str, Any]) -> list[TensorDeclaration]:
    given = message.get("tensor_list")
    if not isinstance(given, list) or not 0 < len(given) <= _MAX_TENSORS:
        raise _BadRequestError("tensor_list is not a list of tensors")
    tensors = []
    for one in given:
        if not isinstance(one, dict):
            raise _BadRequestError("a tensor is not an object")
        tensor = TensorDeclaration(_text(one, "name"), _integer(one, "num_elements"), _text(one, "dtype"))
        try:
            tensor.bytes()
        except ValueError as error:
            raise _BadRequestError(f"tensor {tensor.name!r}: {error}") from error
        if not 0 <= tensor.num_elements <= _MAX_ELEMENTS:
            raise _BadRequestError(f"tensor {tensor.name!r} has {tensor.num_elements} elements")
        tensors.append(tensor)
    return tensors


def _text(message: Mapping[str, Any], name: str) -> str:
    value = message.get(name)
    if not isinstance(value, str):
        raise _BadRequestError(f"{name} is {value!r:.80}; it must be a text")
    return value


def _integer(message: Mapping[str, Any], name: str) -> int:
    value = message.get(name)
    if type(value) is not int:
        raise _BadRequestError(f"{name} is {value!r:.80}; it must be an integer")
    return value
