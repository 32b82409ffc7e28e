"""Learned tables: what happens at and beyond the last row, and who gets a gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import posx
from posx.encodings import Learned, Sinusoidal
from tests.encodings.probes import vectors

TABLE = {"table": vectors(8, 6)}
ZERO = jnp.zeros((3, 6))


def rows(encoding, *pos):
    return np.asarray(encoding.embed(TABLE, jnp.zeros((len(pos), 6)), jnp.array(pos)))


def test_a_table_of_sinusoids_is_the_sinusoidal_encoding():
    pos, x = jnp.arange(8), vectors(8, 6, seed=1)
    table = {"table": Sinusoidal().embed({}, jnp.zeros((8, 6)), pos)}
    assert_array_equal(Learned(8).embed(table, x, pos), Sinusoidal().embed({}, x, pos))


def test_only_rows_in_use_get_a_gradient():
    x, pos = vectors(3, 6, seed=1), jnp.array([1, 5, 5])
    grad = jax.grad(lambda p: (Learned(8).embed(p, x, pos) ** 2).sum())(TABLE)["table"]
    unused = [0, 2, 3, 4, 6, 7]
    assert_array_equal(grad[np.array(unused)], 0)
    assert_allclose(grad[5], 2 * (x[1] + x[2] + 2 * TABLE["table"][5]), rtol=1e-5)


def test_learned_positions_without_a_row_give_nan_under_jit():
    out = jax.jit(Learned(8).embed)(TABLE, jnp.zeros((4, 6)), jnp.array([7, 8, -1, -8]))
    assert_array_equal(np.isnan(out).all(axis=1), [False, True, True, True])
    assert_array_equal(out[0], TABLE["table"][7])


def test_clamp_repeats_the_last_row():
    assert_array_equal(rows(Learned(8, beyond="clamp"), 7, 8, 900), TABLE["table"][[7, 7, 7]])
    assert Learned(8, beyond="clamp").max_position is None


def test_interpolate_stretches_end_to_end():
    encoding = Learned(8, beyond="interpolate")
    within = encoding.at_length(8)
    assert_array_equal(rows(within, *range(8)), TABLE["table"])
    assert_array_equal(rows(encoding.at_length(5), *range(8)), TABLE["table"])
    stretched = encoding.at_length(15)  # 14 steps over 7: every other position falls on a row
    assert_allclose(rows(stretched, *range(0, 15, 2)), TABLE["table"], rtol=0, atol=1e-6)
    middles = (TABLE["table"][1:] + TABLE["table"][:-1]) / 2
    assert_allclose(rows(stretched, *range(1, 15, 2)), middles, rtol=0, atol=1e-6)
    assert (encoding.max_position, stretched.max_position) == (7, 14)
    assert np.isnan(jax.jit(stretched.embed)(TABLE, jnp.zeros((1, 6)), jnp.array([15]))).all()
    assert Learned(8).at_length(100) == Learned(8)


def test_embed_refuses_positions_beyond_the_table():
    """As `attend` does if they are known on the host. Traced ones give NaN."""
    short, long = Learned(8, "interpolate"), Learned(8, "interpolate").at_length(20)
    message = "^Learned.* is defined for positions 0 to {}, but got 0 to {}\\.$"
    for kind in (np.asarray, jnp.asarray):
        with pytest.raises(posx.errors.UndefinedLength, match=message.format(7, 8)):
            short.embed(TABLE, ZERO, kind([6, 7, 8]))
        with pytest.raises(posx.errors.UndefinedLength, match=message.format(19, 20)):
            long.embed(TABLE, ZERO, kind([6, 7, 20]))
    assert np.isfinite(short.embed(TABLE, ZERO, np.array([5, 6, 7]))).all()
    assert np.isnan(jax.jit(short.embed)(TABLE, ZERO, np.array([6, 7, 8]))).any()


@pytest.mark.parametrize("name", ["learned", "tupe"])
def test_attend_refuses_positions_beyond_the_table(name):
    dims = posx.Dims(model_dim=6, num_heads=2, head_dim=3, num_layers=1, train_len=4)
    encoding = posx.build(name, dims)
    params, q = encoding.init(jax.random.key(0), dims), jnp.ones((1, 3, 2, 3))
    fine, beyond = (np.arange(n, n + 3, dtype=np.int32) for n in (1, 2))
    jax.eval_shape(lambda q: posx.attend(encoding, params, q, q, q, fine), q)
    with pytest.raises(ValueError, match="is defined for positions 0 to 3, but got 2 to 4"):
        posx.attend(encoding, params, q, q, q, fine, beyond)
