"""Measurements of training: `PYTHONPATH=tools python -m measure NAME [options]`. All tools share one runner, whose head
says what a tool is: runner.py. Their ranks are in processes.py, seen from the tool, and rank.py, on their own side."""
