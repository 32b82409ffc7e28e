"""The cache's slots fill in order of arrival."""

import jax
import jax.numpy as jnp
import numpy as np
from numpy.testing import assert_array_equal

from posx.attention.cache import Cache, advance, write_slots


def test_write_fills_from_the_given_slot_on_and_keeps_the_type():
    slots = jnp.zeros((2, 5, 3), jnp.bfloat16)
    filled = jax.jit(write_slots)(slots, jnp.ones((2, 2, 3)), 2)
    assert filled.dtype == jnp.bfloat16
    assert_array_equal(filled[:, :, 0], [[0, 0, 1, 1, 0]] * 2)


def test_advance_appends_positions_and_orders():
    empty = Cache((), jnp.zeros((1, 6), jnp.int32), jnp.full((1, 6), -1), jnp.array(0))
    one = advance(empty, jnp.array([[7, 9]]), jnp.array([[0, 1]]))
    two = advance(one, jnp.array([[4]]), jnp.array([[2]]))
    assert_array_equal(two.pos, [[7, 9, 4, 0, 0, 0]])
    assert_array_equal(two.idx, [[0, 1, 2, -1, -1, -1]])
    assert int(two.filled) == 3
    assert_array_equal(np.asarray(empty.idx), -1)
