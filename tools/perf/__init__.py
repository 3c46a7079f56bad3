"""`make perf`: is this tree faster or slower than the last release, or than any commit?

See docs/how-to/measure-network.md.

The plugin of the base commit is built beside the installed one, both run interleaved in bagua-net-bench, in many short
rounds of fresh processes, and every row gets a verdict that comes from how much the rounds differ among themselves.
"""
