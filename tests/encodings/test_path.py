"""Products of I - beta w w^T along the path: none, reflections, one direction over and over, many blocks."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose

import posx
from posx.conformance import check_encoding
from posx.encodings import Chain, Fox, Nope, Path, Rope
from posx.encodings.path import BLOCK
from posx.errors import ConfigError
from posx.lab.config.sections import ModelConfig
from posx.lab.model import make_model
from tests.encodings.cases import CASES, reference_of
from tests.encodings.probes import attention_weights, vectors

T, H, D, M = 9, 2, 4, 6
CAUSAL = posx.causal()
X = vectors(T, M, seed=3)
Q, K = vectors(T, H, D), vectors(T, H, D, seed=1)


def params_of(encoding=Path(), beta=None, heads=H):
    """Large random weights; the same beta for every token where one is given."""
    params = encoding.init(jax.random.key(0), posx.Dims(M, H, D, 1, T, heads))
    params = {name: jnp.asarray(vectors(*a.shape, seed=n)) for n, (name, a) in enumerate(params.items())}
    if beta is not None:
        logit = {0.0: -200.0, 2.0: 200.0}.get(beta) or np.log(beta / (2 - beta))
        params |= {"u": 0 * params["u"], "b": jnp.full(heads, logit, jnp.float32)}
    return params


def logits(encoding, params, q=Q, k=K, x=X):
    """[h, q, k] of what each query sees, up to a number for each query: its own key has q . k / sqrt(d)."""
    return np.asarray(_logits(encoding, params, q, k, x))


def _logits(encoding, params, q, k, x):
    logs = jnp.log(jnp.maximum(attention_weights(encoding, params, q, k, np.arange(len(q)), mask=CAUSAL, x=x), 1e-30))
    own = (q * jnp.repeat(k, q.shape[1] // k.shape[1], axis=1)).sum(-1).T / np.sqrt(q.shape[-1])
    return logs - jnp.diagonal(logs, axis1=1, axis2=2)[..., None] + own[..., None]


def directions(params, x=X):
    """w [t, h, d] and beta [t, h]."""
    before = np.stack([x, *(np.pad(x, ((n, 0), (0, 0)))[: len(x)] for n in (1, 2))], axis=1)
    found, _ = Path().features(params, jnp.asarray(before), jnp.arange(len(x)), None)
    return np.asarray(found["w"]), np.asarray(found["beta"])


def test_a_path_of_identities_is_no_position():
    assert_allclose(logits(Path(), params_of(beta=0.0)), logits(Nope(), {}), atol=1e-5)
    assert np.abs(logits(Path(), params_of()) - logits(Nope(), {})).max() > 0.5


def test_reflections_keep_lengths():
    """The logits of the unit vectors as keys are what the path makes of the query: of its length where beta is 2."""
    units = [np.broadcast_to(np.eye(D, dtype=np.float32)[c], (T, H, D)) for c in range(D)]
    for beta, kept in ((2.0, True), (1.0, False)):
        arrived = np.stack([logits(Path(), params_of(beta=beta), k=unit) for unit in units])
        lengths = np.tril((arrived**2).sum(axis=0) * D)
        wanted = np.tril(np.broadcast_to((Q**2).sum(-1).T[:, :, None], (H, T, T)))
        assert (np.abs(lengths - wanted).max() < 1e-4) == kept
        assert (lengths < wanted + 1e-4).all()


@pytest.mark.parametrize("beta", [0.3, 1.0, 1.7])
def test_one_direction_over_and_over(beta):
    """H^n = I - (1 - (1 - beta)^n) w w^T; at 1 H has no inverse."""
    x = np.broadcast_to(X[:1], (T, M)).copy()
    params = params_of(Path(kernel=1), beta)
    w = directions(params | {"kernel": jnp.pad(params["kernel"], ((0, 2), (0, 0), (0, 0)))}, x)[0][0]
    assert_allclose((w**2).sum(-1), 1, atol=1e-6)
    steps = np.arange(T)[:, None] - np.arange(T)[None]
    shrunk = 1 - np.float64(1 - beta) ** np.maximum(steps, 0)
    turned = np.einsum("qhd,hd,he,khe->hqk", Q, w, w, K) * shrunk
    wanted = (np.einsum("qhd,khd->hqk", Q, K) - turned) / np.sqrt(D)
    assert_allclose(np.tril(logits(Path(kernel=1), params, x=x)), np.tril(wanted), atol=1e-5)


@pytest.mark.parametrize("length", [2 * BLOCK + 21, pytest.param(1000, marks=pytest.mark.slow)])
def test_many_blocks_are_the_product_token_by_token(length):
    q, k, x = vectors(length, H, D), vectors(length, 1, D, seed=1), vectors(length, M, seed=3)
    params = params_of(heads=1)
    w, beta = (np.float64(a[:, 0]) for a in directions(params, x))
    h = np.eye(D) - beta[:, None, None] * w[:, :, None] * w[:, None, :]
    wanted, passing = np.zeros((H, length, length)), np.float64(q)
    for j in range(length - 1, -1, -1):
        wanted[:, :, j] = (passing @ k[j, 0]).T / np.sqrt(D)
        passing[j:] = passing[j:] @ h[j]
    assert_allclose(np.tril(logits(Path(), params, q, k, x)), np.tril(wanted), atol=2e-5)


@pytest.mark.slow
def test_the_contract_over_many_blocks(monkeypatch):
    """Its 13 tokens are less than one."""
    monkeypatch.setattr("posx.encodings.path.BLOCK", 4)
    checks = ("reference", "tiles", "gradients", "packing", "padding", "decode", "float32", "bfloat16")
    report = check_encoding(CASES["path"], reference=reference_of(CASES["path"]), only=checks)
    assert report.ok, report


def test_only_tokens_between_act():
    """Token 4 turns what passes it: keys before it, for queries from it on."""
    params = params_of(Path(kernel=1))
    params |= {"kernel": jnp.pad(params["kernel"], ((0, 2), (0, 0), (0, 0)))}
    moved = X.copy()
    moved[4] = 3 * X[5]
    changed = np.abs(logits(Path(), params, x=moved) - logits(Path(), params)).max(axis=0) > 1e-3
    i, j = np.ogrid[:T, :T]
    assert (np.tril(changed) == ((i >= 4) & (j < 4))).all()


def test_gates_and_rotations_beside_it_add_what_they_add_alone():
    path, fox = params_of(), {"w": vectors(M, H, seed=8), "b": vectors(H, seed=9)}
    for other, given in ((Fox(longest=4.0), fox), (Rope(rotary_dim=D), {})):
        params = {f"0.{name}": a for name, a in path.items()} | {f"1.{name}": a for name, a in given.items()}
        both = logits(Chain((Path(), other)), params)
        alone = logits(Path(), path) + logits(other, given) - logits(Nope(), {})
        assert_allclose(np.tril(both), np.tril(alone), atol=1e-4)


def test_the_forget_gate_of_the_release_stands_inside_the_scale():
    """flash-linear-attention, ops/path_attn/naive.py: (A + g_cumsum_i - g_cumsum_j) * scale."""
    path, fox = params_of(), {"w": vectors(M, H, seed=8), "b": vectors(H, seed=9)}
    sums = np.cumsum(-np.log1p(np.exp(-(X @ fox["w"] + fox["b"]))), axis=0).T
    wanted = logits(Path(), path) + (sums[:, :, None] - sums[:, None]) / np.sqrt(D)
    params = {f"0.{name}": a for name, a in path.items()} | {f"1.{name}": a for name, a in fox.items()}
    found = logits(Chain((Path(), Fox(longest=4.0, gate_scale=D**-0.5))), params)
    assert_allclose(np.tril(found), np.tril(wanted), atol=1e-4)


def test_gradients_where_a_token_has_no_direction():
    """Zeros in x give w = 0, and H = I with a gradient that is a number."""
    x = X.copy()
    x[2:6] = 0

    def total(params, x):
        return (_logits(Path(), params, Q, K, x)[:, 5:, :2] * vectors(H, 4, 2, seed=5)).sum()

    grads = jax.jit(jax.grad(total, argnums=(0, 1)))(params_of(), x)
    assert all(np.isfinite(a).all() for a in jax.tree.leaves(grads))
    assert np.abs(grads[1][7]).max() > 0


def test_what_it_cannot_serve_is_refused():
    with pytest.raises(ConfigError, match="^Path.* is for causal masks"):
        attention_weights(Path(), params_of(), Q, K, np.arange(T), mask=posx.full(), x=X)
    with pytest.raises(ConfigError, match="^path: rank=0 must be at least 1"):
        Path(rank=0)


@pytest.mark.parametrize(
    ("spec", "revised"),
    [
        ("path", {"w", "beta"}), ("path+alibi", {"0.w", "0.beta"}), ("fox+path", {"1.w", "1.beta"}),
        ("path+log_length", {"0.w", "0.beta"}), ("path+rope", set()), ("path+cope", set()), ("dape(base=path)", set()),
    ],
)  # fmt: skip
def test_keys_are_revised_unless_another_part_reads_them(spec, revised):
    assert posx.build(spec, posx.Dims(12, 2, 6, 1, 16)).revised_by == revised


def through_cache(model, params, tokens, idx, sizes):
    """Return logits [b, t, v] of chunks of the given sizes in turn."""
    step, cache, found, start = jax.jit(model.decode), model.empty_cache(*tokens.shape), [], 0
    for size in itertools.cycle(sizes):
        part = slice(start, start := min(start + size, tokens.shape[1]))
        logits, cache = step(params, tokens[:, part], np.maximum(idx, 0)[:, part], idx[:, part], cache)
        found.append(logits)
        if start == tokens.shape[1]:
            return np.concatenate(found, axis=1)


def strong_model(spec, length):
    """A model with large weights, two rows of text, 7 empty slots before the second, and the full pass over them."""
    model = make_model(ModelConfig(num_layers=1, model_dim=16, num_heads=4, num_kv_heads=2), spec, 19, 32)
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda a: a + jnp.asarray(0.5 * rng.standard_normal(a.shape), a.dtype), model.init(jax.random.key(0))
    )
    tokens = rng.integers(0, 19, (2, length)).astype(np.int32)
    idx = np.arange(length, dtype=np.int32) - np.array([[0], [7]], np.int32)
    idx = np.maximum(idx, -1)
    whole = jax.jit(lambda *given: model(*given[:3], idx=given[3]))(params, tokens, np.maximum(idx, 0), idx)
    return model, params, tokens, idx, np.where(idx[..., None] < 0, 0, whole)


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["path+alibi", "path+fox"])
def test_revised_keys_give_the_full_pass(spec):
    """In single tokens and chunks of more than a block, with empty slots in both."""
    model, params, tokens, idx, whole = strong_model(spec, 84)
    found = through_cache(model, params, tokens, idx, [1, 1, 40])
    assert_allclose(np.where(idx[..., None] < 0, 0, found), whole, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("length", [300, 2000])
def test_keys_stay_exact_over_thousands_of_revisions(length):
    model, params, tokens, idx, whole = strong_model("path", length)
    found = through_cache(model, params, tokens, idx, [1])
    assert_allclose(np.where(idx[..., None] < 0, 0, found), whole, rtol=1e-3, atol=1e-3)


def test_a_reviser_that_names_no_feature_is_an_error():
    @dataclasses.dataclass(frozen=True)
    class Silent(posx.Encoding):
        def revise(self, params, keys, features, later):
            return keys

    with pytest.raises(ConfigError, match="revised_by names nothing: name the features that `revise` reads"):
        posx.build(Silent(), posx.Dims(12, 2, 6, 1, 16))
