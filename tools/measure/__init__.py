"""Variants by cases in turns, with ranks where they train: `PYTHONPATH=tools python -m measure NAME [options]`.

A tool is a list of variants, a list of cases and the function that measures one of them. What all share lies beside
them: whose turn it is (bagua.net.bench.turns), the verdict (bagua.net.bench.verdict), common options (`options`), the
ranks (`ranks`), and what is printed and written (`report`, `results`).
"""
