"""`bagua-net exporter`: metrics that never fall and stay few, the endpoint, the push, and Prometheus itself."""

from __future__ import annotations

import base64
import http.server
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.fresh_process import RunCommand, RunNet
from support.import_arrows import REPOSITORY
from support.ports import free_port
from support.processes import wait_until
from support.stats_page import Comm, Stream, page_bytes, page_of_this_process

from bagua.cli.net import main
from bagua.net.exporter.collector import HostCollector, PushAddress, registry_of
from bagua.net.exporter.metrics import MAX_DEVICES, MAX_PEERS, OTHER
from bagua.net.stats import HostReport, report, snapshot
from bagua.net.stats.sources import EndpointSource

ALERTS = REPOSITORY / "docs" / "assets" / "observe" / "bagua-net-alerts.yml"
DASHBOARD = REPOSITORY / "docs" / "assets" / "observe" / "bagua-net-dashboard.json"
ANSWER_S = 60.0


def own() -> HostReport:
    return report(None, snapshot(os.getpid()))


def samples(collector: HostCollector, name: str) -> dict[tuple[str, ...], float]:
    """By the values of the labels."""
    return {
        tuple(one.labels.values()): one.value
        for metric in collector.collect()
        for one in metric.samples
        if one.name == name
    }


def sending(peer: str, sent: int, opened_ms: int = 1000) -> Comm:
    return Comm(peer, opened_ms=opened_ms, counters={"inline_bytes": sent, "inline_messages": 1})


def test_sums_by_peer_do_not_fall_when_comms_close() -> None:
    collector = HostCollector(own)
    name = "bagua_net_peer_bytes_total"
    labels = ("3", str(os.getpid()), "10.0.0.2", "eth0", "send")
    with page_of_this_process(page_bytes([sending("10.0.0.2:1 (process 5)", 100)], rank=3, started_ms=1)) as page:
        assert samples(collector, name) == {labels: 100}
        os.pwrite(page, page_bytes([sending("10.0.0.2:1 (process 5)", 150)], rank=3, started_ms=1), 0)
        assert samples(collector, name) == {labels: 150}
        os.pwrite(page, page_bytes([], rank=3, started_ms=1), 0)
        assert samples(collector, name) == {labels: 150}
        again = sending("10.0.0.2:9 (process 6)", 7, opened_ms=2000)
        os.pwrite(page, page_bytes([again], rank=3, started_ms=1), 0)
        assert samples(collector, name) == {labels: 157}
        # Another process that got the same pid begins anew.
        os.pwrite(page, page_bytes([again], rank=3, started_ms=2), 0)
        assert samples(collector, name) == {labels: 7}


def test_the_time_that_data_waited_is_told_by_cause() -> None:
    """What a kernel counts as busy has the time in it in which the peer did not read."""
    sent = {"busy_us": 5_000_000, "peer_not_reading_us": 3_000_000, "worker_wait_ns": 1_000_000_000}
    received = {"parked_ns": 4_000_000_000}
    comms = [Comm(streams=[Stream(counters=sent)]), Comm(direction=1, streams=[Stream(counters=received)])]
    with page_of_this_process(page_bytes(comms)):
        found = samples(HostCollector(own), "bagua_net_peer_stalled_seconds_total")
    causes = {"peer_not_reading": 3, "network": 2, "worker": 1, "receive_not_posted": 4}
    assert {labels[-1]: value for labels, value in found.items()} == causes


def test_an_all_to_all_does_not_make_a_series_of_every_peer() -> None:
    comms = [sending(f"10.0.{number // 250}.{number % 250}:1 (process 5)", 10) for number in range(3 * MAX_PEERS)]
    with page_of_this_process(page_bytes(comms)):
        found = samples(HostCollector(own), "bagua_net_peer_bytes_total")
    assert len(found) == MAX_PEERS + 1
    assert sum(value for labels, value in found.items() if labels[2] == OTHER) == 10 * 2 * MAX_PEERS


def test_a_process_that_renames_its_devices_does_not_grow_the_exporter() -> None:
    collector = HostCollector(own)
    found = {}
    for turn in range(3):
        comms = [Comm(interface=f"eth{turn}.{number}", counters={"inline_bytes": 1}) for number in range(MAX_DEVICES)]
        with page_of_this_process(page_bytes(comms, started_ms=1)):
            found = samples(collector, "bagua_net_peer_bytes_total")
    assert len(found) == MAX_DEVICES + 1


def test_sizes_are_a_cumulative_histogram() -> None:
    counters = {"inline_bytes": 1000, "inline_messages": 3, "message_sizes_0": 2, "message_sizes_8": 1}
    with page_of_this_process(page_bytes([Comm(counters=counters)])):
        collector = HostCollector(own)
        buckets = samples(collector, "bagua_net_message_size_bytes_bucket")
        sums = samples(collector, "bagua_net_message_size_bytes_sum")
    assert [value for _, value in sorted(buckets.items(), key=lambda one: float(one[0][-1]))] == [2.0] * 8 + [3.0]
    assert list(sums.values()) == [1000]


@contextmanager
def exporter(environment: dict[str, str], *options: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    words = [sys.executable, "-m", "bagua.cli.net", "exporter", "--port", "0", *options]
    pipe = subprocess.PIPE
    with subprocess.Popen(words, env=environment, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            found = re.fullmatch(r"serving (http://127\.0\.0\.1:\d+/metrics)\n", line)
            assert found is not None, line or process.communicate(timeout=ANSWER_S)[1]
            yield found[1], process
            process.send_signal(signal.SIGINT)
            assert process.wait(ANSWER_S) == 130
        finally:
            process.kill()


def test_the_endpoint_serves_what_prometheus_reads(environment: dict[str, str]) -> None:
    with (
        page_of_this_process(page_bytes([sending("10.0.0.2:1 (process 5)", 123)], rank=2)),
        exporter(environment) as it,
        urllib.request.urlopen(it[0], timeout=ANSWER_S) as answer,
    ):
        text = answer.read().decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    own = [one for one in families["bagua_net_sent_bytes"].samples if one.labels["pid"] == str(os.getpid())]
    [sent] = [one for one in own if one.value]
    assert (sent.labels["rank"], sent.labels["path"], sent.value) == ("2", "inline", 123)
    assert families["bagua_net_processes"].samples[0].value >= 1


def test_it_says_that_it_runs_and_which_version_it_is(environment: dict[str, str], net: RunNet) -> None:
    version = net("exporter", "--version").stdout
    assert version == net("--version").stdout
    with (
        exporter(environment) as (url, _),
        urllib.request.urlopen(url.replace("/metrics", "/health"), timeout=ANSWER_S) as answer,
    ):
        assert (answer.status, answer.read().decode()) == (200, f"ok, {version}")


def test_top_reads_the_endpoint(environment: dict[str, str], net: RunNet) -> None:
    with (
        page_of_this_process(page_bytes([sending("10.0.0.2:1 (process 5)", 123)], rank=3)),
        exporter(environment) as (url, _),
    ):
        words = ["top", "--json", "--interval", "0.1", "--endpoints"]
        shown = net(*words, url.removeprefix("http://").removesuffix("/metrics"))
        assert shown.returncode == 0, shown.stderr
        read = json.loads(shown.stdout)
        assert [one["rank"] for one in read["processes"] if one["pid"] == os.getpid()] == [3]
        assert read["interval_s"] > 0
        assert net(*words, f"{url}/x").returncode == 2


@pytest.mark.parametrize(
    ("endpoint", "message"),
    [
        ("", "is not a host; write HOST"),
        ("foo", "'foo' names no port; write HOST:PORT"),
        ("node1:99999", "port 99999, which must be between 1 and 65535"),
        ("file:///etc/passwd", "is not HOST:PORT or http://HOST:PORT"),
        ("http://node1/other", "is not HOST:PORT or http://HOST:PORT"),
    ],
)
def test_what_is_no_endpoint(endpoint: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EndpointSource(endpoint, 1.0)


@pytest.mark.parametrize("command", ["top", "blame"])
def test_an_endpoint_where_nothing_listens(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    assert main([command, "--json", "--endpoints", f"127.0.0.1:{port}"]) == 1
    assert "Connection refused\nStart `bagua-net exporter` there" in capsys.readouterr().err


class _OtherServer(http.server.BaseHTTPRequestHandler):
    """Another web server: it has a page of its own, or none, or has failed."""

    code = 200

    def do_GET(self) -> None:
        self.send_response(self.code)
        self.end_headers()
        self.wfile.write(b"<html>")

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (200, " is not a bagua-net exporter (Expecting value"),
        (404, " is not a bagua-net exporter (HTTP Error 404: Not Found).\nGive the address that `bagua-net exporter`"),
        (503, "/report: HTTP Error 503: Service Unavailable"),  # an exporter may stand behind it
    ],
)
@pytest.mark.parametrize("command", ["top", "blame"])
def test_an_endpoint_of_something_else_is_named(
    command: str, code: int, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(_OtherServer, "code", code)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _OtherServer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        assert main([command, "--json", "--endpoints", url]) == 1
        server.shutdown()
    assert f"{url}{said}" in capsys.readouterr().err


def test_places_that_cannot_be_listened_on(net: RunNet) -> None:
    name = 70 * "a"  # a label has at most 63
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as taken:
        for words, place in (
            (["--port", taken.server_port], f"127.0.0.1, port {taken.server_port}"),
            (["--address", name], "aaaa"),
        ):
            done = net("exporter", *words)
            assert done.returncode == 1
            assert f"cannot listen on {place}" in done.stderr
            assert ("aaaa is not an address of this host (" in done.stderr) == ("--address" in words)
            assert ("Another exporter may run on this host" in done.stderr) == ("--port" in words)
            assert "Traceback" not in done.stderr
    with pytest.raises(OSError, match="label"):
        PushAddress.parsed(name).push(registry_of(HostCollector(own)))


def test_without_the_package_the_error_names_the_extra(environment: dict[str, str], run_command: RunCommand) -> None:
    script = "import sys; sys.modules['prometheus_client'] = None; from bagua.cli.net import main; sys.exit(main())"
    done = run_command([sys.executable, "-c", script, "exporter"], environment)
    assert (done.returncode, done.stdout) == (1, "")
    assert "pip install prometheus_client" in done.stderr
    done = run_command([sys.executable, "-c", script, "exporter", "--json"], environment)
    assert done.returncode == 0
    assert "bagua_net_processes" in {one["name"] for one in json.loads(done.stdout)["metrics"]}


@contextmanager
def gateway(code: int) -> Iterator[tuple[str, list[tuple[str, str, bytes]]]]:
    """A Pushgateway's door: what it was sent, as (path, authorization, body)."""
    received: list[tuple[str, str, bytes]] = []

    class Door(http.server.BaseHTTPRequestHandler):
        def do_PUT(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            received.append((self.path, self.headers.get("Authorization", ""), body))
            self.send_response(code)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Door) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_port}", received
        finally:
            server.shutdown()
            thread.join()


def test_the_old_variable_pushes(environment: dict[str, str]) -> None:
    with (
        page_of_this_process(page_bytes([sending("10.0.0.2:1 (process 5)", 123)])),
        gateway(200) as (host, received),
        exporter({**environment, "BAGUA_NET_PROMETHEUS_ADDRESS": f"me:se%40cret@{host}"}),
    ):
        wait_until(lambda: bool(received), "a push")
    path, authorization, body = received[0]
    assert path.startswith("/metrics/job/bagua_net/instance")
    assert base64.b64decode(authorization.removeprefix("Basic ")).decode() == "me:se@cret"
    assert b"bagua_net_sent_bytes_total" in body


def test_a_gateway_that_refuses_is_told_and_not_fatal(environment: dict[str, str]) -> None:
    with gateway(500) as (host, _), exporter({**environment, "BAGUA_NET_PROMETHEUS_ADDRESS": host}) as (url, process):
        assert process.stderr is not None
        assert f"pushing to http://{host} failed" in process.stderr.readline()
        with urllib.request.urlopen(url, timeout=ANSWER_S) as answer:
            assert answer.status == 200


def test_a_gateway_that_does_not_speak_http_is_told_and_not_fatal(environment: dict[str, str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as door:
        address = f"127.0.0.1:{door.getsockname()[1]}"
        with exporter({**environment, "BAGUA_NET_PROMETHEUS_ADDRESS": address}) as (url, process):
            door.settimeout(ANSWER_S)
            caller, _ = door.accept()
            with caller:
                caller.sendall(b"220 mail.example.org ESMTP\r\n")
                caller.shutdown(socket.SHUT_WR)
                assert process.stderr is not None
                assert f"pushing to http://{address} failed" in process.stderr.readline()
            with urllib.request.urlopen(url, timeout=ANSWER_S) as answer:
                assert answer.status == 200


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("me:secret@gate:9091", PushAddress("http://gate:9091", "me", "secret")),
        ("gate", PushAddress("http://gate", None, None)),
        ("https://me@[::1]:1/base", PushAddress("https://[::1]:1/base", "me", None)),
    ],
)
def test_addresses_to_push_to(text: str, expected: PushAddress) -> None:
    assert PushAddress.parsed(text) == expected


def test_an_address_that_is_none_is_an_error_without_the_password(net: RunNet) -> None:
    for text in ("me:secret@", "ftp://gate", "gate:port", "me:secret/9@gate"):
        with pytest.raises(ValueError) as error:  # noqa: PT011  whichever it is
            PushAddress.parsed(text)
        assert "secret" not in str(error.value)
    done = net("exporter", "--port", 0, BAGUA_NET_PROMETHEUS_ADDRESS="me:secret@")
    assert done.returncode == 2
    assert "BAGUA_NET_PROMETHEUS_ADDRESS" in done.stderr
    assert "secret" not in done.stderr


def metric_names() -> set[str]:
    with page_of_this_process(page_bytes([sending("10.0.0.2:1 (process 5)", 1), Comm(direction=1)])):
        metrics = list(registry_of(HostCollector(own)).collect())
    suffixes = {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"]}
    return {metric.name + suffix for metric in metrics for suffix in suffixes.get(metric.type, [""])}


def test_dashboard_and_alerts_use_metrics_that_exist() -> None:
    board = json.loads(DASHBOARD.read_text())
    expressions = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    used = set(re.findall(r"bagua_net_\w+", " ".join(expressions) + ALERTS.read_text()))
    assert len(used) > 10
    assert used - metric_names() == set()


needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="Prometheus is missing: apt-get install prometheus"
)

RULE_TEST = """
rule_files: [{rules}]
evaluation_interval: 15s
tests:
  - interval: 15s
    input_series:
      - {{series: 'bagua_net_comms_failed_total{{rank="1",pid="7"}}', values: '0x8 1x8'}}
      - {{series: 'bagua_net_streams_lost_total{{rank="1",pid="7"}}', values: '0x8 2x8'}}
      - {{series: 'bagua_net_nic_up{{rank="1",pid="7",nic="eth1"}}', values: '1x4 0x12'}}
      - {{series: 'bagua_net_oldest_request_seconds{{rank="1",pid="7"}}', values: '0+15x16'}}
    alert_rule_test:
      - {{eval_time: 1m, alertname: BaguaNetPeerLost, exp_alerts: []}}
      - {{eval_time: 1m, alertname: BaguaNetStall, exp_alerts: []}}
    promql_expr_test:
      - expr: count by (alertname) (ALERTS{{alertstate="firing"}})
        eval_time: 3m
        exp_samples:
          - {{labels: '{{alertname="BaguaNetPeerLost"}}', value: 1}}
          - {{labels: '{{alertname="BaguaNetStreamLost"}}', value: 1}}
          - {{labels: '{{alertname="BaguaNetNicDown"}}', value: 1}}
          - {{labels: '{{alertname="BaguaNetStall"}}', value: 1}}
"""


@needs_promtool
def test_the_alerts_fire(tmp_path: Path, run_command: RunCommand) -> None:
    file = tmp_path / "alerts_test.yml"
    file.write_text(RULE_TEST.format(rules=ALERTS))
    done = run_command(["promtool", "test", "rules", str(file)], dict(os.environ))
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_prometheus_scrapes_it(environment: dict[str, str], tmp_path: Path) -> None:
    port = free_port()
    with (
        page_of_this_process(page_bytes([sending("10.0.0.2:1 (process 5)", 123)], rank=2)),
        exporter(environment) as it,
    ):
        target = it[0].split("/")[2]
        config = tmp_path / "prometheus.yml"
        config.write_text(
            f"global: {{scrape_interval: 200ms}}\nrule_files: [{ALERTS}]\n"
            f"scrape_configs: [{{job_name: bagua-net, static_configs: [{{targets: ['{target}']}}]}}]\n"
        )
        words = ["prometheus", f"--config.file={config}", f"--storage.tsdb.path={tmp_path / 'data'}"]
        words += [f"--web.listen-address=127.0.0.1:{port}", "--log.level=error"]
        with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            try:
                found: list[Any] = []

                def is_scraped() -> bool:
                    query = f'bagua_net_sent_bytes_total{{pid="{os.getpid()}",path="inline"}}'
                    api = f"http://127.0.0.1:{port}/api/v1/query?query={urllib.parse.quote(query)}"
                    try:
                        with urllib.request.urlopen(api, timeout=ANSWER_S) as answer:
                            found[:] = json.loads(answer.read())["data"]["result"]
                    except (urllib.error.URLError, ConnectionError):
                        return False
                    return bool(found)

                wait_until(is_scraped, "a scrape")
            finally:
                process.terminate()
                process.wait(ANSWER_S)
    assert found[0]["metric"]["rank"] == "2"
    assert found[0]["value"][1] == "123"
