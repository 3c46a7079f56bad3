"""The Triton kernels of codecs without a GPU: they run in Triton's interpreter, and compile."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton is for Linux on x86-64 and arm64")

from support.sweeps import each_value_once, rest_is_deep
from support.triton_compiler import Launch, Recorder, ptx_of
from triton.backends.compiler import GPUTarget

from bagua.codecs import bf16_triton, block_scale_launch, codec_names, fused, fused_launch, get_codec
from bagua.codecs.codec import Codec
from bagua.codecs.portable import PortableCodec

PROGRAM = Path(__file__).with_name("triton_interpreter.py")
KERNELS = {
    "bf16_triton": ("compress_tiles", "decompress_tiles", "sum_tiles"),
    "block_scale_triton": ("compress_blocks", "decompress_blocks", "sum_blocks"),
    "fused_triton": ("reduce_tiles", "rest_ranges", "differences_tiles"),
}


@pytest.mark.parametrize("which", rest_is_deep(["a twelfth", "all"], 0))
def test_same_bytes_as_the_formula(which: str) -> None:
    folders = [str(PROGRAM.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(folders)}
    done = subprocess.run(
        [sys.executable, PROGRAM, which], capture_output=True, text=True, timeout=240, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "compared\n"


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """Nothing is launched, but kept here."""
    found: list[Launch] = []
    for module_name, names in KERNELS.items():
        module = importlib.import_module(f"bagua.codecs.{module_name}")
        for name in names:
            monkeypatch.setattr(module, name, Recorder(getattr(module, name), found))
    operations = ("_compress", "_decompress", "_sum")
    fused_operations = ("_reduce", "_rest", "_add")
    for module, names in (
        (block_scale_launch, operations), (bf16_triton, operations), (fused_launch, fused_operations)
    ):  # fmt: skip
        for name in names:
            # Without what was cached, and without caching the recorders.
            monkeypatch.setattr(module, name, getattr(module, name).__wrapped__)
    return found


def launch_all(codec: PortableCodec, elements: int, chunks: int, dtype: torch.dtype, versions: int) -> None:
    kernels = importlib.import_module(f"bagua.codecs.{codec.triton_module}")
    floats = torch.zeros(chunks * elements, dtype=dtype)
    compressed = torch.zeros(chunks, codec.compressed_bytes(elements), dtype=torch.uint8)
    kernels.compress(codec, floats, elements, compressed)
    kernels.decompress(codec, compressed, elements, floats, True)
    received = torch.zeros(versions, codec.compressed_bytes(elements), dtype=torch.uint8)
    kernels.decompress_reduce_compress(codec, received, elements, True, torch.zeros_like(received[0]))


def launch_fused(codec: Codec, elements: int, chunks: int, dtype: torch.dtype, versions: int) -> None:
    floats = torch.zeros(chunks * elements, dtype=dtype)
    sent = torch.zeros(chunks, codec.compressed_bytes(elements), dtype=torch.uint8)
    stored = get_codec(fused.REST_CODEC)
    rest = torch.zeros(chunks, stored.compressed_bytes(elements), dtype=torch.uint8)
    fused_launch.compress_rest(codec, floats, sent, 0, stored, rest)
    fused_launch.add_differences(codec, sent, floats, torch.zeros_like(floats))
    received = torch.zeros(versions, codec.compressed_bytes(elements), dtype=torch.uint8)
    one = floats[:elements].clone()
    fused_launch.decompress_reduce(codec, received, one, versions - 1, 0.5, torch.zeros_like(one))


# (elements, chunks, dtype, versions)
SHAPES = [
    (1, 1, torch.float32, 1),
    (37, 3, torch.bfloat16, 3),
    (4096, 2, torch.float16, 2),
    (1 << 20, 1, torch.float32, 9),
]


@pytest.mark.parametrize(("name", "capability"), each_value_once(["bf16", "fp8_e4m3", "int4"], [80, 90]))
def test_each_operation_is_one_kernel_that_compiles(
    launches: list[Launch], name: str, capability: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_scale_launch, "converts_fp8", lambda _device: capability >= 89)
    codec = get_codec(name)
    assert isinstance(codec, PortableCodec)
    for shape in SHAPES:
        launches.clear()
        launch_all(codec, *shape)
        assert len(launches) == 3
        for launch in launches:
            ptx = ptx_of(launch, GPUTarget("cuda", capability, 32))
            assert ".visible .entry" in ptx
            converts = name == "fp8_e4m3" and capability == 90
            assert ("e4m3x2" in ptx) == converts


@pytest.mark.parametrize("name", codec_names())
def test_several_operations_are_one_kernel_that_compiles(
    launches: list[Launch], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused_launch, "converts_fp8", lambda _device: True)
    for shape in SHAPES[1:]:
        launches.clear()
        launch_fused(get_codec(name), *shape)
        assert len(launches) == 3
        for launch in launches:
            ptx = ptx_of(launch)
            assert ".visible .entry" in ptx
            if shape[0] > 4096 and launch[0].__name__ != "rest_ranges":  # full tiles of fp32
                assert "ld.global.v4.b32" in ptx


@pytest.mark.parametrize("name", ["bf16", "fp8_e4m3", "int4"])
def test_full_tiles_move_in_vectors_and_no_thread_waits_for_others(
    launches: list[Launch], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_scale_launch, "converts_fp8", lambda _device: True)
    codec = get_codec(name)
    assert isinstance(codec, PortableCodec)
    launch_all(codec, 1 << 20, 1, torch.float32, 2)
    for launch in launches:
        ptx = ptx_of(launch)
        assert "ld.global.v4.b32" in ptx or launch[0].__name__ == "decompress_blocks"
        assert "bar.sync" not in ptx


def test_a_sum_of_int4_adds_a_level_with_three_instructions(launches: list[Launch]) -> None:
    """A mask with an exponent, a subtraction, a multiply-add; in full and in other tiles, which have their own code."""
    codec = get_codec("int4")
    assert isinstance(codec, PortableCodec)
    versions, elements = 4, 32  # of a thread
    launch_all(codec, 1 << 20, 1, torch.float32, versions)
    ptx = ptx_of(launches[-1])
    assert ptx.count("fma.rn.f32") == 2 * versions * elements
    # One shift for the upper three of eight levels.
    assert ptx.count("shr.") <= 2 * (versions * 4 + 4)
