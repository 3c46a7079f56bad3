"""The runner that all tools share.

A tool is a class derived from `Tool`, with three parts:

- a plan: groups of cases, and the variants of each. A `Case` is what is measured, such as a size of all-reduce in a
  network. A variant is the name of one way to do it: a backend, an algorithm. A group is what one start
  of processes serves: a network, or all cases.
- `measure`, which measures one variant in one case for one turn and returns a sample: a dict that JSON can hold. On
  each rank, it is a function of the tool's module (measure.rank); `sample` combines what the ranks return. A tool that
  starts other processes, or several groups of ranks, has a `session(group, plan)` of its own: a context manager that
  yields the function.
- a table: `columns`, whose cells are functions of a `Row`, which has the samples of one variant in one case and those
  that they are compared with. `figures` of a row are what the result file has of it.

Everything else is here. Variants take turns in one run, in an order that rotates (bagua.net.bench.turns), so that drift
of the machine affects all of them. Ratios are those of two turns of the same round (bagua.net.bench.verdict). Groups
share --time-limit; no round begins that would not fit, and each case has one. An exception of `FAILURES` ends a group
only, and is an error of the report. After Ctrl-C or SIGTERM, what was measured until then is reported.

--details names a file of JSON lines: each sample is appended to it as it comes. A run that finds such a file measures
what it lacks, and reports all that it holds; of a round that was interrupted, what `Tool.keeps_turns` says. --json is
the result file (bagua.net.bench.result_file), rewritten after each group.

Exit status: 0, or 1 after an error or without a measurement, or 2 if an option was wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from typing import Any

from netlab import NetlabError

from bagua.net.bench.api import (
    MISSING,
    BenchError,
    Column,
    Event,
    Figure,
    Label,
    PairedRatio,
    Progress,
    Turns,
    backend_label,
    check_output_files,
    describe_machine,
    figures,
    format_time_us,
    make_folder,
    paired_ratio,
    render_rows,
    result_of,
    sharing_of,
    shows_colour,
    within,
    write_result,
)
from measure.processes import Placement, Ranks, RanksLostError

Sample = dict[str, Any]
Measure = Callable[[Any, str, int], Sample]
Plan = Mapping[Any, Sequence[str]]

DAY_S = 86400.0
FAILURES = (BenchError, NetlabError, RanksLostError)
_PLOT_SUFFIXES = (".png", ".svg", ".pdf")
_NAMES = {
    "with-bagua": "gradient_allreduce",
    "decentralized-shift-one": "shift_one",
    "decentralized-shift_one": "shift_one",
}


# --- options ---------------------------------------------------------------------------------------------------------


# How long it takes; see Tool.length.
_LENGTH = (
    ("--rounds", within(int, 1, 1000), "turns of each in each case"),
    ("--time-limit", within(float, 1.0, DAY_S), "seconds for all; no round begins that is longer than what is left"),
    ("--timeout", within(float, 1.0, DAY_S), "seconds for one turn"),
)


def several(parse: Callable[[str], Any]) -> Callable[[str], tuple[Any, ...]]:
    """For argparse: one or several, with commas, each once; `none` is none."""

    def convert(text: str) -> tuple[Any, ...]:
        try:
            return tuple(dict.fromkeys(parse(part) for part in text.split(",") if part != "none"))
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return convert


def choose_device(
    parser: argparse.ArgumentParser, given: argparse.Namespace, *, auto_is_cuda_with_any: bool = False
) -> None:
    """Sets `given.device` to "cuda" or "cpu", and `given.sharing` to how ranks share GPUs, or None. Ends the program if
    there are not enough GPUs.

    Args:
        auto_is_cuda_with_any: Let `auto` mean CUDA if there is any GPU, even if there are fewer than ranks.
    """
    found = 0
    if given.device != "cpu":
        import torch  # not every tool needs it

        found = torch.cuda.device_count()
    auto_needs = 1 if auto_is_cuda_with_any or given.share_gpus else given.ranks
    is_cuda = given.device == "cuda" or (given.device == "auto" and found >= auto_needs)
    if is_cuda and found < given.ranks and not (found and given.share_gpus):
        fewer = "lower it, add --share-gpus to have several ranks on a GPU, or " if found else ""
        parser.error(
            f"--nproc-per-node {given.ranks} needs as many GPUs, and torch sees {found}; {fewer}use --device cpu"
        )
    given.device = "cuda" if is_cuda else "cpu"
    given.sharing = sharing_of(given.ranks, found) if is_cuda else None


# --- rows ------------------------------------------------------------------------------------------------------------


class Case:
    """What is measured, by name: a network, a model. str() is all of it but the network, which is that of the group."""

    def __init__(self, **fields: Any) -> None:
        vars(self).update(fields)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Case) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash(frozenset(vars(self).items()))

    def __str__(self) -> str:
        return ", ".join(str(value) for name, value in vars(self).items() if name != "network")


@dataclass(frozen=True)
class Row:
    """One variant in one case. Columns and figures are functions of it. `values`, `median` and `over` are those of
    another variant of the same case if one is named."""

    turns: Turns[Sample]
    case: Any
    variant: str = ""

    def values(self, name: str = "seconds", variant: str | None = None) -> list[Any]:
        """By round."""
        return [one[name] for one in self.turns.of(self.case, self.variant if variant is None else variant)]

    def median(self, name: str = "seconds", variant: str | None = None) -> float | None:
        found = [value for value in self.values(name, variant) if value is not None]
        return statistics.median(found) if found else None

    def over(self, baseline: str | None, name: str = "seconds", variant: str | None = None) -> PairedRatio | None:
        """The baseline's value over this one's, by round: above 1 this one is faster. None without common rounds."""
        mine = self.variant if variant is None else variant
        pairs = [] if baseline is None else self.turns.pairs(self.case, baseline, mine)
        return paired_ratio([one[name] for one, _ in pairs], [other[name] for _, other in pairs]) if pairs else None


def time_us(seconds: float | None) -> str:
    return MISSING if seconds is None else format_time_us(seconds * 1e6)


def number(value: float | None, style: str) -> str:
    return MISSING if value is None else format(value, style)


def ratio(value: PairedRatio | None, style: str = ".2f") -> str:
    return MISSING if value is None else f"{value.median:{style}} ({value.low:{style}}..{value.high:{style}})"


def spread(values: Iterable[float | None]) -> str:
    """Median and range."""
    known = [value for value in values if value is not None]
    return f"{statistics.median(known):.4g} ({min(known):.4g}..{max(known):.4g})" if known else MISSING


def format_ms(value: float) -> str:
    """Three to four significant digits: 0.938, 9.38, 93.8, 938."""
    return f"{value:.{sum(value < bound for bound in (1, 10, 100))}f}"


def name_of(choice: str) -> str:
    """The label of an algorithm or a backend in result files."""
    return _NAMES.get(choice, backend_label(choice))


def ratio_figure(labels: Mapping[str, Label], found: PairedRatio | None) -> list[Figure]:
    if found is None:
        return []
    return [Figure(dict(labels), "speedup", "x", found.median, found.low, found.high, found.repetitions)]


# --- tools -----------------------------------------------------------------------------------------------------------


class Tool:
    """See the head of this file. Made when options are parsed; `run` is the whole of it.

    Attributes:
        name: On the command line.
        title: Of the result file, with options in braces.
        case_type: Of the cases.
        columns: Of the table; by default the labels of a row, and its metrics.
        metrics: Of `figures`: metric, unit, and the values of a row.
        ranks: The least and the largest number of ranks; None: the tool starts none.
        options: Name, type or choices, default, help. Without a type it is a switch.
        length: Defaults of --rounds, --time-limit and --timeout; None: without that option.
        auto_is_cuda: Without GPUs, --device auto is refused: gloo would use neither NCCL nor the plugin.
        keeps_logs: Has --output-dir, where NCCL's logs are kept.
        same: Options that all runs of one --details file must have in common, besides ranks and device.
        module: Whose function `measure(device, variant, number, **case, **same)` the ranks call; by default the tool's.
        settings: Environment variables of these ranks.
        keeps_turns: Of a round that an earlier run did not finish; otherwise it is taken again as a whole.
        rounds_first: Take a round of all cases before the next round.
        least_s: A group is not begun with less time.
    """

    name = ""
    title = ""
    epilog = ""
    case_type: type[Case] = Case
    columns: Sequence[Column[Any]] = ()
    metrics: Sequence[tuple[str, str, Callable[[Any], Sequence[float | None]]]] = ()
    ranks: tuple[int, int] | None = (1, 128)
    options: Sequence[tuple[str, Any, Any, str]] = ()
    length: tuple[int | None, float, float | None] = (1, DAY_S, None)
    auto_is_cuda = False
    keeps_logs = False
    module = ""
    settings: Mapping[str, str] | None = None
    keeps_turns = False
    rounds_first = False
    least_s = 0.0
    same: Sequence[str] = ()

    def __init__(self, given: argparse.Namespace) -> None:
        """Raises ValueError: an option is wrong."""
        self.given = given
        self.turns: Turns[Sample] = Turns()
        self.facts: dict[str, Any] = {}
        self.lines: list[str] = []
        self.notes: list[str] = []
        self.errors: list[str] = []
        self.folder = Path()  # of logs
        names = ("ranks", "device", *self.same)
        self._options = {name: getattr(given, name) for name in names if hasattr(given, name)}
        if given.details is not None:
            _read_details(self, given.details)

    # What a tool defines.

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        """Further ones."""

    @classmethod
    def check(cls, parser: argparse.ArgumentParser, given: argparse.Namespace) -> None:
        """Ends the program if options contradict each other."""
        if cls.ranks is not None:
            if cls.auto_is_cuda and given.device == "auto":
                given.device = "cuda"
            choose_device(parser, given)

    @property
    def rounds(self) -> int:
        return self.given.rounds

    def cases(self) -> Plan:
        """Of a tool with one group."""
        raise NotImplementedError

    def plan(self) -> Mapping[Any, Plan]:
        """By group. str() of a group names it in errors; one that is empty is not named."""
        return {"": self.cases()}

    def placement(self) -> contextlib.AbstractContextManager[Placement | None]:
        """Where the ranks of the default session are."""
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def session(self, group: Any, plan: Plan) -> Iterator[Measure]:
        given = self.given
        fields = {name: getattr(given, name) for name in self.same}
        with (
            self.placement() as placement,
            Ranks(given, self.module or type(self).__module__, settings=self.settings, placement=placement) as ranks,
        ):
            self.learn(ranks.ready().facts)
            yield lambda case, variant, number: self.sample(
                ranks.call("measure", variant=variant, number=number, **vars(case), **fields)
            )

    def sample(self, events: Sequence[Event]) -> Sample:
        """Of the answers of all ranks."""
        return events[0]

    def variants(self, case: Any, planned: Sequence[str]) -> Sequence[str]:
        """Asked before the first turn of a case."""
        return planned

    def rows(self) -> Sequence[Row]:
        """Case by case."""
        samples = self.turns.samples
        cases = dict.fromkeys(case for case, _ in samples)
        return [Row(self.turns, case, name) for case in cases for of, name in samples if of == case]

    def labels(self, row: Row) -> Mapping[str, Label]:
        return {**vars(row.case), **self.where}

    def figures(self, row: Row) -> Iterable[Figure]:
        return figures(self.labels(row), {(metric, unit): values(row) for metric, unit, values in self.metrics})

    def all_figures(self, rows: Sequence[Row]) -> list[Figure]:
        return [figure for row in rows for figure in self.figures(row)]

    def closing(self, rows: Sequence[Row]) -> Iterable[str]:
        """Lines after the table."""
        return ()

    def faults(self, rows: Sequence[Row]) -> Iterable[str]:
        """Errors that samples show."""
        return ()

    def draw(self, rows: Sequence[Row]) -> list[Path]:
        """Draws --plot. Returns the files."""
        return []

    def heading(self) -> str:
        return ranks_text(self.given, self.facts)

    def parameters(self) -> Mapping[str, Any]:
        """Of the result file, in addition to the options."""
        return {}

    def block(self, row: Row) -> object:
        """Rows between which this changes have a blank line between them."""
        return getattr(row.case, "network", None)

    def is_loud(self, row: Row) -> bool:
        return False

    # What a tool uses.

    @property
    def where(self) -> dict[str, Label]:
        """Labels of all figures."""
        given = self.given
        gpus = 0 if given.device == "cpu" else given.ranks if given.sharing is None else given.sharing.gpus
        return {"ranks": given.ranks, "gpus": gpus}

    def named(self, title: str) -> str:
        """With the options that it names."""
        given = vars(self.given).items()
        return title.format(**{name: ", ".join(map(str, v)) if isinstance(v, tuple) else v for name, v in given})

    def learn(self, facts: Mapping[str, Any]) -> None:
        """What ranks report about themselves; the last ones count."""
        if facts and facts != self.facts:
            self._record({"facts": dict(facts)})

    # The run.

    @classmethod
    def main(cls, words: Sequence[str] | None = None) -> int:
        description = sys.modules[cls.__module__].__doc__
        parser = argparse.ArgumentParser(
            prog=f"PYTHONPATH=tools python -m measure {cls.name}",
            description=description,
            epilog=cls.epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        if cls.ranks is not None:
            about = "ranks, one per GPU (default 2)"
            count = within(int, *cls.ranks)
            parser.add_argument("--nproc-per-node", type=count, default=2, metavar="N", dest="ranks", help=about)
            about = "auto: CUDA with enough GPUs"
            parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto", help=about)
            about = "several ranks on a GPU where there are too few; NCCL then takes each rank for a node"
            parser.add_argument("--share-gpus", action="store_true", help=about)
        cls.add_options(parser)
        for name, convert, default, about in cls.options:
            option, shown = "--" + name.replace("_", "-"), ",".join(default) if isinstance(default, tuple) else default
            if convert is None:
                parser.add_argument(option, action="store_true", help=about)
            else:
                text = about if shown in (None, "") else f"{about} (default {shown})"
                kind = {"type": convert} if callable(convert) else {"choices": convert, "metavar": name.upper()}
                parser.add_argument(option, default=default, help=text, **kind)
        length = parser.add_argument_group("how long")
        for (name, convert, about), default in zip(_LENGTH, cls.length, strict=True):
            if default is not None:
                length.add_argument(name, type=convert, default=default, help=f"{about} (default {default:g})")
        output = parser.add_argument_group("results")
        output.add_argument("--json", type=Path, metavar="PATH", help="result file: medians and their range")
        output.add_argument(
            "--details",
            "--lines",
            type=Path,
            metavar="PATH",
            help="append every turn, as JSON lines, and measure what the file lacks",
        )
        if cls.keeps_logs:
            output.add_argument("--output-dir", type=Path, metavar="DIR", help="keep NCCL's logs there")
        given = parser.parse_args(words)
        cls.check(parser, given)
        try:
            _check_files(given)
            tool = cls(given)
        except ValueError as error:
            parser.error(str(error))
        return tool.run()

    def run(self) -> int:
        plans = {group: lacking for group, plan in self.plan().items() if (lacking := self._remaining(plan))}
        turns = self.rounds * sum(len(names) for plan in plans.values() for names in plan.values())
        deadline = time.monotonic() + self.given.time_limit
        # Of a scheduler or `timeout`: the report is written, as after Ctrl-C.
        before = signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            with tempfile.TemporaryDirectory(prefix="measure-") as temporary, Progress(turns) as progress:
                self.folder = getattr(self.given, "output_dir", None) or Path(temporary)
                for left, (group, plan) in zip(range(len(plans), 0, -1), plans.items(), strict=True):
                    if deadline - time.monotonic() < self.least_s:
                        self.errors.append(f"{group}: no time was left of --time-limit {self.given.time_limit:g}")
                        continue
                    self._measure_group(group, plan, deadline, left, progress)
                    self._write_result()
        except KeyboardInterrupt:
            self.errors.append("interrupted: the table has what was measured until then")
        finally:
            signal.signal(signal.SIGTERM, before)
        return self._publish()

    def _measure_group(self, group: Any, plan: Plan, deadline: float, groups_left: int, progress: Progress) -> None:
        turns, began = self.turns, time.monotonic()
        turns.failed.clear()
        prefix = f"{group}: " if str(group) else ""
        try:
            with self.session(group, plan) as measure:
                # A round at least. The start of the processes is counted.
                end = max(began + (deadline - began) / groups_left, time.monotonic() + 1.0)
                cases = list(plan)
                while cases:
                    now = time.monotonic()
                    whole = self.rounds_first or now >= end  # without time, one error names all that is left
                    current, cases = (cases, []) if whole else (cases[:1], cases[1:])
                    chosen = {case: self.variants(case, plan[case]) for case in current}
                    turns.take(
                        chosen,
                        self.rounds,
                        lambda case, variant, number: self._sample_of(measure, case, variant, number),
                        time_limit_s=(end - now) / (len(cases) + 1),
                        rounds_first=self.rounds_first,
                        limit=f"--time-limit {self.given.time_limit:g}",
                        progress=progress,
                    )
        except FAILURES as error:
            self.errors.append(f"{prefix}{error}")
        finally:
            self.notes += [f"{prefix}{note}" for note in turns.notes]
            self.errors += [f"{prefix}{error}" for error in turns.errors]
            turns.notes.clear()
            turns.errors.clear()

    def _sample_of(self, measure: Measure, case: Any, variant: str, number: int) -> Sample:
        known = self.turns.samples.get((case, variant), {}).get(number)
        if known is not None:
            return known
        sample = measure(case, variant, number)
        self._record({"case": vars(case), "variant": variant, "round": number, "sample": sample})
        return sample

    def _remaining(self, plan: Plan) -> Plan:
        """The cases of which samples of an earlier run do not suffice. What is to be measured anew is forgotten."""
        found = {}
        for case, variants in plan.items():
            known = [self.turns.samples.get((case, name), {}) for name in variants]
            whole = set(range(self.rounds)).intersection(*known) if known else set()
            if len(whole) == self.rounds:
                continue
            found[case] = variants
            for samples in () if self.keeps_turns else known:
                for number in set(samples) - whole:
                    del samples[number]
        for key in [key for key, samples in self.turns.samples.items() if not samples]:
            del self.turns.samples[key]
        return found

    def _record(self, record: Mapping[str, Any]) -> None:
        self._take_record(record)
        if self.given.details is not None:
            with self.given.details.open("a", encoding="utf-8") as file:
                if file.tell() == 0:
                    file.write(json.dumps({"options": self._options, "machine": asdict(describe_machine())}) + "\n")
                file.write(json.dumps(record) + "\n")

    def _take_record(self, record: Mapping[str, Any]) -> None:
        """A line of --details. Raises ValueError: of a run with other options."""
        options = record.get("options", self._options)
        for name, value in self._options.items():
            if options.get(name) != value:
                raise ValueError(f"its turns were measured with {name} {options.get(name)}, and now it is {value}")
        self.facts = record.get("facts", self.facts)
        if "sample" in record:
            key = self.case_type(**record["case"]), record["variant"]
            self.turns.samples.setdefault(key, {})[record["round"]] = record["sample"]

    def _publish(self) -> int:
        rows = self.rows()
        if rows:
            table = render_rows(
                rows,
                self.columns or self._columns_of_metrics(rows),
                begins_block=lambda before, row: self.block(before) != self.block(row),
                is_loud=self.is_loud,
                colour=shows_colour(sys.stdout),
            )
            print(f"{self.heading()}\n\n{table}")
        if getattr(self.given, "sharing", None) is not None:
            self.notes.append(self.given.sharing.note)
        self.errors += self.faults(rows)
        lines = [*(self.closing(rows) if rows else ()), *self.lines]
        lines += [f"note: {one}" for one in self.notes] + [f"ERROR: {one}" for one in self.errors]
        for line in lines:
            print(line)
        if written := [*self._write_result(), *(self.draw(rows) if rows else ())]:
            print("written: " + ", ".join(map(str, written)))
        return 1 if self.errors or not rows else 0

    def _columns_of_metrics(self, rows: Sequence[Row]) -> list[Column[Any]]:
        def label(name: str) -> Column[Any]:
            return Column(name, "", lambda row: str(self.labels(row).get(name, "")), left=True)

        def metric(name: str, unit: str, values: Callable[[Any], Sequence[float | None]]) -> Column[Any]:
            return Column(name, unit, lambda row: spread(values(row)), optional=True)

        names = dict.fromkeys(name for row in rows for name in self.labels(row))
        shown = [name for name in names if name not in ("ranks", "gpus")]
        return [*map(label, shown), *(metric(*one) for one in self.metrics)]

    def _write_result(self) -> list[Path]:
        given, device = self.given, self.facts.get("device")
        if given.json is not None:
            parameters = {**vars(given), **self.parameters()}
            result = result_of(
                self.named(self.title),
                self.all_figures(self.rows()),
                machine=describe_machine(),
                parameters={name: _plain(value) for name, value in parameters.items() if not isinstance(value, Path)},
                versions={name: self.facts.get(name) for name in ("torch", "nccl")},
                gpu=None if device == "cpu" else device,
                notes=[*self.notes, *self.errors],
            )
            write_result(given.json, result)
        return [path for path in (given.json, given.details) if path is not None]


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else value


def _read_details(tool: Tool, path: Path) -> None:
    """Raises ValueError: the file is of something else."""
    written = path.read_bytes() if path.exists() else b""
    *lines, cut = written.split(b"\n")
    try:
        for line in lines:
            tool._take_record(json.loads(line))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"--details {path} cannot be continued: {error}; name another file, or delete this one"
        ) from error
    if cut:  # killed while it wrote
        with path.open("r+b") as file:
            file.truncate(len(written) - len(cut))


def _check_files(given: argparse.Namespace) -> None:
    plot = getattr(given, "plot", None)
    if plot is not None and plot.suffix.lower() not in _PLOT_SUFFIXES:
        raise ValueError(f"--plot {str(plot)!r} has suffix {plot.suffix!r}; use one of {', '.join(_PLOT_SUFFIXES)}")
    if plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib, which is not installed; run: pip install matplotlib")
    check_output_files([("--json", given.json), ("--details", given.details), ("--plot", plot)])
    if getattr(given, "output_dir", None) is not None:
        make_folder("--output-dir", given.output_dir)
        given.output_dir = given.output_dir.absolute()


def ranks_text(given: argparse.Namespace, facts: Mapping[str, Any]) -> str:
    """The number of ranks, their device and versions."""
    device = facts.get("device", "?")
    device = f"{device}" if given.sharing is None else f"{device}, {given.sharing}"
    nccl = f", NCCL {facts['nccl']}" if facts.get("nccl") else ""
    threads = facts.get("threads", "?")
    each = f", {threads} thread{'' if threads == 1 else 's'} each" if given.device == "cpu" else ""
    return f"{given.ranks} ranks on {device}, torch {facts.get('torch', '?')}{nccl}{each}"
