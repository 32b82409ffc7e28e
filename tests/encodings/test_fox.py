"""Gates: what they come to between two tokens, exactly, over long texts too; their special cases; tiles they forget."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_less

import posx
from posx.attention.blockwise import Tiling, blockwise
from posx.encodings import Alibi, Fox, Nope
from posx.encodings.alibi import alibi_slopes
from posx.encodings.fox import running_sum
from posx.errors import ConfigError
from tests.encodings.cases import DIMS

H, D, M = DIMS.num_heads, DIMS.head_dim, DIMS.model_dim
RNG = np.random.default_rng(0)
attend = jax.jit(posx.attend, static_argnums=0, static_argnames=("executor",))


def tokens(length, batch=1):
    return [RNG.standard_normal((batch, length, *shape)).astype(np.float32) for shape in ((H, D), (H, D), (H, D), (M,))]


def outputs(encoding, params, q, k, v, x, executor="dense"):
    pos = np.arange(q.shape[1], dtype=np.int32)
    return attend(encoding, params, q, k, v, pos, x=x, executor=executor)


def constant(log_f):
    """Gates that are the same for every token: exp(log_f [h])."""
    b = np.log(np.exp(np.asarray(log_f)) / -np.expm1(log_f))
    return {"w": np.zeros((M, H), np.float32), "b": b.astype(np.float32)}


@pytest.mark.parametrize("bias", [-1e4, -1e2, 0.0, 1e2, 1e4])
def test_gates_that_are_shut_or_open_have_gradients(bias):
    """Where all that is seen is forgotten at once, too: a query still sees itself."""
    given = tokens(12)
    params = {"w": np.zeros((M, H), np.float32), "b": np.full(H, bias, np.float32)}
    grads = jax.grad(lambda params: (outputs(Fox(longest=12.0), params, *given) ** 2).sum())(params)
    assert all(np.isfinite(grad).all() for grad in grads.values())
    assert (np.abs(grads["w"]).max() > 0) == (abs(bias) < 1e2)


def test_gates_that_forget_nothing_are_no_positions():
    given = tokens(20)
    open_gates = {"w": np.zeros((M, H), np.float32), "b": np.full(H, 40, np.float32)}
    assert_allclose(outputs(Fox(longest=8.0), open_gates, *given), outputs(Nope(), {}, *given[:3], None), atol=1e-6)


def test_equal_gates_are_alibi():
    given, wanted = tokens(40), Alibi(H)
    params = constant(-alibi_slopes(H))
    found, alibi = outputs(Fox(longest=8.0), params, *given), outputs(wanted, {}, *given[:3], None)
    assert_allclose(found, alibi, atol=1e-5)
    fixed = Fox(gate="constant", shortest=4.0, longest=256.0)  # 2^-2 .. 2^-8: the slopes of four heads
    assert_allclose(outputs(fixed, fixed.init(jax.random.key(0), DIMS), *given), alibi, atol=1e-5)


def as_channels(dtype, given, c):
    """The sums c [t, h] as two more channels of queries and keys, kept in `dtype`."""
    q, k, v, _ = given
    ones = np.ones((*c.shape, 1))
    rows = np.concatenate([ones, c[..., None]], axis=-1)[None] * np.sqrt(D)
    columns = np.concatenate([-c[..., None], ones], axis=-1)[None]
    rows, columns = (np.asarray(jnp.asarray(a, dtype).astype(jnp.float32)) for a in (rows, columns))
    q, k = np.concatenate([q, rows], axis=-1), np.concatenate([k, columns], axis=-1)
    # The width is another one, by whose root products are divided.
    return outputs(Nope(), {}, q * np.float32(np.sqrt((D + 2) / D)), k, v, None)


def test_fox_equals_two_more_channels_while_sums_are_small():
    given = tokens(20)
    params = {"w": RNG.standard_normal((M, H)).astype(np.float32), "b": np.zeros(H, np.float32)}
    c = np.cumsum(-np.log1p(np.exp(-np.float64(given[3][0]) @ params["w"])), axis=0)
    found = outputs(Fox(longest=8.0), params, *given)
    assert_allclose(as_channels(jnp.float32, given, c), found, atol=1e-5)
    assert np.abs(as_channels(jnp.bfloat16, given, c) - found).max() > 0.01
    # What 16,000 tokens came to before, and cancels: float32 has no more than a thousandth left.
    assert np.abs(as_channels(jnp.float32, given, c - 11_000) - found).max() > 1e-4


def test_gates_start_at_a_half_or_where_they_are_told_to():
    dims = posx.Dims(model_dim=512, num_heads=8, head_dim=64, num_layers=1, train_len=256)
    w = Fox(longest=256.0).init(jax.random.key(0), dims)["w"]
    assert w.std() == pytest.approx(0.02, rel=0.05)
    for bias, f in ((0.0, 0.5), (5.0, 0.9933)):
        encoding = Fox(gate_bias=bias, longest=256.0)
        found = encoding.features(encoding.init(jax.random.key(0), dims), jnp.zeros((1, 512)), None, None)[0]
        assert_allclose(np.exp(found["log_f"].sum(axis=-1)), f, atol=1e-4)


def test_cable_is_the_gate_turned_round():
    given = tokens(12)
    params = {"w": RNG.standard_normal((M, H)).astype(np.float32), "b": RNG.standard_normal(H).astype(np.float32)}
    turned = {name: -array for name, array in params.items()}
    cable = outputs(Fox(gate="cable", longest=8.0), params, *given)
    assert_allclose(cable, outputs(Fox(longest=8.0), turned, *given), atol=1e-6)


def test_a_token_changes_the_gates_of_pairs_around_it_alone():
    """D_ij, the sum of log f over (j, i], holds the gate of token t where j < t <= i, and adds up along a path."""
    encoding, x = Fox(longest=8.0), RNG.standard_normal((9, M)).astype(np.float32)
    params = {"w": RNG.standard_normal((M, H)).astype(np.float32), "b": np.zeros(H, np.float32)}

    def paths(x):
        u = np.float64(encoding.token_bias(params, None, encoding.features(params, x, None, None)[0])).sum(axis=-1)
        return u[:, None] - u[None]

    before, after = paths(x), paths(np.concatenate([x[:4], x[4:5] + 1, x[5:]]))
    i, j = np.nonzero(np.abs(before - after).max(axis=-1) > 1e-4)
    assert {(a, b) for a, b in zip(i, j, strict=True) if a > b} == {(a, b) for a in range(4, 9) for b in range(4)}
    assert_allclose(before[8, 3] + before[3, 1], before[8, 1], atol=1e-6)
    assert_array_less(np.diff(before[8], axis=0) * -1, 0)


def test_differences_are_exact_after_a_hundred_thousand_tokens():
    log_f = -np.random.default_rng(1).exponential(0.7, (100_000, 1)).astype(np.float32)
    parts = np.asarray(jax.jit(lambda x: running_sum(x, None)[0])(log_f))
    near = (parts[1000:] - parts[:-1000]).sum(axis=-1)
    exact = np.cumsum(log_f.astype(np.float64), axis=0)
    assert_allclose(near, exact[1000:] - exact[:-1000], atol=1e-4)
    plain = np.cumsum(log_f, axis=0)
    assert np.abs(plain[1000:] - plain[:-1000] - (exact[1000:] - exact[:-1000])).max() > 1e-2


def test_sums_by_chunks_are_those_of_the_whole():
    log_f = -RNG.exponential(0.7, (150, 2)).astype(np.float32)
    whole = np.asarray(running_sum(log_f, None)[0]).sum(axis=-1)
    carry, found = None, []
    for part in np.split(log_f, [75]):
        sums, carry = running_sum(part, carry)
        found.append(np.asarray(sums).sum(axis=-1))
    assert_allclose(np.concatenate(found), whole, rtol=1e-6)


@pytest.mark.slow
def test_fox_skips_forgotten_tiles():
    """The same outputs and gradients; and a value that would poison all who meet it, met by nobody far away."""
    encoding, pos = posx.build("rope+alibi+fox", DIMS), np.arange(128, dtype=np.int32)
    shapes = jax.eval_shape(lambda: encoding.init(jax.random.key(0), DIMS))
    params = {name: 0.2 * RNG.standard_normal(a.shape).astype(np.float32) for name, a in shapes.items()}

    def loss(given, skip):
        params, q, k, v, x = given
        executor = functools.partial(blockwise, tiling=Tiling(8, 16, skip=skip))
        o = posx.attend(encoding, params, q, k, v, pos, x=x, executor=executor)
        return (o * jnp.arange(1.0, D + 1)[None, None, None]).sum(), o

    run = jax.jit(jax.value_and_grad(loss, has_aux=True), static_argnums=1)
    q, k, v, x = tokens(128)
    ((_, o), grads), ((_, wanted), wanted_grads) = (run((params, q, k, v, x), skip) for skip in (True, False))
    assert_allclose(o, wanted, atol=1e-6)
    jax.tree.map(lambda a, b: assert_allclose(a, b, rtol=1e-5, atol=1e-5), grads, wanted_grads)
    v[:, 0] = np.inf
    (_, o), _ = run((params, q, k, v, x), True)
    assert np.isfinite(o[:, 96:]).all()
    assert not np.isfinite(o[:, :16]).all()


@pytest.mark.peers
def test_x_transformers_sums_the_same_gates():
    import torch
    from x_transformers.x_transformers import DataDependentAlibi

    torch.manual_seed(0)
    theirs, x = DataDependentAlibi(M, H), RNG.standard_normal((1, 30, M)).astype(np.float32)
    linear = theirs.to_forget_gates[0]
    params = {"w": linear.weight.detach().numpy().T, "b": linear.bias.detach().numpy()}
    u = Fox(longest=8.0).features(params, x[0], None, None)[0]["log_f"].sum(axis=-1)
    wanted = theirs(torch.tensor(x)).detach().numpy()[0]
    assert_allclose((u[:, None] - u[None]).transpose(2, 0, 1), wanted, atol=1e-5)


def test_a_gate_that_is_none_is_refused():
    with pytest.raises(ConfigError, match="gate='open' is unknown"):
        posx.build("fox(gate=open)", DIMS)
    with pytest.raises(ConfigError, match="shortest"):
        posx.build("fox(gate=constant, shortest=9, longest=3)", DIMS)
    q, k, v, x = tokens(5)
    with pytest.raises(ConfigError, match="Fox.* is for causal masks"):
        pos = np.arange(5, dtype=np.int32)
        posx.attend(Fox(longest=8.0), constant(-alibi_slopes(H)), q, k, v, pos, x=x, mask=posx.full())
