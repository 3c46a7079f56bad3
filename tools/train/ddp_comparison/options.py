"""The command line of compare_ddp.py: parsing, defaults, and the backends that it makes."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from bagua.net.bench.argument_types import within
from bagua.net.bench.export import check_writable, make_folder
from bagua.net.bench.nccl_ab.backend import (
    DEFAULT_TUNED,
    PLUGIN_NETWORK,
    Backend,
    make_backends,
    tuned_settings,
)
from ddp_comparison.losses import DEFAULT_TOLERANCE, EXACT_RANKS


def bagua_net_by_activation() -> Backend:
    """What a user does, unlike bagua-net-bench, which names the library: the package's own activation is tested."""
    return Backend("bagua-net", PLUGIN_NETWORK, {"ENABLE_BAGUA_NET": "1"}, is_ours=True)


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train the DDP example with NCCL's own network and through Bagua-Net, and compare losses and step"
        " times.",
    )
    parser.add_argument("--nproc-per-node", type=within(int, 1, 128), default=2, help="ranks, one per GPU (default 2)")
    parser.add_argument(
        "--model", default="mlp", choices=("mlp", "resnet", "vgg16"), help="of the example (default mlp)"
    )
    parser.add_argument("--steps", type=within(int, 1, 100_000), default=30, help="of each run (default 30)")
    parser.add_argument("--batch-size", type=within(int, 1, 65_536), default=32, help="per rank (default 32)")
    parser.add_argument("--image-size", type=within(int, 1, 65_536), help="pixels (default: the example's)")
    parser.add_argument(
        "--dtype", choices=("float32", "bf16"), default="float32", help="bf16: autocast (default float32)"
    )
    parser.add_argument("--seed", type=int, default=1, help="of every run (default 1)")
    parser.add_argument("--rounds", type=within(int, 1, 1000), default=2, help="runs of each backend (default 2)")
    parser.add_argument(
        "--tuned",
        default=DEFAULT_TUNED,
        help="hand-tuned NCCL as THREADSxSOCKETS[xCHANNELS], or several with commas; best: the settings of"
        f" bagua-net-bench --nccl --tuned best; none (default {DEFAULT_TUNED})",
    )
    parser.add_argument(
        "--tcp-only",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="switch P2P and shared memory off and use loopback: a stand-in for one GPU per host (default: yes)",
    )
    parser.add_argument(
        "--tolerance",
        type=within(float, 0.0, 10.0),
        help="allowed relative difference of a loss (default: 0 with 2 ranks, whose sums have one order, else"
        f" {DEFAULT_TOLERANCE}); never below what rounds of NCCL's default differ by",
    )
    parser.add_argument(
        "--backend", choices=("auto", "nccl", "gloo"), default="auto", help="auto: NCCL if there are GPUs"
    )
    parser.add_argument(
        "--run-timeout",
        type=within(float, 1.0, 86_400.0),
        default=180.0,
        help="seconds for one training run (default 180)",
    )
    parser.add_argument(
        "--time-limit",
        type=within(float, 1.0, 86_400.0),
        default=420.0,
        help="seconds for all runs; no round begins that is longer than what is left (default 420)",
    )
    parser.add_argument("--output-dir", type=Path, required=True, help="for results, plot and logs")
    arguments = parser.parse_args(words)
    if arguments.tolerance is None:
        arguments.tolerance = 0.0 if arguments.nproc_per_node <= EXACT_RANKS else DEFAULT_TOLERANCE
    try:
        tuned = tuned_settings([arguments.tuned])
        arguments.backends = make_backends(library=None, tuned=tuned, variants=[], with_shared_memory=False)
        make_folder("--output-dir", arguments.output_dir)
        arguments.output_dir = arguments.output_dir.absolute()
        check_writable("--output-dir", arguments.output_dir / "ddp.json")
    except ValueError as error:
        parser.error(str(error))
    arguments.backends.append(bagua_net_by_activation())
    return arguments
