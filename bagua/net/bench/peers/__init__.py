"""`bagua-net-bench --peers`: many connections between two processes, and what they cost when idle."""
