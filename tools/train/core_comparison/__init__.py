"""The parts of compare_core.py, one concept a file. The script makes it importable."""
