"""The parts of compare_convergence.py, one concept a file. A package beside that script, which makes it importable."""
