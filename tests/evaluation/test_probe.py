"""A function that gives no log-probabilities of the next token is refused, and no honest one is."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import posx.conformance
from posx.errors import ConfigError, UndefinedLength
from posx.evaluation import evaluate

VOCAB = 11
rng = np.random.default_rng(0)
STREAM = rng.integers(0, VOCAB, 2001)
EMBED, MIX, OUT = (rng.normal(0, 1, size) for size in ((VOCAB, 8), (8, 8), (8, VOCAB)))


def distributions(tokens, causal=True):
    """Log-probabilities [b, t, v] of a small model that reads the tokens so far, or all of them."""
    x = EMBED[tokens]
    seen = np.tril(np.ones((tokens.shape[1],) * 2)) if causal else np.ones((tokens.shape[1],) * 2)
    mean = seen / seen.sum(axis=1, keepdims=True) @ x
    logits = np.tanh(x + mean @ MIX) @ OUT
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


def of(found, tokens):
    return np.take_along_axis(found, tokens[..., None], axis=-1)[..., 0]


def honest(tokens):
    return of(distributions(tokens)[:, :-1], tokens[:, 1:])


def unshifted(tokens):
    """Entry i is of token i, given those before it."""
    first = np.full((len(tokens), 1), -math.log(VOCAB))
    return np.concatenate([first, honest(tokens)], axis=1)


def unshifted_distributions(tokens):
    first = np.full((len(tokens), 1, VOCAB), -math.log(VOCAB))
    return np.concatenate([first, distributions(tokens)[:, :-1]], axis=1)


def told_its_target(tokens):
    """A causal model whose every target is likely, whichever it is."""
    return np.full((len(tokens), tokens.shape[1] - 1), math.log(0.6)) + 0.01 * honest(tokens)


WRONG = {
    "unshifted": (unshifted, "is not shifted: its entries"),
    "unshifted, [b, t, v]": (unshifted_distributions, "is not shifted: its entries"),
    "unshifted twice": (
        lambda t: np.pad(honest(t)[:, 1:], ((0, 0), (0, 1)), constant_values=-2.0),
        "sees later tokens. Changing tokens from position .* changes entry",
    ),
    "no mask": (lambda t: of(distributions(t, False)[:, :-1], t[:, 1:]), "sees later tokens"),
    "no mask, [b, t, v]": (lambda t: distributions(t, False), "sees later tokens"),
    "told its target": (told_its_target, r"11 different tokens in one place sum to 6\.36"),
    "bits": (lambda t: honest(t) / math.log(2), r"gave bits: over the 11 known tokens .* 2\*\*x sums to 1, "),
    "one row late": (lambda t: np.roll(honest(t), 1, axis=0), "sees other rows of the batch"),
    "one row early, [b, t, v]": (lambda t: np.roll(distributions(t), -1, axis=0), "sees other rows of the batch"),
    "mean of the batch": (
        lambda t: 0.9 * honest(t) + 0.1 * honest(t).mean(axis=0, keepdims=True),
        "sees other rows of the batch",
    ),
    "told its target, [b, t, v]": (lambda t: distributions(np.roll(t, -1, axis=1)), "sees later tokens"),
}


@pytest.mark.parametrize("name", WRONG)
def test_log_probs_that_cannot_be_of_the_next_token_are_refused(name):
    model, words = WRONG[name]
    with pytest.raises(ConfigError, match=words) as caught:
        evaluate(model, STREAM, "nonoverlapping", [16])
    assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match=words):
        posx.conformance.check_log_probs(model, STREAM[:340].reshape(20, 17))


@pytest.mark.parametrize("name", [name for name in WRONG if WRONG[name][1].startswith(("is not", "sees later"))])
def test_log_probs_of_one_window_a_call_are_refused_too(name):
    with pytest.raises(ConfigError):
        posx.conformance.check_log_probs(WRONG[name][0], STREAM[:301])


def noisy(tokens):
    """Its arithmetic cannot be repeated, to a tenth of a nat."""
    return honest(tokens) - 0.1 * np.random.default_rng().random((len(tokens), tokens.shape[1] - 1))


def table(tokens):
    """A bigram model of counts, smoothed, so that most pairs have the same probability."""
    counts = np.full((VOCAB, VOCAB), 0.01)
    np.add.at(counts, (STREAM[:40], STREAM[1:41]), 1)
    return np.log(counts / counts.sum(axis=1, keepdims=True))[tokens[:, :-1], tokens[:, 1:]]


HONEST = {
    "[b, t - 1]": honest,
    "[b, t]": lambda t: np.pad(honest(t), ((0, 0), (0, 1)), constant_values=np.nan),
    "[b, t, v]": distributions,
    "uniform": lambda t: np.full(t.shape, -math.log(VOCAB)),
    "uniform, [b, t, v]": lambda t: np.full((*t.shape, VOCAB), -math.log(VOCAB)),
    "unigram": lambda t: np.log(np.arange(1, VOCAB + 1) / 66)[t[:, 1:]],
    "unigram, [b, t, v]": lambda t: np.broadcast_to(np.log(np.arange(1, VOCAB + 1) / 66), (*t.shape, VOCAB)),
    "bigram": table,
    "bfloat16": lambda t: jnp.asarray(honest(t), jnp.bfloat16),
    "noisy": noisy,
    "uniform of more tokens": lambda t: np.full(t.shape, -math.log(VOCAB) / math.log(2)),
    "unigram of more tokens": lambda t: np.log2(np.arange(1, VOCAB + 1) / 66)[t[:, 1:]],
    "sure": lambda t: np.where(t[:, 1:] == (t[:, :-1] + 1) % VOCAB, 0.0, -np.inf),
    "not finite": lambda t: np.where(t[:, 1:] == 3, np.nan, honest(t)),
}


@pytest.mark.parametrize("shape", [(1, 2), (1, 3), (1, 64), (2, 5), (3, 17), (64, 2), (64, 33)])
@pytest.mark.parametrize("name", HONEST)
def test_log_probs_of_honest_models_are_accepted(name, shape):
    for start in (0, 700):
        tokens = STREAM[np.arange(math.prod(shape)) % 1000 + start].reshape(shape)
        assert posx.conformance.check_log_probs(HONEST[name], tokens) is None


def test_check_log_probs_compiles_the_shape_of_the_windows_alone():
    """One program serves the check and the evaluation."""
    shapes = []

    @jax.jit
    def compiled(tokens):
        shapes.append(tokens.shape)
        return jnp.zeros((*tokens.shape, VOCAB)) - math.log(VOCAB)

    evaluate(lambda t: compiled(t), STREAM, "nonoverlapping", [16], batch_tokens=320)
    assert shapes == [(20, 17)]


def test_check_log_probs_takes_a_length_that_is_defined():
    def model(tokens):
        if tokens.shape[1] - 1 < 32:
            raise UndefinedLength("defined from 32 tokens on")
        return unshifted(tokens)

    with pytest.raises(ConfigError, match="not shifted"):
        evaluate(model, STREAM, "nonoverlapping", [64, 16])
    with pytest.raises(UndefinedLength):
        posx.conformance.check_log_probs(model, STREAM[:17])
    assert [row["status"] for row in evaluate(model, STREAM, "nonoverlapping", [8, 16])] == ["undefined"] * 2
