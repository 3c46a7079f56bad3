"""The tables of the overview: what to expect by network, the current results and the losses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bagua.net.bench.api import Figure, Label, ResultFile
from bagua.net.doctor.choice import EXPECTATIONS

from .markdown import figure, size, table
from .reference import Results, describe

_LARGEST = 1 << 28
_SIZES = (1 << 20, 1 << 24, _LARGEST)
_MODELS = ("vgg16", "gpt2")
_TOLD_WITHOUT_LIMIT = 100_000
# How the files of all-reduce and VGG16 end.
_GPUS = {"2gpu": "two H200s", "4gpu": "four H200s", "2h100": "two H100s"}
_ONE_SETTING = "one setting"
_SWEEPS = ("sweep-2gpu", "sweep-4gpu", "algorithms-4ranks-1gpu", "sweep-cpu")
# Torch's own: where they are slower than gradient all-reduce, that is no loss of Bagua's.
_TORCH = ("torch_ddp", "ddp_fp16_hook", "ddp_powersgd_hook")


def current(results: Results) -> str:
    """What is measured at present, one line a measurement."""
    rows = []
    for name, gpus in _GPUS.items():
        one = results[f"allreduce-{name}"]
        rows.append([_link(one, f"All-reduce, 256 MiB, {gpus}"), *_all_reduce(one)])
    for name, gpus in _GPUS.items():
        one = results[f"vgg16-ddp-{name}"]
        compared = "the best of three settings" if name == "2h100" else _ONE_SETTING
        rows.append([_link(one, f"VGG16 training step, {gpus}"), *_vgg16(one, compared)])
    for name, title in (
        ("sweep-2gpu", "two H200s"),
        ("sweep-4gpu", "four H200s"),
        ("algorithms-4ranks-1gpu", "four ranks on one H200"),
    ):
        rows.append([_link(results[name], f"VGG16 step with ByteGrad, 10 Gb/s, {title}"), _bytegrad(results[name]), ""])
    limited = results["flow-limits-2h100"]
    for size_bytes in (1 << 18, 1 << 25):
        what = _link(limited, f"3.2 Gb/s, 400 Mb/s a flow, {size(size_bytes)}, two H100s")
        rows.append([what, *_all_reduce(limited, size_bytes, "16 sockets of two threads")])
    capped = results["flow-limits"]
    best = figure(capped.find("speedup", size_bytes=1 << 26))
    rows.append([_link(capped, "3.2 Gb/s, 400 Mb/s a flow, 64 MiB, two cores"), f"{best} plain sockets", ""])
    plain = results["plain-link-10g"]
    ours, bare = (figure(plain.find("busbw", backend=name, mtu=1500)) for name in ("plugin", "bare"))
    rows.append([_link(plain, "10 Gb/s, 64 MiB, two cores"), f"{ours} GB/s; plain sockets {bare}", ""])
    return table(["", "result", "compared with a hand-tuned NCCL"], rows)


def choice(_results: Results) -> str:
    """What a training step gains in each network: the same rows that `bagua-net doctor` shows."""
    rows = [
        [
            f"{one.rate_gbps:g} Gb/s",
            f"{one.over_default:.2f}x",
            f"{one.over_tuned:.2f}x",
            f"{one.int4:.2f}x",
            "not measured" if one.fsdp2 is None else f"{one.fsdp2:.2f}x",
        ]
        for one in EXPECTATIONS
    ]
    compared = ["plugin, over NCCL's default", "plugin, over NCCL's best setting"]
    return table(["network", *compared, "4-bit gradients, over exact ones", "FSDP2 with 4 bits, over plain"], rows)


def networks(results: Results) -> str:
    """What to expect in each network: one number a cell, of all-reduce and of training steps over the best of NCCL's
    settings, which it names, and of 4-bit gradients over the plugin."""
    times, trained = results["all-reduce-by-network-2h200"], results["steps-by-network-2h200"]

    def cells(found: ResultFile, cases: Sequence[Mapping[str, Label]]) -> list[str]:
        medians = [next(iter(found.select("speedup", **case)), None) for case in cases]
        return ["-" if one is None else f"{one.median:.2f}x{_setting(one)}" for one in medians]

    rows = []
    for rate, delay, flow, told in _links(times):
        labels = {"rate_gbps": rate, "delay_ms": delay, "per_flow_gbps": flow, "mtu": 9000, "told_mbps": told}
        where = {name: value for name, value in labels.items() if value is not None or name == "rate_gbps"}
        best = {"baseline": "nccl_tuned", **where}
        row = cells(times, [{"size_bytes": size_bytes, **best} for size_bytes in _SIZES])
        row += cells(trained, [{"model": model, **best} for model in _MODELS])
        row += cells(trained, [{"backend": "plugin_bytegrad_int4", "model": _MODELS[0], **where}])
        link = (f"{rate:g} Gb/s" if rate else "no limit") + (f", {delay:g} ms" if delay else "")
        rows.append([link + (f", {1000 * flow:g} Mb/s a flow" if flow else ""), *row])
    names = ["network", *map(size, _SIZES), "VGG16 step", "GPT-2 step", "VGG16 with 4-bit gradients"]
    return table(names, rows)


def _setting(one: Figure) -> str:
    return f" {str(one.case['setting']).removeprefix('NCCL ')}" if "setting" in one.case else ""


def _links(times: ResultFile) -> list[tuple[float | None, float, float | None, float]]:
    """Rate and delay, the limit per flow, and what the interface tells: of those that tell their speed."""
    links: list[tuple[float | None, float, float | None, float]] = []
    for one in times.select("speedup", mtu=9000):
        rate, delay, flow = (
            float(value) if (value := one.case.get(name)) else None
            for name in ("rate_gbps", "delay_ms", "per_flow_gbps")
        )
        told = 1000 * rate if rate else _TOLD_WITHOUT_LIMIT
        if one.case.get("told_mbps") == told:
            links.append((rate, delay or 0.0, flow, told))
    return sorted(dict.fromkeys(links), key=lambda link: (link[2] or 0, link[1] > 0, link[0] or float("inf"), link[1]))


def losses(results: Results) -> str:
    """Every speed-up below one of Bagua's, counted for each file; its worst case."""
    rows = []
    for result in results.values():
        ours = [one for one in result.figures if one.metric == "speedup" and one.case.get("algorithm") not in _TORCH]
        below = [one for one in ours if one.median < 1]
        if below:
            worst = min(below, key=lambda one: one.median)
            rows.append([_link(result, result.title), f"{len(below)} of {len(ours)}", figure(worst), _case(worst)])
    return table(["", "speed-ups below 1", "lowest", "of"], rows)


def other_losses(results: Results) -> str:
    """What is slower or costs more, and is not stored as a speed-up."""
    rows = []
    for name, gpus in _GPUS.items():
        one = results[f"allreduce-{name}"]
        rows.append(_pair(one, f"CPU at 256 MiB, {gpus}", "cpu", "NCCL's default", "nccl", size_bytes=_LARGEST))
        for size_bytes in (1 << 16,) if name == "2gpu" else (1 << 16, _LARGEST):
            what = f"All-reduce of {size(size_bytes)}, {gpus}"
            rows.append(_pair(one, what, "time", "shared memory", "nccl_shared_memory", size_bytes=size_bytes))
    exchange = results["point-to-point"]
    for rate in (25, 100):
        what = f"Send and receive of 64 KiB, {rate} Gb/s"
        default = {"size_bytes": 1 << 16, "rate_gbps": rate, "message_bytes": 1 << 17}
        rows.append(_pair(exchange, what, "time", "NCCL's default", "nccl", **default))
    delays = results["delays-cpu"]
    for delay in (5, 20):
        what = f"10 Gb/s with a delay of {delay} ms, 8 channels, two cores"
        rows.append(_pair(delays, what, "busbw", "plain sockets", "bare", delay_ms=delay, channels=8))
    ring = results["cpu-ring"]
    rows.append(_pair(ring, "Ring of 8 B, two cores", "time", "plain sockets", "bare", size_bytes=8))
    many = results["many-connections"]
    ratio = many.find("ratio_to_one_connection", connections=64, size_bytes=1 << 16)
    rows.append([_link(many, "Messages of 64 KiB over 64 connections"), figure(ratio), "one connection: 1x"])
    for name in _SWEEPS:
        ddp = results[name].select("speedup", algorithm="torch_ddp")
        ahead = [one for one in ddp if one.median > 1]
        best = max(ddp, key=lambda one: one.median)
        what = _link(results[name], f"Gradient all-reduce, {results[name].title}")
        rows.append([what, f"slower in {len(ahead)} of {len(ddp)}", f"torch's DDP: up to {figure(best)}"])
    return table(["", "Bagua", "compared with"], rows)


def _all_reduce(
    result: ResultFile, size_bytes: int = _LARGEST, settings: str = "the best of nine settings"
) -> tuple[str, str]:
    default = result.find("speedup", baseline="nccl", size_bytes=size_bytes)
    best = result.find("speedup", baseline="nccl_tuned_best", size_bytes=size_bytes)
    return f"{figure(default)} NCCL's default", f"{figure(best)}, {settings}"


def _vgg16(result: ResultFile, settings: str) -> tuple[str, str]:
    default = result.find("speedup", backend="plugin", baseline="nccl")
    for best in result.select("speedup", backend="plugin", baseline="nccl_tuned"):
        return f"{figure(default)} NCCL's default", f"{figure(best)}, {settings}"
    ours, tuned = (result.find("step_time", backend=name).median for name in ("plugin", "nccl_tuned"))
    return f"{figure(default)} NCCL's default", f"{tuned / ours:.2f}x, {settings}"


def _bytegrad(result: ResultFile) -> str:
    found = result.find("speedup", model="vgg16", algorithm="bytegrad", rate_gbps=10, delay_ms=0)
    return f"{figure(found)} gradient all-reduce"


def _pair(result: ResultFile, what: str, metric: str, other: str, baseline: str, **case: int) -> list[str]:
    ours, theirs = (result.find(metric, backend=backend, **case) for backend in ("plugin", baseline))
    return [_link(result, what), figure(ours, unit=True), f"{other}: {figure(theirs, unit=True)}"]


def _link(result: ResultFile, text: str) -> str:
    anchor = "".join(letter for letter in result.title.lower().replace(" ", "-") if letter.isalnum() or letter == "-")
    return f"[{text}](reference/results.md#{anchor})"


def _case(one: Figure) -> str:
    hidden = {"backend", "baseline", "ranks", "gpus"}
    return describe(one, [name for name in one.case if name not in hidden])
