"""Samples that are stored come back as they were, or not at all."""

from __future__ import annotations

import collections
import pickle
import struct
from typing import Any

import msgpack
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bagua.contrib.caching.codec import codec_of, decode, encode, pack, unpack

DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype) and value.itemsize}, key=str)
NOT_STORED = {"torch.quint8", "torch.qint8", "torch.qint32", "torch.quint4x2", "torch.quint2x4"}


def same(one: Any, other: Any) -> bool:
    """Equal, of equal types, all the way down."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and same(encode(one), encode(other))
    if isinstance(one, np.ndarray | np.generic):
        return bool(one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return same(list(one.items()), list(other.items()))
    return bool(one == other or (one != one and other != other))


simple = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.complex_numbers()
    | st.text(st.characters(codec=None))
    | st.binary()
)
keys = st.booleans() | st.integers() | st.text() | st.binary() | st.tuples(st.integers(), st.text())
arrays = st.builds(
    lambda kind, shape: np.arange(np.prod(shape), dtype=np.int64).astype(kind).reshape(shape),
    st.sampled_from(["?", "i1", "<u2", ">i4", "i8", "f2", "f4", ">f8", "c8", "S3", "U2", "M8[s]", "m8[ms]"]),
    st.lists(st.integers(0, 3), max_size=3).map(tuple),
)
samples = st.recursive(
    simple | arrays | arrays.filter(lambda one: one.size).map(lambda one: one.flat[0]),
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(keys, inner),
    max_leaves=8,
)


@given(samples)
def test_samples_come_back(sample: Any) -> None:
    assert same(decode(encode(sample)), sample)


@pytest.mark.filterwarnings("ignore:B?Complex(Half|32) support is experimental")
@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if str(dtype) not in NOT_STORED], ids=str)
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 5)])
def test_tensors_of_every_dtype_come_back(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    count = torch.Size(shape).numel() * dtype.itemsize
    tensor = (torch.arange(count) % 2).to(torch.uint8).view(dtype).reshape(shape)
    assert same(decode(encode((tensor, 1)))[0], tensor)


def test_tensors_are_stored_as_they_look() -> None:
    base = torch.arange(24.0).reshape(2, 3, 4)
    for tensor in (base.permute(2, 0, 1), base[:, 1], base.to(torch.complex64).conj(), base.to(torch.complex64).imag):
        assert torch.equal(decode(encode(tensor)), tensor)
    assert len(encode(base[0, 0, :1])) < 100  # not the storage around it
    flags = torch.arange(24.0).reshape(4, 6)
    for tensor in (flags[1:2, 2], flags[1, 2], flags[1:2, 2].to(torch.complex64).conj(), flags[:1, 1].expand(3, 1)):
        assert torch.equal(decode(encode(tensor)), tensor)


@pytest.mark.filterwarnings("ignore:B?Complex(Half|32) support is experimental")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn, torch.uint16, torch.complex32], ids=str)
def test_pickle_stores_what_torch_does_not_unpickle(dtype: torch.dtype) -> None:
    pickling = codec_of("pickle")
    table = torch.arange(1000.0).to(dtype)
    for tensor in (table, table[5:6]):
        frame = pack(pickling, "key", [tensor])
        assert same(unpack(pickling, "key", frame), [tensor])
    assert len(frame) < 300  # not the table
    leaf = torch.ones(3, requires_grad=True)
    assert unpack(pickling, "key", pack(pickling, "key", leaf)).requires_grad
    with pytest.raises(TypeError, match=r"builtins\.function with codec='pickle' \(.*\n.*Convert it in the dataset"):
        pack(pickling, "key", lambda: 1)


def test_samples_belong_to_the_caller() -> None:
    frame = encode([torch.zeros(3), np.zeros(3)])
    tensor, array = decode(frame)
    tensor += 1
    array += 1
    assert [one.sum() for one in decode(frame)] == [0, 0]


class Custom:
    pass


Named = collections.namedtuple("Named", "a")


@pytest.mark.parametrize(
    ("sample", "named"),
    [
        (Custom(), r"type .*\.Custom"),
        ({"a": [1, {2, 3}]}, r"type builtins\.set"),
        (Named(1), r"type .*\.Named"),
        (collections.OrderedDict(a=1), "OrderedDict"),
        (np.array([None]), "numpy array of dtype object"),
        (np.zeros(2, [("x", "f4")]), "numpy array of dtype .*'x'"),
        (torch.nn.Parameter(torch.zeros(1)), r"type torch\.nn\.parameter\.Parameter"),
        (torch.zeros(1, requires_grad=True), "tensor that requires gradients"),
        (torch.zeros(2).to_sparse(), "tensor of layout torch.sparse_coo"),
        (torch.zeros(2, device="meta"), "tensor on meta"),
    ],
)
def test_what_would_not_come_back_is_an_error_with_its_remedy(sample: Any, named: str) -> None:
    with pytest.raises(TypeError, match=rf"The cache cannot store .*{named}.*\.\n.*codec='pickle'"):
        encode(sample)


class Trap:
    sprung = False

    def __reduce__(self) -> Any:
        return setattr, (Trap, "sprung", True)


def test_pickle_is_a_choice_and_not_unpickled_by_the_default() -> None:
    safe, chosen = codec_of("msgpack"), codec_of("pickle")
    assert unpack(chosen, "k", pack(chosen, "k", Named(1))) == Named(1)
    with pytest.raises(ValueError, match="codec='dill': must be 'msgpack' or 'pickle'"):
        codec_of("dill")
    for frame in (pack(chosen, "k", Trap()), pack(safe._replace(encode=pickle.dumps), "k", Trap())):
        with pytest.raises(ValueError):  # noqa: PT011  whichever it is
            unpack(safe, "k", frame)
    assert not Trap.sprung


@given(st.data())
def test_damage_is_noticed(data: st.DataObject) -> None:
    """A byte that has changed, a part of a value, or the value of another key."""
    codec = codec_of("msgpack")
    frame = bytearray(pack(codec, "key", (torch.arange(9), "label")))
    position = data.draw(st.integers(0, len(frame) - 1))
    part = bytes(frame[:position])
    frame[position] ^= data.draw(st.integers(1, 255))
    for damaged in (bytes(frame), part, pack(codec, "other", 5)):
        with pytest.raises(ValueError):  # noqa: PT011
            unpack(codec, "key", damaged)


@given(st.binary())
def test_bytes_of_strangers_are_refused_or_harmless(payload: bytes) -> None:
    """With a checksum that is right: who writes to a shared server knows how."""
    try:
        decode(payload)
    except ValueError:
        pass


def extension(number: int, head: list[Any], data: bytes = b"") -> bytes:
    packed = msgpack.packb(head)
    payload: bytes = msgpack.packb(msgpack.ExtType(number, struct.pack("<I", len(packed)) + packed + data))
    return payload


@pytest.mark.parametrize(
    "payload",
    [
        *(extension(number, [dtype, 1 << 50]) for number, dtype in ((2, "float32"), (3, "<f4"))),  # no memory for them
        *(extension(number, [dtype, 1 << 63]) for number, dtype in ((2, "float32"), (3, "<f4"))),
        extension(2, ["float32", 3], b"1234"),
        extension(2, ["load", 1], b"1234"),
        extension(2, [["float32"], 1], b"1234"),
        extension(3, ["O", 1], bytes(8)),
        extension(3, ["|O8", 1], bytes(8)),
        extension(3, ["(2,)f4,,(", 1], bytes(8)),
        extension(3, []),
        extension(9, []),
    ],
)
def test_hostile_arrays_are_refused(payload: bytes) -> None:
    with pytest.raises(ValueError, match="cannot be decoded"):
        decode(payload)


def test_hostile_nesting_is_refused() -> None:
    for payload in (b"\x91" * 100_000 + b"\xc0", nested_tuples(2000)):
        with pytest.raises(ValueError, match="cannot be decoded"):
            decode(payload)
    deep: Any = 0
    for _ in range(16):
        deep = (deep,)
    assert decode(encode(deep)) == deep
    with pytest.raises(TypeError, match="nested more than 16 deep"):
        encode((deep,))


def nested_tuples(depth: int) -> bytes:
    payload = b"\x90"
    for _ in range(depth):
        payload = msgpack.packb([msgpack.ExtType(1, payload)])
    return payload
