"""Measurements of training: `PYTHONPATH=tools python -m measure NAME [options]`.

A tool is a list of cases, a list of variants, and a function that measures one variant in one case. All tools share the
order of turns (bagua.net.bench.turns), the verdict (bagua.net.bench.verdict), options (`options`), rank processes
(`ranks`), and the output (`report`, `results`).
"""
