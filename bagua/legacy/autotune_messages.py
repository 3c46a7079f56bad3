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


@dataclass
class TensorDeclaration:
    """
    Attributes:
        name: of the tensor, unique in its model.
        num_elements: how many it has.
        dtype: a value of TensorDtype.
    """

    name: str
    num_elements: int
    dtype: str

    def bytes(self) -> int:
        """
        Raises:
            ValueError: an unknown dtype.
        """
        return self.num_elements * _BYTES[TensorDtype(self.dtype).value]

    def dict(self) -> dict[str, Any]:
        """For a message."""
        return {"name": self.name, "num_elements": self.num_elements, "dtype": TensorDtype(self.dtype).value}


def get_tensor_declaration_bytes(td: TensorDeclaration) -> int:
    """Its size in bytes."""
    return td.bytes()


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
