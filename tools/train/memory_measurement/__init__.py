"""The parts of measure_memory.py, one concept a file. A package beside that script, which makes it importable."""
