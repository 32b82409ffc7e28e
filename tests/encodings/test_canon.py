"""Canon-B: PyTorch's depthwise convolution, its limits, and the key offset as one of its kernels."""

import jax
import numpy as np
import pytest
from numpy.testing import assert_allclose

import posx
from posx.attention import with_previous_tokens
from posx.conformance import DIMS
from posx.errors import ConfigError
from tests.encodings.cases import params_of
from tests.encodings.probes import vectors

T, H, G, D = 9, DIMS.num_heads, DIMS.num_kv_heads, DIMS.head_dim
POS = np.arange(T, dtype=np.int32)
Q, K, V = vectors(T, H, D), vectors(T, G, D, seed=1), vectors(T, G, D, seed=2)
CANON = posx.build("canon", DIMS)
PARAMS = params_of(CANON)
jit_attend = jax.jit(posx.attend, static_argnums=0, static_argnames="mask")


def outputs(spec, params, pos=POS, v=V):
    return np.asarray(jit_attend(posx.build(spec, DIMS), params, Q[None], K[None], v[None], pos)[0])


def mapped(hook, x):
    return np.asarray(getattr(CANON, hook)(PARAMS, with_previous_tokens(CANON, hook, x[None], None)[0][0], POS, {}))


@pytest.mark.peers
def test_maps_are_the_released_convolution():
    """torch.nn.Conv1d with padding on both sides, cut at the end, over channels of all heads; its last tap is n = 0."""
    torch = pytest.importorskip("torch")
    for hook, x in (("query", Q), ("key", K), ("value", V)):
        flat, kernel = (np.ascontiguousarray(a.reshape(len(a), -1).T) for a in (x, PARAMS[hook][::-1]))
        conv = torch.nn.Conv1d(len(flat), len(flat), 4, groups=len(flat), bias=False, padding=3)
        conv.weight.data = torch.tensor(kernel)[:, None]
        wanted = flat + conv(torch.tensor(flat)[None])[0, :, :T].detach().numpy()
        assert_allclose(mapped(hook, x).reshape(T, -1), wanted.T, atol=1e-6)


def test_kernels_of_zeros_change_nothing():
    nothing = {name: 0 * a for name, a in PARAMS.items()}
    assert_allclose(outputs("canon", nothing), outputs("nope", {}), atol=1e-6)
    prefixed = {f"0.{name}": a for name, a in nothing.items()}
    assert_allclose(outputs("canon+rope", prefixed), outputs("rope", {}), atol=1e-6)
    assert np.abs(outputs("canon", PARAMS) - outputs("nope", {})).max() > 0.1


def test_a_kernel_of_keys_can_be_the_key_offset():
    params = {name: 0 * a for name, a in PARAMS.items()}
    moved = np.arange(D) >= D // 2
    params["key"][0], params["key"][1] = -1.0 * moved, moved
    assert_allclose(outputs("canon", params), outputs("key_offset", {}), atol=1e-6)
    chained = {f"0.{name}": a for name, a in params.items()}
    rope = "rope(rotary_dim=2)"
    assert_allclose(outputs(f"canon+{rope}", chained), outputs(f"key_offset+{rope}", {}), atol=1e-6)


def test_rope_rotates_what_canon_has_mixed():
    """Canon sees vectors as projected: `canon+rope` is RoPE on the vectors that canon returns."""
    mixed = (mapped(*given)[None] for given in (("query", Q), ("key", K), ("value", V)))
    wanted = jit_attend(posx.build("rope", DIMS), {}, *mixed, POS)[0]
    assert_allclose(outputs("canon+rope", {f"0.{name}": a for name, a in PARAMS.items()}), wanted, atol=1e-5)


def test_canon_of_values_alone_reaches_three_tokens_back():
    params = {name: 0 * a for name, a in PARAMS.items()} | {"value": PARAMS["value"]}

    def last(v):
        one = jit_attend(CANON, params, Q[None], K[None], v[None], POS, mask=posx.window(1))
        return one[0, -1].sum()

    moved = np.abs(jax.grad(last)(V)).max(axis=(1, 2)) > 0
    assert moved.tolist() == [n >= T - 4 for n in range(T)]


def test_positions_are_not_read():
    assert_allclose(outputs("canon", PARAMS, POS[::-1] * 7), outputs("canon", PARAMS), atol=1e-6)


def test_canon_comes_first_in_a_chain():
    for spec in ("rope+canon", "rotated_values+canon", "canon+key_offset", "transformer_xl+canon"):
        with pytest.raises(ConfigError, match="reads earlier vectors before any map"):
            posx.build(spec, DIMS)
