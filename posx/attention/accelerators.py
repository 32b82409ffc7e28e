"""Forms of attention's operations that suit accelerators: whole rows, one part of the queries after the other.

A pass over the scores of a tile costs the bytes that it moves. A loop over key blocks adds passes that rescale what
came before, and its steps wait for launches of kernels.
"""

from __future__ import annotations

from typing import Any

import jax

from posx.machine.platforms import is_on_cpu

#: Scores in a tile of whole rows on an accelerator, 512 MB of float32, and the fewest queries of it. `score` makes
#: arrays of several times that size, so that its tiles have fewer scores.
IN_ROWS, IN_ROWS_BY_SCORE, FEWEST_QUERIES = 2**27, 2**26, 64


def queries_in_rows(rows: int, num_keys: int, by_score: bool) -> int:
    """Return the queries of a tile of whole rows, a power of 2 at which its scores fit; 0 if they are too few."""
    fitting = (IN_ROWS_BY_SCORE if by_score else IN_ROWS) // (rows * num_keys)
    return 1 << (fitting.bit_length() - 1) if fitting >= FEWEST_QUERIES else 0


def accelerator_barrier(tree: Any) -> Any:
    """Return the arrays of `tree` together, stored as they are. No other barrier is in a program for accelerators."""
    return jax.lax.optimization_barrier(tree)


def sequence(earlier: Any, later: Any) -> tuple[Any, Any]:
    """Return both trees, with `later` behind a barrier that waits for `earlier`. Gradients wait the other way round.

    Otherwise XLA computes both parts at a time, in twice the memory. It also joins their products, with a copy of both
    operands.
    """
    return (earlier, later) if is_on_cpu() else accelerator_barrier((earlier, later))


def round_operands(tree: Any, dtype: Any) -> Any:
    """Return arrays rounded to the type of the operands of products, and stored as such; on CPUs the arrays themselves.

    Without a barrier, each product that reads them would round them anew, from arrays of twice the size.
    """
    if is_on_cpu() or all(x.dtype == dtype for x in jax.tree.leaves(tree)):
        return tree
    narrow = accelerator_barrier(jax.tree.map(lambda x: x.astype(dtype), tree))
    return jax.tree.map(lambda x, y: y.astype(x.dtype), tree, narrow)
