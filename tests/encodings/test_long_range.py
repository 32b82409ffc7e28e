"""Far from zero: float32 and bfloat16 against the float64 reference, no further off than by rounding near zero."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose

import posx
from golden import reference
from posx.conformance.subject import add_axes
from posx.encodings import encoding_name
from posx.machine.platforms import is_on_cpu
from tests.encodings.cases import CASES, DIMS, layer, params_of, projections, reference_layer, reference_of, tokens
from tests.encodings.probes import attention_weights

#: Encodings of the positions in their tables alone.
LIMITED = ("learned", "tupe")
#: Maps, products and numbers by position; what only follows from these is marked slow.
FAR = ("sinusoidal", "transformer_xl", "rope", "pope", "alibi", "kerple", "fire", "xpos", "log_length")
UNLIMITED = [
    pytest.param(case, marks=() if case in FAR else pytest.mark.slow)
    for case in CASES
    if case not in LIMITED and "-" not in case
]
T = 11


def positions(largest):
    """Three rows: the last tokens of the text, the whole of it sparsely, and a few early keys before the last ones."""
    rng = np.random.default_rng(0)
    last = np.arange(largest - T + 1, largest + 1)
    sparse = np.sort(rng.choice(largest, T, replace=False))
    return np.stack([last, sparse, np.where(np.arange(T) < 5, np.arange(T), last)]).astype(np.int32)


@pytest.mark.parametrize("case", UNLIMITED)
def test_float32_stays_close_to_float64(case):
    encoding = CASES[case]
    params, weights, x = params_of(encoding), projections(), tokens(3, T)
    idx = np.broadcast_to(np.arange(T, dtype=np.int32), (3, T))
    for largest in (131_072, 1_000_000):
        pos = positions(largest)
        wanted = reference_layer(encoding, params, weights, x, pos, idx, 0 * idx)
        o = layer(encoding, params, weights, x, pos, idx, 0 * idx)
        assert_allclose(o, wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("case", [case for case in UNLIMITED if not CASES[case.values[0]].acts_on("embed")])
def test_bfloat16_vectors_stay_close_to_float64(case):
    """Vectors are rounded to 8 bits, positions never: the bound is that of rounding, at any position.

    Accelerators round scaled queries and weights too.
    """
    encoding, params = CASES[case], params_of(CASES[case])
    rng = np.random.default_rng(0)
    q = rng.standard_normal((3, T, DIMS.num_heads, DIMS.head_dim))
    k, v = (rng.standard_normal((3, T, DIMS.num_kv_heads, DIMS.head_dim)) for _ in range(2))
    x, q, k, v = (jnp.asarray(a, jnp.bfloat16) for a in (tokens(3, T), q, k, v))
    causal = np.tril(np.ones((T, T), bool))
    attend = jax.jit(lambda params, pos: posx.attend(encoding, params, q, k, v, pos, x=x))
    for largest in (32_768, 131_072):
        pos = add_axes(encoding, positions(largest))
        o = attend(params, pos)
        assert o.dtype == jnp.bfloat16
        for n, p in enumerate(pos):
            wide = [np.asarray(a[n], np.float64) for a in (x, q, k, v)]
            wide_params = {name: np.float64(a) for name, a in params.items()}
            wanted = reference_of(encoding)(wide_params, wide[0], lambda _, wide=wide: wide[1:], p, causal)
            bound = (4 if is_on_cpu() else 8) * 2.0**-8
            assert_allclose(np.asarray(o[n], np.float64), wanted, rtol=2.0**-7, atol=bound)


@pytest.mark.parametrize("case", ["sinusoidal", "learned"])
def test_bfloat16_embeddings_are_the_float32_sum_rounded_once(case):
    encoding, params = CASES[case], params_of(CASES[case])
    largest = 131_072 if encoding.max_position is None else encoding.max_position
    x, pos = jnp.asarray(tokens(1, T)[0], jnp.bfloat16), positions(max(largest, T))[0]
    wanted = reference.embed(encoding_name(encoding), encoding, params, np.asarray(x, np.float64), pos)
    out = np.asarray(encoding.embed(params, x, jnp.asarray(pos)), np.float64)
    assert_allclose(out, wanted, rtol=2.0**-8, atol=1e-6)


def test_bias_at_far_positions_tells_neighbours_apart():
    """slope * key index in bfloat16 does not: BLOOM's form gives most neighbours the same bias at 8 192 tokens."""
    pos = jnp.arange(131_072 - 8, 131_072)
    nothing = jnp.zeros((len(pos), DIMS.num_heads, DIMS.head_dim))
    bias = np.log(attention_weights(posx.build("alibi", DIMS), {}, nothing, nothing, pos))
    assert_allclose(np.diff(bias[:, -1]), np.repeat(2.0 ** -np.arange(2, 9, 2)[:, None], 7, axis=1), rtol=1e-4)
    by_key_index = jnp.bfloat16(2.0**-8) * pos.astype(jnp.bfloat16)
    assert len(np.unique(np.asarray(by_key_index, np.float32))) == 1
