"""`make sweep`: which algorithm is the fastest at which rate and delay of the network?

See docs/how-to/compare-algorithms.md.

Networks are tools/netlab's: each rank is a host of its own, in a network namespace. In each network all algorithms of
`measure core` train in turns, in one process group.
"""
