"""The sections that are generated into pages."""

from __future__ import annotations

from collections.abc import Mapping

from bagua.net.bench.result_file import Figure, ResultFile

from .markdown import figure, label, size, table

Results = Mapping[str, ResultFile]

_QUARTER_GIB = 1 << 28


def headline(results: Results) -> str:
    """Three figures, each compared with NCCL's default and, where it was measured, the best hand-tuned setting."""
    rows = [
        ["All-reduce of 256 MiB, two H200s", *_versus(results["allreduce-2gpu"], size_bytes=_QUARTER_GIB)],
        ["VGG16 training step, two H200s", *_versus(results["vgg16-ddp-2gpu"])],
        ["VGG16 step with ByteGrad at 10 Gb/s, two H200s", f"{_bytegrad(results, 'sweep-2gpu')} all-reduce", "-"],
    ]
    return table(["", "speed-up", "over a hand-tuned NCCL"], rows)


def current(results: Results) -> str:
    """What is measured at present, one line a measurement."""
    rows = []
    for gpus, name in ((2, "two"), (4, "four")):
        all_reduce = results[f"allreduce-{gpus}gpu"]
        rows.append(
            [f"[All-reduce, 256 MiB, {name} H200s]({_at(all_reduce)})", *_versus(all_reduce, size_bytes=_QUARTER_GIB)]
        )
    for gpus, name in ((2, "two"), (4, "four")):
        step = results[f"vgg16-ddp-{gpus}gpu"]
        rows.append([f"[VGG16 training step, {name} H200s]({_at(step)})", *_versus(step)])
    for name, title in (("sweep-2gpu", "two H200s"), ("sweep-4gpu", "four H200s")):
        rows.append(
            [f"[VGG16 step with ByteGrad, 10 Gb/s, {title}]({_at(results[name])})", _bytegrad(results, name), "-"]
        )
    capped = results["flow-limits"]
    best = capped.find("speedup", size_bytes=1 << 26)
    rows.append([f"[3.2 Gb/s, 400 Mb/s a flow, two cores]({_at(capped)})", f"{figure(best)} plain sockets", "-"])
    link = results["networks-32-cores"].find("busbw", backend="plugin", rate_gbps=100)
    rows.append([f"[100 Gb/s, 64 MiB, 32 cores]({_at(results['networks-32-cores'])})", figure(link, unit=True), "-"])
    return table(["", "result", "compared with a hand-tuned NCCL"], rows)


def losses(results: Results) -> str:
    """Every speed-up below one of the current files."""
    rows = []
    for result in results.values():
        below = [one for one in result.figures if one.metric == "speedup" and one.median < 1]
        if below:
            worst = min(below, key=lambda one: one.median)
            total = sum(one.metric == "speedup" for one in result.figures)
            rows.append([f"[{result.title}]({_at(result)})", f"{len(below)} of {total}", figure(worst), _case(worst)])
    return table(["", "speed-ups below 1", "lowest", "of"], rows)


def reference(results: Results) -> str:
    """All figures of all files, with machine, versions, commit, date and command."""
    return "\n\n".join(_section(name, result) for name, result in results.items())


def _versus(result: ResultFile, **case: int) -> tuple[str, str]:
    default = result.find("speedup", baseline="nccl", **case)
    tuned = [one for one in result.select("speedup", **case) if str(one.case["baseline"]).startswith("nccl_tuned")]
    return f"{figure(default)} NCCL's default", figure(tuned[0]) if tuned else "-"


def _bytegrad(results: Results, name: str) -> str:
    found = results[name].find("speedup", model="vgg16", algorithm="bytegrad", rate_gbps=10, delay_ms=0)
    return figure(found)


def _at(result: ResultFile) -> str:
    anchor = "".join(letter for letter in result.title.lower().replace(" ", "-") if letter.isalnum() or letter == "-")
    return f"reference/results.md#{anchor}"


def _case(one: Figure) -> str:
    hidden = {"baseline", "ranks", "gpus"}
    return ", ".join(
        size(int(value)) if name == "size_bytes" else f"{name} {label(name, value)}" if name[-1] == "s" else str(value)
        for name, value in one.case.items()
        if name not in hidden
    )


def _section(name: str, result: ResultFile) -> str:
    facts = [
        ["machine", ", ".join(f"{key} {value}" for key, value in result.machine.items())],
        ["versions", ", ".join(f"{key} {value}" for key, value in result.versions.items()) or "-"],
        ["commit", result.commit or "not known"],
        ["date", result.date],
        ["file", f"[{name}.json](../results/{name}.json)"],
    ]
    parts = [f"## {result.title}", table(["", ""], facts), f"```sh\n{result.command}\n```"]
    if result.notes:
        parts.append("\n".join(f"- {note}" for note in result.notes))
    return "\n\n".join([*parts, _figures(result)])


def _figures(result: ResultFile) -> str:
    """One row a case, one column a metric; labels that no two cases distinguish are left out."""
    cases = list(dict.fromkeys(tuple(one.case.items()) for one in result.figures))
    names = list(dict.fromkeys(name for case in cases for name, _ in case))
    names = [name for name in names if len({dict(case).get(name, "") for case in cases}) > 1]
    units = {one.metric: one.unit for one in result.figures}
    cells = {(tuple(one.case.items()), one.metric): figure(one) for one in result.figures}
    header = [*names, *(f"{metric} ({unit})" for metric, unit in units.items())]
    rows = [
        [
            *(label(name, dict(case)[name]) if name in dict(case) else "" for name in names),
            *(cells.get((case, metric), "") for metric in units),
        ]
        for case in cases
    ]
    return table(header, rows)
