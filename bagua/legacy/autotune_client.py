"""The client of the autotune service, on the standard library."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bagua.legacy.autotune_messages import BaguaCoreTelemetrySpan, BaguaHyperparameter, TensorDeclaration

_RETRIES = 3
_PAUSE_S = 0.1  # before the first retry; each later one waits twice as long
_TIMEOUT_S = 30.0
_MAX_ANSWER_BYTES = 256 << 20


@dataclass(frozen=True)
class Response:
    """An answer of the service."""

    status_code: int
    text: str

    @property
    def ok(self) -> bool:
        """Whether the service has done what it was asked."""
        return self.status_code < 400

    def json(self) -> Any:
        """
        Raises:
            ValueError: the answer is no JSON.
        """
        return json.loads(self.text)


class AutotuneClient:
    """Each request is tried again up to three times while the service cannot be reached.

    Args:
        service_addr: name or address of its host.
        service_port: where it listens.

    Raises:
        ConnectionError: of every method but `health_check`, the service cannot be reached.
    """

    def __init__(self, service_addr: str, service_port: int) -> None:
        self.service_addr, self.service_port = service_addr, service_port

    def register_tensors(
        self,
        model_name: str,
        tensor_list: Sequence[TensorDeclaration | Mapping[str, Any]],
        whether_to_bucket: bool = True,
    ) -> Response:
        """Its JSON has `recommended_hyperparameters`."""
        tensors = [TensorDeclaration(tensor).dict() for tensor in tensor_list]
        return self._post(
            "register_tensors", model_name=model_name, tensor_list=tensors, whether_to_bucket=whether_to_bucket
        )

    def report_metrics(
        self, model_name: str, rank: int, train_iter: int, hyperparameters: BaguaHyperparameter, speed: float
    ) -> Response:
        """`speed` of steps with these hyperparameters, in any unit; more is better."""
        return self._post(
            "report_metrics",
            model_name=model_name,
            rank=rank,
            train_iter=train_iter,
            hyperparameters=hyperparameters.dict(),
            speed=speed,
        )

    def ask_hyperparameters(self, model_name: str, rank: int, train_iter: int) -> Response:
        """Its JSON has `recommended_hyperparameters` and `is_autotune_completed`."""
        return self._post("ask_hyperparameters", model_name=model_name, rank=rank, train_iter=train_iter)

    def report_tensor_execution_order(self, spans: Sequence[BaguaCoreTelemetrySpan]) -> Response:
        """The order in which tensors became ready."""
        return self._post("report_tensor_execution_order", spans=[span.dict() for span in spans])

    def health_check(self) -> bool:
        """Whether the service answers."""
        try:
            return self._request("GET", "health_check", None).ok
        except ConnectionError:
            return False

    def _post(self, path: str, **message: Any) -> Response:
        return self._request("POST", path, json.dumps(message).encode())

    def _request(self, method: str, path: str, body: bytes | None) -> Response:
        pause_s = _PAUSE_S
        for retries_left in reversed(range(_RETRIES + 1)):
            connection = http.client.HTTPConnection(self.service_addr, self.service_port, timeout=_TIMEOUT_S)
            try:
                connection.request(method, f"/api/v1/{path}", body, {"Content-Type": "application/json"})
                answer = connection.getresponse()
                text = answer.read(_MAX_ANSWER_BYTES).decode("utf-8", "replace")
                return Response(answer.status, text)
            except (OSError, http.client.HTTPException) as error:
                if not retries_left:
                    raise ConnectionError(
                        f"The autotune service did not answer {method} {path} ({error}).\n"
                        f"It was asked {_RETRIES + 1} times at {self.service_addr}:{self.service_port}.\n"
                        "Check that the service is running, and that its host can be reached."
                    ) from error
                time.sleep(pause_s)
                pause_s *= 2
            finally:
                connection.close()
        raise AssertionError("the last try returns or raises")
