"""Between the metrics and prometheus_client, which is imported by the functions that need it."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from bagua.net.exporter.metrics import SIZES_HELP, SIZES_NAME, PeerSums, families_of, size_histograms
from bagua.net.stats import HostReport, Snapshot, report, snapshot
from bagua.net.stats.sources import REPORT_PATH
from bagua.version import __version__

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

    from prometheus_client import CollectorRegistry, Metric

HEALTH_PATH = "/health"
# Of the old push: a Pushgateway, which Prometheus scrapes.
PUSH_VARIABLE = "BAGUA_NET_PROMETHEUS_ADDRESS"
PUSH_JOB = "bagua_net"
_PUSH_TIMEOUT_S = 10.0


def host_report() -> HostReport:
    return report(None, snapshot())


class HostCollector:
    """Reads the pages anew for every scrape. Several may come at once."""

    def __init__(self, read: Callable[[], HostReport] = host_report) -> None:
        self._read = read
        self._lock = threading.Lock()  # guards _peers
        self._peers = PeerSums()

    def as_json(self) -> dict[str, Any]:
        read = self._read()
        with self._lock:
            families = families_of(read, self._peers)
        sizes = {"name": SIZES_NAME, "type": "histogram", "help": SIZES_HELP}
        return {
            "host": read.host,
            "metrics": [
                *(family.as_json() for family in families),
                {**sizes, "samples": [asdict(one) for one in size_histograms(read)]},
            ],
        }

    def collect(self) -> Iterable[Metric]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        read = self._read()
        with self._lock:
            families = families_of(read, self._peers)
        for family in families:
            kind = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
            metric = kind(family.name, family.help, labels=family.label_names)
            for sample in family.samples:
                metric.add_metric(sample.labels, sample.value)
            yield metric
        sizes = HistogramMetricFamily(SIZES_NAME, SIZES_HELP, labels=("rank", "pid"))
        for one in size_histograms(read):
            sizes.add_metric(one.labels, one.buckets, one.sum)
        yield sizes


class ReportApp:
    """The WSGI application of the exporter: `/report` is what `bagua-net stats --json` prints, with rates since it was
    asked for last; `/health` says that the exporter runs; everything else is the metrics."""

    def __init__(self, metrics: WSGIApplication | None) -> None:
        assert metrics is not None  # the application of the server that has been started
        self._metrics = metrics
        self._lock = threading.Lock()  # guards _earlier
        self._earlier: Snapshot | None = None

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        path = environ.get("PATH_INFO")
        if path == HEALTH_PATH:
            start_response("200 OK", [("Content-Type", "text/plain; charset=utf-8")])
            return [f"ok, bagua-net {__version__}\n".encode()]
        if path != REPORT_PATH:
            return self._metrics(environ, start_response)
        later = snapshot()
        with self._lock:
            earlier, self._earlier = self._earlier, later
        start_response("200 OK", [("Content-Type", "application/json")])
        return [json.dumps(report(earlier, later).as_json()).encode()]


def registry_of(collector: HostCollector) -> CollectorRegistry:
    from prometheus_client import CollectorRegistry

    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    return registry


@dataclass(frozen=True)
class PushAddress:
    url: str
    user: str | None
    password: str | None

    @classmethod
    def parsed(cls, text: str) -> PushAddress:
        """Of "user:password@host:port", as the old bagua-net has it, or a URL.

        Raises:
            ValueError: it names no host.
        """
        parts = urlsplit(text if "://" in text else f"http://{text}")
        try:
            port = "" if parts.port is None else f":{parts.port}"
        except ValueError:  # names what it takes for the port, which may be part of a password
            raise ValueError("its port is not a number from 0 to 65535") from None
        if not parts.hostname or parts.scheme not in ("http", "https"):
            raise ValueError("it is not user:password@host:port or an http URL")
        host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
        password = None if parts.password is None else unquote(parts.password)
        user = None if parts.username is None else unquote(parts.username)
        return cls(f"{parts.scheme}://{host}{port}{parts.path}", user, password)

    def push(self, registry: CollectorRegistry) -> None:
        """Replaces what this host pushed before.

        Raises:
            OSError: the gateway does not answer, refuses, does not speak HTTP, or cannot exist.
        """
        from prometheus_client import push_to_gateway
        from prometheus_client.exposition import basic_auth_handler, default_handler

        def authorized(url: str, method: str, timeout: float | None, headers: Any, data: bytes) -> Any:
            return basic_auth_handler(url, method, timeout, headers, data, self.user, self.password)

        try:
            push_to_gateway(
                self.url,
                job=PUSH_JOB,
                registry=registry,
                grouping_key={"instance": socket.gethostname()},
                timeout=_PUSH_TIMEOUT_S,
                handler=default_handler if self.user is None else authorized,
            )
        except (http.client.HTTPException, UnicodeError) as error:
            raise OSError(str(error)) from error
