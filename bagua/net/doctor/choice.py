"""What to use on a network like this host's: the figures of the page "What should I use?", which is made of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from bagua.net import native
from bagua.net.doctor.finding import Finding, Section, ok

PAGE = "docs/how-to/what-should-i-use.md"
_TITLE = "What to use"


@dataclass(frozen=True)
class Expectation:
    """Speed-ups of a GPT-2 training step on two H200s between which a link was emulated. docs/results has all figures:
    steps-by-network-2h200 and, of FSDP2 with 4 sequences on each GPU, fsdp-2h200; a test compares them."""

    rate_gbps: float
    up_to_mbps: int  # interfaces up to this speed are taken for this one: the middle between two rates, as a ratio
    over_default: float  # the plugin over NCCL as it is installed
    over_tuned: float  # the plugin over the best of NCCL's settings
    int4: float  # `bytegrad` with 4-bit gradients over exact ones
    fsdp2: float | None  # 4-bit gradients and weight differences over plain FSDP2; None: not measured


EXPECTATIONS = (
    Expectation(10, 16_000, 1.00, 1.00, 5.94, 4.67),
    Expectation(25, 32_000, 0.99, 0.99, 4.85, 2.48),
    Expectation(40, 63_000, 1.64, 1.00, 3.56, None),
    Expectation(100, 200_000, 3.14, 1.03, 1.45, None),
)


def check_choice(interfaces: Sequence[native.Interface], *, has_rdma: bool) -> Section:
    """
    Args:
        interfaces: those that a job here would use.
        has_rdma: whether NCCL would use an RDMA network without the plugin.
    """
    outside = [row for row in interfaces if not row.loopback]
    fastest = max(outside, key=lambda row: row.speed_mbps, default=None)
    expected = None
    if has_rdma:
        first = "RDMA: leave the plugin off, NCCL's own transport is faster. Compression can help where it is slow"
    elif fastest is None:
        first = "no network between hosts is used here: the plugin has nothing to do, NCCL has NVLink and shared memory"
    elif fastest.speed_mbps <= 0:
        first = f"the speed of {fastest.name} is unknown: `bagua-net doctor --peer HOST` measures the network"
    elif fastest.speed_mbps > EXPECTATIONS[-1].up_to_mbps:
        first = f"{fastest.name} has {fastest.speed_mbps / 1000:g} Gb/s: NCCL tuned by hand may be faster"
    else:
        expected = next(one for one in EXPECTATIONS if fastest.speed_mbps <= one.up_to_mbps)
        first = _sentence(fastest, expected)
    findings: list[Finding] = [ok(first)]
    findings.append(ok(f"`bagua-net test` measures it between two nodes; {PAGE} has a line for each kind of job"))
    return Section("choice", _TITLE, tuple(findings), {"expected": asdict(expected) if expected else None})


def _sentence(row: native.Interface, expected: Expectation) -> str:
    text = (
        f"{row.name} has {row.speed_mbps / 1000:g} Gb/s. At {expected.rate_gbps:g} Gb/s, steps of GPT-2 were "
        f"{expected.over_default:.2f} times as fast with the plugin as with NCCL's default, and again "
        f"{expected.int4:.1f} times with 4-bit gradients"
    )
    return text if expected.fsdp2 is None else f"{text} (FSDP2, gradients and weights: {expected.fsdp2:.1f} times)"
