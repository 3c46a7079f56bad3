"""The parts of measure_memory.py, one concept a file. The script makes it importable."""
