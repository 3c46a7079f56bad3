"""The Triton kernels of MinMaxUInt8 give the bytes of the reference, where there is no GPU: in Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.sweeps import rest_is_deep

PROGRAM = Path(__file__).with_name("triton_interpreter.py")


@pytest.mark.parametrize("which", rest_is_deep(["a sixth", "all"], 0))
def test_same_bytes_as_the_reference(which: str) -> None:
    folders = [str(PROGRAM.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(folders)}
    command = [sys.executable, str(PROGRAM), which]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "compared\n"
