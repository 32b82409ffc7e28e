"""What a pass over many tokens, words or layers holds: the same numbers from less memory."""

import dataclasses

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest

from posx.lab import cross_entropy
from posx.lab.config.sections import ModelConfig
from posx.lab.cross_entropy import token_scores
from posx.lab.model import Model, make_model
from posx.lab.runs.scores import Way, model_scores, score_rows
from posx.lab.training.step import loss

VOCAB, LENGTH = 29, 16
SMALL = ModelConfig(num_layers=2, model_dim=24, num_heads=4, dropout=0.2)


def small(**options) -> Model:
    return make_model(dataclasses.replace(SMALL, **options), "t5", VOCAB, LENGTH)


def text(batch_size: int = 3, length: int = LENGTH + 1) -> np.ndarray:
    return np.random.default_rng(0).integers(0, VOCAB, (batch_size, length)).astype(np.int32)


def arrays(jaxpr):
    """Shapes of all arrays a program makes, those of its loops and calls included."""
    for equation in jaxpr.eqns:
        yield from ((equation.primitive.name, getattr(out.aval, "shape", ())) for out in equation.outvars)
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            yield from arrays(inner)


def largest(function, *args) -> int:
    return max(int(np.prod(shape)) for _, shape in arrays(jax.make_jaxpr(function)(*args).jaxpr))


def products(function, *args) -> int:
    return sum(name == "dot_general" for name, _ in arrays(jax.make_jaxpr(function)(*args).jaxpr))


# Cross-entropy


def problem(dtype, b=3, t=22, m=5):
    draw = np.random.default_rng(1)
    weights = (draw.standard_normal((b, t, m)), 2 * draw.standard_normal((m, VOCAB)), draw.standard_normal((b, t)))
    return (*(jnp.asarray(x, dtype) for x in weights), jnp.asarray(draw.integers(0, VOCAB, (b, t)), jnp.int32))


def weighted(hidden, unembedding, weight, targets):
    found = token_scores(lambda x: x @ unembedding, hidden, targets, VOCAB)
    return (weight * found).sum(), found


@pytest.mark.parametrize("limit", [1, 5 * 3 * VOCAB, 21 * 3 * VOCAB])
@pytest.mark.parametrize("bits", [32, 64])
def test_chunks_give_the_log_probs_and_gradients_of_one_pass(monkeypatch, bits, limit):
    with jax.enable_x64(bits == 64):
        args = problem(f"float{bits}")
        grad = lambda *args: jax.jit(jax.value_and_grad(lambda *a: weighted(*a), (0, 1, 2), has_aux=True))(*args)  # noqa: E731
        wanted = grad(*args)
        assert wanted[0][1].dtype == f"float{bits}"
        monkeypatch.setattr(cross_entropy, "LARGEST_LOGITS", limit)
        found = grad(*args)
        tolerance = 1e-5 if bits == 32 else 1e-13
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance), found, wanted)


def test_log_probs_are_those_of_a_distribution():
    hidden, unembedding, _, targets = problem("float32")
    _, found = weighted(hidden, unembedding, jnp.ones(targets.shape), targets)
    logits = np.float64(hidden) @ np.float64(unembedding)
    every = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    np.testing.assert_allclose(found, np.take_along_axis(every, np.asarray(targets)[..., None], -1)[..., 0], rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
def test_a_model_never_holds_the_logits_of_all_tokens(monkeypatch, tied):
    model, tokens = small(tied=tied, num_layers=1), text(4, 65)
    params = model.init(jax.random.key(0))

    def call(params):
        return loss(model, params, tokens, jax.random.split(jax.random.key(1), len(tokens)), "blockwise")

    all_logits = 4 * 64 * VOCAB
    assert largest(call, params) >= all_logits
    wanted = jax.jit(jax.value_and_grad(call))(params)
    scored = model_scores(model, params, Way("dense"))(tokens)
    monkeypatch.setattr(cross_entropy, "LARGEST_LOGITS", 4 * 8 * VOCAB)
    score_rows.clear_cache()
    again = lambda params: call(params)  # noqa: E731  (another function, so that nothing of it is traced yet)
    found = jax.jit(jax.value_and_grad(again))(params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), found, wanted)
    np.testing.assert_allclose(model_scores(model, params, Way("dense"))(tokens), scored, rtol=1e-5)
    for function in (again, jax.grad(again)):
        shapes = [shape for _, shape in arrays(jax.make_jaxpr(function)(params).jaxpr)]
        assert max(int(np.prod(shape)) for shape in shapes if VOCAB in shape) <= 4 * 8 * VOCAB


# Recomputing layers


@pytest.mark.slow
def test_recomputed_layers_give_the_same_loss_and_gradients():
    params, tokens = small().init(jax.random.key(0)), text()

    def call(params, remat):
        return loss(small(remat=remat), params, tokens, jax.random.split(jax.random.key(1), len(tokens)), "auto")

    kept, recomputed = (jax.jit(jax.value_and_grad(call), static_argnums=1)(params, r) for r in ("none", "layer"))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), kept, recomputed)
    forward, backward = (
        products(lambda p: call(p, "none"), params),
        products(jax.grad(lambda p: call(p, "none")), params),
    )
    again = products(jax.grad(lambda p: call(p, "layer")), params)
    layers = forward - 1  # all but the product that gives the logits
    # What only leads to a layer's output, its last product, is not computed again.
    assert again == backward + layers - SMALL.num_layers


def test_recomputed_layers_leave_a_forward_pass_as_it_is():
    params, tokens = small(num_layers=1).init(jax.random.key(0)), text()
    found = [model_scores(small(remat=remat, num_layers=1), params)(tokens) for remat in ("none", "layer")]
    np.testing.assert_array_equal(*found)
