"""`PYTHONPATH=tools python -m measure NAME [options]`; without a name, the list of tools."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

EXIT_INTERRUPTED = 130

# Imported when it runs: not every tool needs torch.
TOOLS = {
    "core": ("measure.core.tool", "Bagua's algorithms and torch's DDP: step time, memory, final models"),
    "networks": ("measure.networks", "what the plugin and the algorithms gain, network by network"),
    "all-reduce": ("measure.all_reduce", "all-reduce and others over the plugin and NCCL's sockets, by network"),
    "nics": ("measure.nics.tool", "what several NICs carry together, and what the loss of one costs"),
    "convergence": ("measure.convergence.tool", "does every algorithm train as well as gradient all-reduce?"),
    "memory": ("measure.memory", "what each algorithm needs beyond plain training, measured and as documented"),
    "compression": ("measure.compression", "codecs compared with a copy of the same bytes"),
    "optimizers": ("measure.optimizers", "steps of optimizers, fused and not"),
    "balance": ("measure.balance", "samplers on samples with a heavy tail of lengths"),
    "cache": ("measure.cache", "samples per second of a DataLoader with and without a cache"),
    "moe": ("measure.moe", "layers of MoE compared with dense layers"),
}


def main(words: Sequence[str]) -> int:
    if not words or words[0] not in TOOLS:
        wrong = bool(words) and words[0] not in ("-h", "--help")
        stream = sys.stderr if wrong else sys.stdout
        print(f"unknown tool {words[0]!r}; " if wrong else "", end="", file=stream)
        print("usage: PYTHONPATH=tools python -m measure NAME [options]\n", file=stream)
        for name, (_, about) in TOOLS.items():
            print(f"  {name:<12} {about}", file=stream)
        return 2 if wrong else 0
    try:
        code: int = importlib.import_module(TOOLS[words[0]][0]).main(words[1:])
    except KeyboardInterrupt:  # outside the turns, after which a tool still reports
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    return code


if __name__ == "__main__":
    if not sys.flags.safe_path:
        # `python -m` puts the working directory first. In a checkout, that is the source of bagua, which hides the
        # installed package and has no compiled modules.
        del sys.path[0]
    sys.exit(main(sys.argv[1:]))
