"""The reference page: every figure of every result file, one compact table a metric."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bagua.net.bench.api import Figure, Label, ResultFile

from .markdown import figure, label, table

Results = Mapping[str, ResultFile]

# The labels that name the columns; the others name the rows.
_NETWORK = ("rate_gbps", "delay_ms")
_COLUMNS = (("backend", "baseline", "message_bytes"), ("elements", "threads"), ("algorithm", "baseline"), ("traffic",))
_MOST_COLUMNS = 10
# How the notes begin that the page's introduction has for all files.
_SAID_ONCE = (
    "Transcribed",
    "At that commit the option",
    "NCCL's faster intra-node",
    "nccl_tuned_best is, at each size",
)
_WORDS = {
    "rate_gbps": "{} Gb/s",
    "delay_ms": "{} ms",
    "threads": "{} threads",
    "bucket_mib": "buckets of {} MiB",
    "cpus_usable": "{} cores",
    "kernel": "Linux {}",
}


def reference(results: Results) -> str:
    """All figures of all files, with machine, versions, commit, date and command."""
    return "\n\n".join(_section(name, result) for name, result in results.items())


def _section(name: str, result: ResultFile) -> str:
    facts = [", ".join(_WORDS.get(key, "{}").format(value) for key, value in result.machine.items())]
    facts += [", ".join(f"{key} {value}" for key, value in result.versions.items())] if result.versions else []
    facts += [f"commit {result.commit}" if result.commit else "commit not known", result.date]
    parts = [f"## {result.title}", f"{'; '.join(facts)}; [{name}.json](../results/{name}.json)"]
    if result.command:
        parts.append(f"```sh\n{result.command}\n```")
    if notes := [f"- {note}" for note in result.notes if not note.startswith(_SAID_ONCE)]:
        parts.append("\n".join(notes))
    timed = {tuple(one.case.items()) for one in result.figures if one.metric == "time"}
    # Bus bandwidth follows from a time; the file has both.
    figures = [one for one in result.figures if one.metric != "busbw" or tuple(one.case.items()) not in timed]
    return "\n\n".join([*parts, *_tables(figures)])


def _tables(figures: Sequence[Figure]) -> list[str]:
    names = [name for name in _distinct(figures) if name not in ("averaged", "setting")]
    if "algorithm" in names and "rate_gbps" in names:
        return [
            _networks([one for one in figures if one.case["model"] == model]) for model in _values(figures, "model")
        ]
    groups = _COLUMNS if len(_values(figures, "algorithm")) < 4 else (("model",),)
    across = next((group for group in groups if group[0] in names), ())
    tables: dict[tuple[str, ...], list[list[Figure]]] = {}
    for metric in dict.fromkeys(one.metric for one in figures):
        some = [one for one in figures if one.metric == metric]
        down = tuple(
            name for name in names if name not in (*across, "baseline") and any(name in one.case for one in some)
        )
        parts = tables.setdefault(down, [[]])
        if len({_column(one, across) for one in (*parts[-1], *some)}) > _MOST_COLUMNS:
            parts.append([])
        parts[-1] += some
    return [_pivot(part, down, across) for down, parts in tables.items() for part in parts if part]


def _pivot(figures: Sequence[Figure], down: Sequence[str], across: Sequence[str]) -> str:
    rows = dict.fromkeys(describe(one, down) for one in figures)
    columns = dict.fromkeys(_column(one, across) for one in figures)
    cells = {(describe(one, down), _column(one, across)): _cell(one) for one in figures}
    header = [", ".join(name.removesuffix("_bytes").replace("_", " ") for name in down), *columns]
    return table(header, [[row, *(cells.get((row, column), "") for column in columns)] for row in rows])


def _networks(figures: Sequence[Figure]) -> str:
    """Algorithms by network, as the rows of speed-ups between a row of step times and one of averages."""
    rows = dict.fromkeys((str(one.case["algorithm"]), one.metric, one.unit) for one in figures)
    networks = dict.fromkeys(describe(one, _NETWORK) for one in figures)
    cells = {(str(one.case["algorithm"]), one.metric, describe(one, _NETWORK)): _cell(one) for one in figures}
    body = [
        [
            algorithm if metric == "speedup" else f"{algorithm}, {metric.replace('_', ' ')} ({unit})",
            *(cells.get((algorithm, metric, network), "") for network in networks),
        ]
        for algorithm, metric, unit in rows
    ]
    return table([str(figures[0].case["model"]), *networks], body)


def _cell(one: Figure) -> str:
    setting = f" {one.case['setting']}" if one.case.get("setting", "default") != "default" else ""
    return figure(one) + (" †" if "averaged" in one.case else "") + setting


def _column(one: Figure, across: Sequence[str]) -> str:
    where = describe(one, across)
    return f"{one.metric.replace('_', ' ')} ({one.unit}){', ' if where else ''}{where}"


def describe(one: Figure, names: Sequence[str]) -> str:
    """The values of a figure's labels, as words."""
    words = []
    for name in names:
        if name in one.case:
            value = one.case[name]
            text = label(name, value)
            text = _WORDS[name].format(text) if name in _WORDS and value is not None else text
            words.append(f"over {text}" if name == "baseline" else text)
    return ", ".join(words)


def _values(figures: Sequence[Figure], name: str) -> dict[Label, None]:
    return dict.fromkeys(one.case[name] for one in figures if name in one.case)


def _distinct(figures: Sequence[Figure]) -> list[str]:
    """The labels whose values differ."""
    names = dict.fromkeys(name for one in figures for name in one.case)
    return [name for name in names if len({one.case[name] for one in figures if name in one.case}) > 1]
