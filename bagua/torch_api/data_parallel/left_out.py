"""skip_all_reduce_unused_params: what no rank uses in the first backward pass is not communicated from then on."""

from __future__ import annotations

from dataclasses import replace

from bagua.engine.data_parallel import DataParallelEngine


def leave_out_unused_after_first_pass(engine: DataParallelEngine) -> None:
    """Once, at the end of the first backward pass that communicates: with `find_unused_parameters`, the ranks have
    agreed on what is used by then. Without it, every parameter is."""

    def leave_out() -> None:
        engine.after_backward.remove(leave_out)
        setup = engine.setup
        if setup.find_unused_parameters:
            used = {name for name, _ in engine.bagua_build_params()}
            unused = frozenset(name for name, _ in engine.synchronized_parameters if name not in used)
            # Parameters that are used may still be used by some ranks only: these go on agreeing on that.
            engine.replan(replace(setup, left_out=unused))

    engine.after_backward.append(leave_out)
