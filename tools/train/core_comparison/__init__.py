"""The parts of compare_core.py, one concept a file. A package beside that script, which makes it importable."""
