"""Result files keep what was measured, and refuse what is not one."""

from __future__ import annotations

from pathlib import Path

import pytest

from bagua.net.bench.result_file import Figure, ResultFile, read_result, write_result

RESULT = ResultFile(
    title="All-reduce on one machine",
    command="bagua-net-bench -b 8 -e 16",
    date="2026-11-23T12:00:00+00:00",
    commit=None,
    machine={"cpus_usable": 2},
    versions={"bagua": "1.0.0"},
    figures=(
        Figure({"backend": "plugin", "size_bytes": 8}, "time", "us", 14.5, 14.2, 30.1, 7),
        Figure({"backend": "plugin", "size_bytes": 16}, "time", "us", 15.0, repetitions=None),
    ),
    parameters={"channels": 2},
    notes=("Other programs were running.",),
)


@pytest.mark.parametrize("figures", [RESULT.figures, ()])
def test_a_file_is_read_as_it_was_written(tmp_path: Path, figures: tuple[Figure, ...]) -> None:
    path = tmp_path / "result.json"
    result = ResultFile(**{**vars(RESULT), "figures": figures})
    write_result(path, result)
    assert read_result(path) == result


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema": 2}', '{"schema": 1, "measurements": []}'])
def test_other_files_are_refused_by_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"other\.json"):
        read_result(path)
