"""Operations along the keys of each query, in forms that are fast on CPUs too and whose gradients are as fast."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from posx.contract import exact_einsum, shifted_rows
from posx.machine.platforms import is_on_cpu

#: Numbers that one triangular product sums. 16 and 64 are slower.
BLOCK = 32


def sums_from_each(x: jax.Array) -> jax.Array:
    """Return the sums of x [..., n] from each entry to the last one.

    They are products with a triangle of ones, block by block, and the sums of all later blocks. XLA's own cumulative
    sum took 2.4 to 2.8 times as long on one CPU core.
    """
    n = x.shape[-1]
    size = min(n, BLOCK)
    triangle = jnp.asarray(np.tril(np.ones((size, size))), x.dtype)
    if n <= BLOCK:
        return exact_einsum("...i,ij->...j", x, triangle)
    flat = [(0, 0)] * (x.ndim - 1)
    blocks = jnp.pad(x, [*flat, (0, -n % size)]).reshape(*x.shape[:-1], -1, size)
    within = exact_einsum("...i,ij->...j", blocks, triangle)
    later = jnp.pad(sums_from_each(within[..., 0])[..., 1:], [*flat, (0, 1)])
    return (within + later[..., None]).reshape(*x.shape[:-1], -1)[..., :n]


def interpolate(rows: jax.Array, at: jax.Array) -> jax.Array:
    """Return the numbers of rows [..., p], p >= 2, linear between whole places, at places [..., n] from 0 to p - 1.

    Both neighbours are read as one slice. The gradient of `rows` then adds one slice for each place, instead of two
    numbers each on its own.
    """
    last = rows.shape[-1] - 1
    low = jnp.clip(jax.lax.stop_gradient(at).astype(jnp.int32), 0, last - 1)
    first = np.arange(0, rows.size, rows.shape[-1], dtype=np.int32).reshape(*rows.shape[:-1], 1)
    flat, places = rows.reshape(-1), (first + low).reshape(-1)
    pairs = jax.vmap(lambda place: jax.lax.dynamic_slice_in_dim(flat, place, 2))(places).reshape(*at.shape, 2)
    upper = at - low.astype(at.dtype)  # the gradient flows through the fraction alone
    return (pairs * jnp.stack([1 - upper, upper], axis=-1)).sum(axis=-1)


def _consecutive(distance: jax.Array) -> jax.Array:
    """Return whether distances [q, k] are those of consecutive positions."""
    return (jnp.diff(distance, axis=0) == 1).all() & (jnp.diff(distance, axis=1) == -1).all()


def _rows(strip: jax.Array, distance: jax.Array) -> jax.Array:
    """Return [h, q, k] of numbers [h, q, q + k] at the distances from the largest one down, as slices."""
    h, num_queries, width = strip.shape
    if not is_on_cpu():  # the distances are consecutive
        return shifted_rows(strip)
    firsts = (distance[-1, 0] - distance[:, 0]).astype(jnp.int32)  # positions may be floats
    firsts = jnp.broadcast_to(firsts[None], (h, num_queries)).reshape(-1)
    of_row = jax.vmap(lambda row, first: jax.lax.dynamic_slice_in_dim(row, first, distance.shape[1]))
    return of_row(strip.reshape(-1, width), firsts).reshape(h, *distance.shape)


def evaluate_pairs(function: Callable[[jax.Array], jax.Array], distance: jax.Array) -> jax.Array:
    """Return [h or 1, q, k] of a function of distances [n] -> [h or 1, n].

    It is evaluated once for each distance of a tile of consecutive positions, else for each pair.
    """

    def read_slices() -> jax.Array:
        falling = distance[-1, 0] - jnp.arange(sum(distance.shape), dtype=distance.dtype)
        strip = function(falling)
        return _rows(jnp.broadcast_to(strip[:, None], (len(strip), len(distance), strip.shape[1])), distance)

    def read_numbers() -> jax.Array:
        return function(distance.ravel()).reshape(-1, *distance.shape)

    if len(distance) == 1:
        return read_numbers()
    return jax.lax.cond(_consecutive(distance), read_slices, read_numbers)


def bank_products(vectors: jax.Array, bank: jax.Array, distance: jax.Array) -> jax.Array:
    """Return <vectors_i, bank at distance (i, j)> [h, q, k], 0 at distances that the bank does not have.

    At consecutive positions a tile has q + k - 1 distances. They are multiplied alone, and each query's row is a slice
    of the products. No array is [q, k, rank] in either case.

    Args:
      vectors: [q, h, rank].
      bank: [rank, n], of the distances from 0 to n - 1.
      distance: whole numbers [q, k].
    """
    (num_queries, num_keys), extent, rows = distance.shape, bank.shape[1], vectors.swapaxes(0, 1)
    width = num_queries + num_keys

    def products(bank: jax.Array) -> jax.Array:
        sums = exact_einsum("ir,re->ie", rows.reshape(-1, rows.shape[2]), bank)
        return sums.reshape(*rows.shape[:2], -1)

    def read_slices() -> jax.Array:
        falling = jnp.pad(jnp.flip(bank, axis=1), ((0, 0), (width, width)))
        first = jnp.clip(width + extent - 1 - distance[-1, 0], 0, width + extent)  # of the last query and first key
        falling_sums = products(jax.lax.dynamic_slice_in_dim(falling, first, width, axis=1))
        return _rows(falling_sums, distance)

    def read_numbers() -> jax.Array:
        bank_sums = jnp.take_along_axis(products(bank), jnp.clip(distance, 0, extent - 1)[None], axis=2)
        return jnp.where(((distance >= 0) & (distance < extent))[None], bank_sums, 0)

    return jax.lax.cond(_consecutive(distance), read_slices, read_numbers)
