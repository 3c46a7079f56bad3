"""What a result of tuning means, in sentences."""

from __future__ import annotations

import math

from bagua.tuning.memory import Answer
from bagua.tuning.search import HIDDEN, MIN_GAIN
from bagua.tuning.setting import MIB

# The estimate is of changing from one to the other: it says nothing about algorithms that do something else.
UNCOMPRESSED, COMPRESSED = "gradient_allreduce", "bytegrad"
# By codec, from the one that rounds least: what it rounds to, and what allows it. fp8_e4m3 sends as much as int8, and
# bf16 more.
PROPOSALS = {
    "int8": (COMPRESSED, "8 bits", f'allow=["{COMPRESSED}"]'),
    "int4": (f"{COMPRESSED} with int4", "4 bits", 'allow=[ByteGradAlgorithm(codec="int4")]'),
}
# An estimate is worth to be told if it is better by so much than what was measured, and than what rounds less.
_WORTH_TELLING = 1.1


def advice(answer: Answer) -> list[str]:
    """One line each, the most important first."""
    default = answer.tried[0] if answer.tried else None
    lines = []
    if default is not None and answer.setting != default.setting:
        lines.append(f"keep {answer.setting}: {answer.speedup:.2f}x the speed of the default, measured in pairs")
        if answer.setting.algorithm == default.setting.algorithm and answer.setting.bucket_bytes is not None:
            lines.append(f"without tuning: BAGUA_DEFAULT_BUCKET_SIZE={_size(answer.setting.bucket_bytes)} comes close")
    elif default is not None and default.exposed_s / default.step_s < HIDDEN:
        lines.append(most_to_gain(default.step_s, default.exposed_s))
    elif default is not None:
        limit = f"; {most}" if (most := most_to_gain(default.step_s, default.exposed_s)) else ""
        lines.append(f"keep the default: nothing that was tried is faster by {100 * MIN_GAIN:g} %{limit}")
    is_plain = default is not None and default.setting.algorithm.startswith(UNCOMPRESSED)
    best = answer.speedup
    for codec, (name, width, allow) in PROPOSALS.items() if is_plain else ():
        speedup = answer.compressed_speedups.get(codec, math.nan)
        if speedup > _WORTH_TELLING * best:
            lines.append(
                f"{name} would give about {speedup:.1f}x (estimated; it rounds gradients to {width}): allow it with"
                f" {allow}, and tuning measures it"
            )
            best = speedup
    return lines


def most_to_gain(step_s: float, exposed_s: float) -> str:
    """What faster communication could give; empty where a step is nothing but communication."""
    if exposed_s / step_s < HIDDEN:
        return "communication is hidden: nothing to gain"
    if exposed_s >= step_s:
        return ""
    return f"without any exposed communication, steps would be {step_s / (step_s - exposed_s):.2f}x as fast"


def _size(nbytes: int) -> str:
    return f"{nbytes // MIB}M" if nbytes % MIB == 0 else str(nbytes)
