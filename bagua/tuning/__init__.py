"""Which plan of communication makes steps fastest: search, cost model, advice and memory. No torch, no ranks."""
