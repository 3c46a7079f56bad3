"""The kept path of what Bagua 0.9 had here."""

from __future__ import annotations

from bagua.torch_api.flattened_calls import (
    apply_flattened_call,
    apply_flattened_call_all,
    check_contiguous,
    flatten,
    get_flattened_tensor,
    to_bagua_datatype,
    unflatten,
)
from bagua.torch_api.statistical_average import StatisticalAverage, average_by_removing_extreme_values

__all__ = [
    "StatisticalAverage",
    "apply_flattened_call",
    "apply_flattened_call_all",
    "average_by_removing_extreme_values",
    "check_contiguous",
    "flatten",
    "get_flattened_tensor",
    "to_bagua_datatype",
    "unflatten",
]
