"""Samples as bytes, and back. The default codec cannot run code of whoever wrote the bytes; pickle can.

A stored value is a frame: magic (4 bytes), codec (1), CRC-32 of codec, key and payload (4, little-endian), payload. The
key is in the checksum so that a value under the wrong key is found out too.
"""

from __future__ import annotations

import io
import pickle
import re
import struct
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from bagua.misuse import import_optional

_HEAD = struct.Struct("<4sBI")
_MAGIC = b"BGC1"

# Types of MessagePack's extensions.
_TUPLE, _TENSOR, _ARRAY, _SCALAR, _INTEGER, _COMPLEX = range(1, 7)
# Numbers, bytes, text and times: what numpy reads from memory without interpreting it.
_ARRAY_DTYPE = re.compile(r"[<>|][biufcSUmM]\d+(\[\w+\])?")
# Each level of tuples takes some 50 kB of the stack, and bytes from a server must not be able to overflow it.
_MAX_DEPTH = 16
_REMEDY = (
    "Convert it in the dataset, or pass codec='pickle', which takes any object but runs code of whoever can write to "
    "the store."
)
_DTYPES = {
    name.removeprefix("torch."): value
    for name, value in ((str(value), value) for value in vars(torch).values() if isinstance(value, torch.dtype))
}
_PICKLED_DTYPES = frozenset(
    {
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
        *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool),
    }
)


class Codec(NamedTuple):
    """How samples become bytes. `number` is stored with each value; `decode` raises ValueError for damaged bytes."""

    number: int
    encode: Callable[[Any], bytes]
    decode: Callable[[bytes | memoryview], Any]


def codec_of(name: str) -> Codec:
    """
    Args:
        name: "msgpack" for tensors and numpy arrays of numbers, bytes, numbers, bool, None, str, and tuples, lists and
            dicts of these; "pickle" for any object.

    Raises:
        ValueError: another name.
        ModuleNotFoundError: msgpack or numpy is not installed.
    """
    if name == "pickle":
        return Codec(2, _pickle, _unpickle)
    if name != "msgpack":
        raise ValueError(f"codec={name!r}: must be 'msgpack' or 'pickle'")
    _msgpack(), _numpy()
    return Codec(1, encode, decode)


def pack(codec: Codec, key: str, sample: Any) -> bytes:
    """A frame.

    Raises:
        TypeError: the codec cannot encode the sample.
    """
    payload = codec.encode(sample)
    return _HEAD.pack(_MAGIC, codec.number, _checksum(codec, key, payload)) + payload


def unpack(codec: Codec, key: str, frame: bytes) -> Any:
    """The sample of a frame.

    Raises:
        ValueError: the frame is damaged, or of another key or codec.
    """
    if len(frame) < _HEAD.size:
        raise ValueError(f"{len(frame)} bytes are not a stored sample")
    magic, number, checksum = _HEAD.unpack_from(frame)
    payload = memoryview(frame)[_HEAD.size :]
    if magic != _MAGIC or number != codec.number:
        raise ValueError("written in another format or with another codec")
    if checksum != _checksum(codec, key, payload):
        raise ValueError("the checksum does not match")
    return codec.decode(payload)


def _checksum(codec: Codec, key: str, payload: bytes | memoryview) -> int:
    head = f"{codec.number} {key}".encode("utf-8", "surrogatepass")
    return zlib.crc32(payload, zlib.crc32(head))


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        """Of plain tensors, torch pickles the memory that they are a view of, and fails to unpickle some dtypes."""
        if type(value) is not torch.Tensor or _not_plain(value) is not None:
            return NotImplemented
        is_whole = value.untyped_storage().nbytes() == value.numel() * value.element_size()
        if is_whole and value.dtype in _PICKLED_DTYPES:
            return NotImplemented
        return _tensor_from, (_tensor_bytes(value),)


def _pickle(sample: Any) -> bytes:
    try:
        file = io.BytesIO()
        _Pickler(file, protocol=5).dump(sample)
        return file.getvalue()
    except Exception as error:  # pickling raises whatever the classes raise
        kind = type(sample)
        raise TypeError(
            f"The cache cannot store an object of type {kind.__module__}.{kind.__qualname__} with codec='pickle' "
            f"({type(error).__name__}: {error}).\nConvert it in the dataset to what can be pickled."
        ) from error


def _unpickle(payload: bytes | memoryview) -> Any:
    try:
        return pickle.loads(payload)
    except Exception as error:  # unpickling raises whatever the classes raise, which may have changed
        raise ValueError(f"cannot be unpickled ({type(error).__name__}: {error})") from error


def _msgpack() -> Any:
    return import_optional("msgpack", "codec='msgpack'")


def _numpy() -> Any:
    return import_optional("numpy", "codec='msgpack'")


def encode(sample: Any) -> bytes:
    """
    Raises:
        TypeError: the sample holds an object of another type, a tensor that cannot be restored as it is, or tuples that
            are nested too deeply.
        ValueError: lists or dicts are nested too deeply.
    """
    return _encode(sample, 0)


def _encode(sample: Any, depth: int) -> bytes:
    """`depth`: of tuples, which are messages within messages."""
    packed: bytes = _msgpack().packb(
        sample,
        default=lambda value: _to_extension(value, depth),
        strict_types=True,
        unicode_errors="surrogatepass",
    )
    return packed


def decode(payload: bytes | memoryview) -> Any:
    """
    Raises:
        ValueError: these are not bytes of `encode`.
    """
    return _decode(payload, 0)


def _decode(payload: bytes | memoryview, depth: int) -> Any:
    msgpack = _msgpack()
    if depth > _MAX_DEPTH:
        raise ValueError(f"tuples are nested more than {_MAX_DEPTH} deep")
    try:
        return msgpack.unpackb(
            payload,
            ext_hook=lambda number, data: _from_extension(number, data, depth),
            strict_map_key=False,
            unicode_errors="surrogatepass",
        )
    except (
        ValueError,
        TypeError,
        KeyError,
        OverflowError,
        RuntimeError,
        struct.error,
        msgpack.UnpackException,
    ) as error:
        raise ValueError(f"cannot be decoded ({type(error).__name__}: {error})") from error


def _to_extension(value: Any, depth: int) -> Any:
    np, extension = _numpy(), _msgpack().ExtType
    kind = type(value)
    if kind is tuple:
        if depth == _MAX_DEPTH:
            raise TypeError(f"The cache cannot store tuples that are nested more than {_MAX_DEPTH} deep.\n{_REMEDY}")
        return extension(_TUPLE, _encode(list(value), depth + 1))
    if kind is torch.Tensor:
        return extension(_TENSOR, _tensor_bytes(value))
    if kind is np.ndarray or isinstance(value, np.generic):
        if not _ARRAY_DTYPE.fullmatch(value.dtype.str):
            raise TypeError(f"The cache cannot store a numpy array of dtype {value.dtype}.\n{_REMEDY}")
        head = encode([value.dtype.str, *value.shape])
        return extension(
            _ARRAY if kind is np.ndarray else _SCALAR, struct.pack("<I", len(head)) + head + value.tobytes()
        )
    if kind is int:  # MessagePack has 64 bits
        return extension(_INTEGER, value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))
    if kind is complex:
        return extension(_COMPLEX, struct.pack("<dd", value.real, value.imag))
    raise TypeError(f"The cache cannot store an object of type {kind.__module__}.{kind.__qualname__}.\n{_REMEDY}")


def _not_plain(tensor: torch.Tensor) -> str | None:
    """What `_tensor_bytes` does not store, in words; None: it stores this tensor."""
    return (
        f"on {tensor.device}"
        if tensor.device.type != "cpu"
        else f"of layout {tensor.layout}"
        if tensor.layout is not torch.strided
        else "that is nested"
        if tensor.is_nested
        else f"of {tensor.dtype}"
        if tensor.is_quantized
        else "that requires gradients"
        if tensor.requires_grad
        else None
    )


def _tensor_bytes(tensor: torch.Tensor) -> bytes:
    if (reason := _not_plain(tensor)) is not None:
        raise TypeError(f"The cache cannot store a tensor {reason}.\n{_REMEDY}")
    head = encode([str(tensor.dtype).removeprefix("torch."), *tensor.shape])
    return struct.pack("<I", len(head)) + head + elements_of(tensor)


def _tensor_from(data: bytes | memoryview) -> torch.Tensor:
    dtype, shape, memory = _split(data)
    kind = _DTYPES[dtype]
    return (torch.frombuffer(memory, dtype=kind) if memory else torch.empty(0, dtype=kind, device="cpu")).reshape(shape)


def _split(data: bytes | memoryview) -> tuple[str, list[int], bytearray]:
    """Dtype, shape and elements."""
    (size,) = struct.unpack_from("<I", data)
    dtype, *shape = decode(data[4 : 4 + size])
    # A copy that may be written to: the sample belongs to the caller.
    return dtype, shape, bytearray(memoryview(data)[4 + size :])


def _from_extension(number: int, data: bytes, depth: int) -> Any:
    if number == _TUPLE:
        return tuple(_decode(data, depth + 1))
    if number == _INTEGER:
        return int.from_bytes(data, "little", signed=True)
    if number == _COMPLEX:
        return complex(*struct.unpack("<dd", data))
    if number == _TENSOR:
        return _tensor_from(data)
    if number not in (_ARRAY, _SCALAR):
        raise ValueError(f"no extension has the number {number}")
    dtype, shape, memory = _split(data)
    if not _ARRAY_DTYPE.fullmatch(dtype):
        raise ValueError(f"arrays of dtype {dtype!r} are not stored")
    array = _numpy().frombuffer(memory, dtype=dtype).reshape(shape)
    return array if number == _ARRAY else array[()]


def elements_of(tensor: torch.Tensor) -> bytes:
    """Of a strided tensor, the bytes of its elements in the order of its indices, whatever its strides and device."""
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    # A tensor of one element is contiguous with any strides, but not every stride can be viewed as bytes.
    flat = plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)
    data: bytes = flat.numpy().tobytes()
    return data
