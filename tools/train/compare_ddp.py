"""Train the DDP example with NCCL's own network and through Bagua-Net, and compare losses and step times.

    python tools/train/compare_ddp.py --nproc-per-node 2 --model vgg16 --dtype bf16 --output-dir out

Every run is a fresh `torchrun examples/ddp_train.py` with the same seed; the contenders take turns, each round
beginning with another one. Ours is switched on as a user does it: by ENABLE_BAGUA_NET=1 alone. Written to
--output-dir: ddp.json, ddp.png and the logs of every run. Exit status 1 if losses differ, ranks disagree, a run fails,
or NCCL's log shows another network than the contender's.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bagua.net.bench.export import check_writable
from bagua.net.bench.machine import describe_machine
from bagua.net.bench.nccl_ab_contender import (
    DEFAULT_TUNED,
    PLUGIN_NETWORK,
    Contender,
    hand_tuned,
    own_transport,
    worker_environment,
)
from bagua.net.bench.nccl_ab_log import NetworkProof, network_error, read_proof_file

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "ddp_train.py"

# Two ranks add two numbers in either order to the same sum; more ranks add in the order of NCCL's rings, which differs
# with the number of channels, and bf16 training carries the last bit's difference on.
EXACT_RANKS = 2
DEFAULT_TOLERANCE = 0.02

# Communicators are created and kernels chosen in these.
WARMUP_STEPS = 5
# torchrun gives its workers 30 s to end after SIGTERM.
TERMINATION_S = 40.0


class RunError(RuntimeError):
    """A training run failed. Says which, and what it wrote last."""


@dataclass
class Training:
    """One run of the example."""

    contender: str
    round: int
    losses: list[float]
    step_seconds: list[float]
    samples_per_second: float
    replicas_agree: bool
    wall_seconds: float
    proofs: list[NetworkProof] = field(default_factory=list)

    @property
    def steady_step_seconds(self) -> list[float]:
        return self.step_seconds[min(WARMUP_STEPS, len(self.step_seconds) - 1) :]


def bagua_net_by_activation() -> Contender:
    """What a user does, unlike bagua-net-bench, which names the library: the package's own activation is tested."""
    return Contender("bagua-net", PLUGIN_NETWORK, {"ENABLE_BAGUA_NET": "1"}, is_ours=True)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def descendants(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*"):
        try:
            children = [int(child) for child in (task / "children").read_text(encoding="ascii").split()]
        except OSError:
            continue  # The thread has ended since the directory was listed.
        for child in children:
            found += [child, *descendants(child)]
    return found


def end(process: subprocess.Popen[bytes]) -> None:
    """torchrun puts each worker into a session of its own, so that only itself can end them in order."""
    workers = descendants(process.pid)
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(TERMINATION_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        for pid in workers:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue  # It ended with torchrun.


def train_once(
    contender: Contender,
    round_number: int,
    arguments: argparse.Namespace,
    inherited: Mapping[str, str],
    *,
    timeout_s: float,
) -> Training:
    slug = "".join(letter if letter.isalnum() else "-" for letter in contender.name)
    folder: Path = arguments.output_dir / "logs" / f"{slug}.round{round_number}"
    folder.mkdir(parents=True, exist_ok=True)
    for stale in folder.glob("*"):
        stale.unlink()
    environment = worker_environment(
        contender, inherited, tcp_only=arguments.tcp_only, debug_file=folder / "nccl.%p.log"
    )
    result = folder / "training.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(arguments.nproc_per_node)]
    command += ["--master-addr", "127.0.0.1", "--master-port", str(free_port()), str(EXAMPLE)]
    command += ["--model", arguments.model, "--steps", str(arguments.steps), "--batch-size", str(arguments.batch_size)]
    command += ["--dtype", arguments.dtype, "--seed", str(arguments.seed), "--backend", arguments.backend]
    command += ["--json", str(result), "--quiet"]
    if arguments.image_size is not None:
        command += ["--image-size", str(arguments.image_size)]
    output = folder / "output.txt"
    began = time.monotonic()
    with output.open("wb") as file:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=environment)
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            end(process)
            raise RunError(f"{contender.name}, round {round_number}: not done after {timeout_s:.0f} s") from None
        except BaseException:
            end(process)
            raise
    wall_seconds = time.monotonic() - began
    if code != 0 or not result.is_file():
        tail = output.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-15:]
        raise RunError(f"{contender.name}, round {round_number}: exit code {code}; it ended with:\n" + "\n".join(tail))
    document: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
    return Training(
        contender=contender.name,
        round=round_number,
        losses=document["losses"],
        step_seconds=document["step_seconds"],
        samples_per_second=document["samples_per_second"],
        replicas_agree=document["replicas_agree"],
        wall_seconds=wall_seconds,
        # A process without a communicator (torchrun itself) may have opened a log too.
        proofs=[proof for path in sorted(folder.glob("nccl.*.log")) if (proof := read_proof_file(path)).network],
    )


def relative_difference(left: Sequence[float], right: Sequence[float]) -> float:
    """The largest over all steps, relative to the first loss: late losses are near zero, and so is their meaning."""
    if len(left) != len(right):
        raise ValueError(f"{len(left)} losses cannot be compared with {len(right)}")
    gaps = [abs(a - b) for a, b in zip(left, right, strict=True)]
    # A loss that is not a number compares as false with everything, and so would pass any limit.
    if not all(math.isfinite(gap) for gap in gaps):
        return math.inf
    return max(gaps) / max(abs(left[0]), 1e-12)


@dataclass(frozen=True)
class LossVerdict:
    own_spread: float  # between rounds of NCCL's default: what this machine's arithmetic does by itself
    differences: dict[str, float]  # by contender, the largest over its rounds against NCCL's default
    allowed: float

    @property
    def failures(self) -> list[str]:
        return [
            f"losses of {name} differ from NCCL's default by {difference:.3g} (relative to the first loss); allowed"
            f" {self.allowed:.3g}, rounds of NCCL's default differ by {self.own_spread:.3g}"
            for name, difference in self.differences.items()
            if difference > self.allowed
        ]


def judge_losses(trainings: Sequence[Training], baseline: str, tolerance: float) -> LossVerdict:
    reference = [training for training in trainings if training.contender == baseline]
    if not reference:
        raise ValueError(f"no run of {baseline} ended well, so there is nothing to compare losses with")
    own = max((relative_difference(reference[0].losses, other.losses) for other in reference[1:]), default=0.0)
    differences: dict[str, float] = {}
    for training in trainings:
        if training.contender != baseline:
            found = relative_difference(reference[0].losses, training.losses)
            differences[training.contender] = max(found, differences.get(training.contender, 0.0))
    # Where even the default's losses are no numbers nothing can be compared, and nothing may pass.
    return LossVerdict(own, differences, max(tolerance, own) if math.isfinite(own) else tolerance)


def summarize(trainings: Sequence[Training], baseline: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for name in dict.fromkeys(training.contender for training in trainings):
        mine = [training for training in trainings if training.contender == name]
        steps = [seconds for training in mine for seconds in training.steady_step_seconds]
        rows.append(
            {
                "contender": name,
                "rounds": len(mine),
                "step_ms": statistics.median(steps) * 1e3,
                "step_ms_by_round": [statistics.median(training.steady_step_seconds) * 1e3 for training in mine],
                "samples_per_second": statistics.median(training.samples_per_second for training in mine),
                "first_loss": mine[0].losses[0],
                "last_loss": mine[0].losses[-1],
            }
        )
    base = next((row["step_ms"] for row in rows if row["contender"] == baseline), None)
    for row in rows:
        row["speedup"] = base / row["step_ms"] if base else None
    return rows


def write_figure(path: Path, trainings: Sequence[Training], title: str, caption: str) -> None:
    matplotlib: Any = importlib.import_module("matplotlib")
    matplotlib.use("Agg")
    pyplot: Any = importlib.import_module("matplotlib.pyplot")

    # Okabe and Ito's colours; dashes tell them apart in grey.
    styles = [("#0072B2", "-"), ("#D55E00", "--"), ("#009E73", "-."), ("#CC79A7", ":")]
    names = list(dict.fromkeys(training.contender for training in trainings))
    settings = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False}
    with pyplot.rc_context(settings):
        figure, (times, losses) = pyplot.subplots(1, 2, figsize=(9.2, 3.9), layout="constrained")
        for index, name in enumerate(names):
            colour, dash = styles[index % len(styles)]
            for number, training in enumerate(t for t in trainings if t.contender == name):
                label = name if number == 0 else None
                milliseconds = [seconds * 1e3 for seconds in training.step_seconds]
                times.plot(range(1, len(milliseconds) + 1), milliseconds, dash, color=colour, lw=1.2, label=label)
                losses.plot(range(1, len(training.losses) + 1), training.losses, dash, color=colour, lw=1.4)
        steady = [seconds * 1e3 for training in trainings for seconds in training.steady_step_seconds]
        times.set_ylim(0, max(steady) * 1.25)
        times.set_ylabel("time of a step (ms, slowest rank)")
        times.set_title("Step time, every round (lower is better)", loc="left")
        losses.set_ylabel("training loss (mean over ranks)")
        losses.set_title("Loss: the lines have to coincide", loc="left")
        for axes in (times, losses):
            axes.set_xlabel("step")
            axes.grid(True, color="0.9", linewidth=0.6)
            axes.set_axisbelow(True)
        losses.legend(*times.get_legend_handles_labels(), loc="upper right")
        figure.suptitle(title, fontsize=11, x=0.01, ha="left")
        figure.supxlabel(caption, fontsize=7, color="0.35", x=0.01, ha="left")
        figure.savefig(path, dpi=200)
        pyplot.close(figure)


def render(rows: Sequence[Mapping[str, Any]], verdict: LossVerdict | None) -> str:
    titles = ("step ms", "samples/s", "speed-up", "first loss", "last loss", "loss diff")
    lines = [f"{'contender':<16}" + "".join(f"{title:>13}" for title in titles)]
    for row in rows:
        difference = verdict.differences.get(row["contender"]) if verdict else None
        lines.append(
            f"{row['contender']:<16}{row['step_ms']:>13.2f}{row['samples_per_second']:>13.1f}"
            f"{'-' if row['speedup'] is None else format(row['speedup'], '.2f') + 'x':>13}"
            f"{row['first_loss']:>13.6f}{row['last_loss']:>13.6f}"
            f"{'-' if difference is None else format(difference, '.3g'):>13}"
        )
    return "\n".join(lines)


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--nproc-per-node", type=int, default=2, help="ranks, one per GPU")
    parser.add_argument("--model", default="mlp", choices=("mlp", "resnet", "vgg16"))
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=32, help="per rank")
    parser.add_argument("--image-size", type=int, help="pixels (default: the example's)")
    parser.add_argument("--dtype", choices=("float32", "bf16"), default="float32")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--tuned", default=DEFAULT_TUNED, help="hand-tuned NCCL as THREADSxSOCKETS[xCHANNELS], or none")
    parser.add_argument(
        "--tcp-only",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="switch P2P and shared memory off and use loopback: a stand-in for one GPU per host",
    )
    parser.add_argument(
        "--tolerance",
        type=float,
        help="allowed relative difference of a loss (default: 0 with 2 ranks, whose sums have one order, else"
        f" {DEFAULT_TOLERANCE}); never below what rounds of NCCL's default differ by",
    )
    parser.add_argument("--backend", choices=("auto", "nccl", "gloo"), default="auto")
    parser.add_argument("--run-timeout", type=float, default=180.0, help="seconds for one training run")
    parser.add_argument("--time-limit", type=float, default=420.0, help="seconds after which no further run begins")
    parser.add_argument("--output-dir", type=Path, required=True)
    arguments = parser.parse_args(words)
    for name in ("nproc_per_node", "steps", "batch_size", "rounds"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(arguments, name)} must be at least 1")
    if arguments.tolerance is None:
        arguments.tolerance = 0.0 if arguments.nproc_per_node <= EXACT_RANKS else DEFAULT_TOLERANCE
    try:
        arguments.contenders = [own_transport()]
        if arguments.tuned != "none":
            arguments.contenders.append(hand_tuned(arguments.tuned))
        arguments.output_dir.mkdir(parents=True, exist_ok=True)
        arguments.output_dir = arguments.output_dir.absolute()
        check_writable("--output-dir", arguments.output_dir / "ddp.json")
    except (ValueError, OSError) as error:
        parser.error(str(error))
    arguments.contenders.append(bagua_net_by_activation())
    return arguments


def run_all(arguments: argparse.Namespace) -> tuple[list[Training], list[str]]:
    """Every round of every contender; what fails is left out and reported."""
    contenders: list[Contender] = arguments.contenders
    deadline = time.monotonic() + arguments.time_limit
    trainings: list[Training] = []
    errors: list[str] = []
    failed: set[str] = set()
    for round_number in range(arguments.rounds):
        for place in range(len(contenders)):
            contender = contenders[(place + round_number) % len(contenders)]
            remaining = deadline - time.monotonic()
            if contender.name in failed:
                continue
            if remaining <= 0:
                errors.append(
                    f"--time-limit {arguments.time_limit:g} s: round {round_number} of {contender.name} not run"
                )
                continue
            try:
                training = train_once(
                    contender,
                    round_number,
                    arguments,
                    os.environ,
                    timeout_s=min(arguments.run_timeout, remaining),
                )
            except RunError as error:
                errors.append(str(error))
                failed.add(contender.name)
                continue
            print(
                f"round {round_number} {contender.name}: median step"
                f" {statistics.median(training.steady_step_seconds) * 1e3:.2f} ms, loss {training.losses[0]:.6f} ->"
                f" {training.losses[-1]:.6f}, {training.wall_seconds:.0f} s in all",
                flush=True,
            )
            trainings.append(training)
            if not training.replicas_agree:
                errors.append(f"{contender.name}, round {round_number}: the ranks ended with different parameters")
            if arguments.backend != "gloo":
                proofs: list[NetworkProof | None] = [*training.proofs]
                proofs += [None] * (arguments.nproc_per_node - len(proofs))
                if error_text := network_error(contender.name, contender.network, proofs):
                    errors.append(error_text)
    return trainings, errors


def main(words: Sequence[str] | None = None) -> int:
    arguments = parse_arguments(words)
    baseline = arguments.contenders[0].name
    trainings, errors = run_all(arguments)
    verdict = None
    if any(training.contender == baseline for training in trainings):
        verdict = judge_losses(trainings, baseline, arguments.tolerance)
        errors += verdict.failures
    rows = summarize(trainings, baseline)
    print(render(rows, verdict))
    if verdict is not None:
        print(f"losses: allowed difference {verdict.allowed:.3g}, NCCL default's own rounds {verdict.own_spread:.3g}")
    for name in dict.fromkeys(training.contender for training in trainings):
        kinds = dict.fromkeys(p.summary() for t in trainings if t.contender == name for p in t.proofs)
        if kinds:
            print(f"network of {name}: " + "; ".join(kinds))
    for error in errors:
        print(f"ERROR: {error}")
    machine = describe_machine()
    document = {
        "machine": machine.as_dict(),
        "summary": rows,
        "losses": None
        if verdict is None
        else {
            "allowed": verdict.allowed,
            "own_spread": verdict.own_spread,
            "differences": {name: repr(value) for name, value in verdict.differences.items()},
        },
        "errors": errors,
        "runs": [
            {
                "contender": training.contender,
                "round": training.round,
                "wall_seconds": training.wall_seconds,
                "replicas_agree": training.replicas_agree,
                "losses": training.losses,
                "step_seconds": training.step_seconds,
                "networks": [proof.as_dict() for proof in training.proofs],
            }
            for training in trainings
        ],
    }
    result = arguments.output_dir / "ddp.json"
    result.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    written = [str(result)]
    if trainings:
        picture = arguments.output_dir / "ddp.png"
        title = f"{arguments.model} with DDP on {arguments.nproc_per_node} ranks, {arguments.dtype}"
        write_figure(picture, trainings, title, machine.caption())
        written.append(str(picture))
    print("written: " + ", ".join(written))
    return 1 if errors or not trainings else 0


if __name__ == "__main__":
    sys.exit(main())
