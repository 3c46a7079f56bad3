"""What the autotune service and its clients send to each other. No torch."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = [
    "BaguaCoreTelemetrySpan",
    "BaguaHyperparameter",
    "TensorDeclaration",
    "TensorDtype",
    "get_tensor_declaration_bytes",
]

_ENTRIES = ("name", "num_elements", "dtype")
_BYTES = {"f32": 4, "f16": 2, "bf16": 2, "u8": 1, "f64": 8, "i32": 4, "i64": 8}


class TensorDtype(enum.StrEnum):
    """Element types, by the names that messages use."""

    F32 = "f32"
    F16 = "f16"
    BF16 = "bf16"
    U8 = "u8"
    F64 = "f64"
    I32 = "i32"
    I64 = "i64"


class TensorDeclaration(dict[str, Any]):
    """A dictionary, as in Bagua 0.9, whose entries are attributes too.

    Args:
        name: of the tensor, unique in its model; or a dictionary of all three.
        num_elements: how many it has.
        dtype: a value of TensorDtype.

    Raises:
        TypeError: an entry is missing, or there is one more.
    """

    name: str
    num_elements: int
    dtype: str

    def __init__(
        self, name: str | Mapping[str, Any], num_elements: int | None = None, dtype: str | None = None
    ) -> None:
        given = name if isinstance(name, Mapping) else {"name": name, "num_elements": num_elements, "dtype": dtype}
        if set(given) != set(_ENTRIES) or None in given.values():
            raise TypeError(f"A tensor is declared as {given!r}. Give {', '.join(_ENTRIES)}.")
        super().__init__({entry: given[entry] for entry in _ENTRIES})

    def __getattr__(self, name: str) -> Any:
        if name in _ENTRIES:
            return self[name]
        raise AttributeError(f"A TensorDeclaration has no attribute {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in _ENTRIES:
            raise AttributeError(f"A TensorDeclaration has no attribute {name!r}")
        self[name] = value

    def bytes(self) -> int:
        """
        Raises:
            ValueError: an unknown dtype.
        """
        return self.num_elements * _BYTES[TensorDtype(self.dtype).value]

    def dict(self) -> dict[str, Any]:
        """For a message."""
        return {"name": self.name, "num_elements": self.num_elements, "dtype": TensorDtype(self.dtype).value}


def get_tensor_declaration_bytes(td: TensorDeclaration | Mapping[str, Any]) -> int:
    """Its size in bytes.

    Raises:
        TypeError: an entry is missing.
        ValueError: an unknown dtype.
    """
    return TensorDeclaration(td).bytes()


@dataclass
class BaguaCoreTelemetrySpan:
    """Something that happened to a tensor. Times in nanoseconds, of any clock."""

    trace_id: int
    action: str
    tensor_name: str
    start_time: int
    end_time: int

    def dict(self) -> dict[str, Any]:
        """For a message."""
        return asdict(self)


@dataclass
class BaguaHyperparameter:
    """
    Attributes:
        buckets: the tensors of each bucket.
        bucket_size: in bytes, at which a bucket is closed.
        is_hierarchical_reduce: whether to reduce within nodes first. No algorithm reads it.
    """

    buckets: Sequence[Sequence[TensorDeclaration | Mapping[str, Any]]] = field(default_factory=list)
    bucket_size: int = 0
    is_hierarchical_reduce: bool = False

    def update(self, param_dict: Mapping[str, Any]) -> BaguaHyperparameter:
        """Set every attribute that is given, unknown ones too. Returns this object."""
        for name, value in param_dict.items():
            setattr(self, name, value)
        return self

    def dict(self) -> dict[str, Any]:
        """For a message."""
        buckets = [
            [one.dict() if isinstance(one, TensorDeclaration) else dict(one) for one in bucket]
            for bucket in self.buckets
        ]
        return {**vars(self), "buckets": buckets}
