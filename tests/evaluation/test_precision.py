"""Log-probabilities of 16 bits: `posx.evaluate` says that they are rounded, whatever holds them, and once."""

import jax.numpy as jnp
import numpy as np
import pytest

from posx.evaluation import evaluate

VOCAB = 64
rng = np.random.default_rng(0)
STREAM = rng.integers(0, VOCAB, 513)
LOGITS = 3 * rng.normal(size=(VOCAB, VOCAB))
TABLE = (LOGITS - np.log(np.exp(LOGITS).sum(axis=1, keepdims=True))).astype(np.float32)
BF16, FP16 = np.dtype(jnp.bfloat16), np.dtype(np.float16)


def exact(tokens):
    return TABLE[tokens[:, :-1], tokens[:, 1:]]


def whole(tokens):
    return TABLE[tokens[:, :-1]]


CASES = {
    "bfloat16": (lambda tokens: jnp.asarray(exact(tokens), jnp.bfloat16), "bfloat16"),
    "float16": (lambda tokens: exact(tokens).astype(FP16), "float16"),
    "bfloat16-in-float32": (lambda tokens: exact(tokens).astype(BF16).astype(np.float32), "bfloat16"),
    "float16-in-float64": (lambda tokens: exact(tokens).astype(FP16).astype(np.float64), "float16"),
    "distribution": (lambda tokens: jnp.asarray(whole(tokens), jnp.bfloat16), "bfloat16"),
}


@pytest.mark.parametrize("case", CASES)
def test_log_probs_of_16_bits_are_said_once(capsys, case):
    log_probs, name = CASES[case]
    evaluate(log_probs, STREAM, ["nonoverlapping", "sliding"], [16, 32])
    err = capsys.readouterr().err
    assert err.count("notice: ") == 1
    assert f"log_probs gives {name}, which rounds" in err and "Cast the logits to float32" in err


@pytest.mark.peers
@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_log_probs_of_16_bits_in_torch_are_said(capsys, name):
    import torch

    evaluate(lambda tokens: torch.from_numpy(exact(tokens)).to(getattr(torch, name)), STREAM, "nonoverlapping", [16])
    assert f"log_probs gives {name}, which rounds" in capsys.readouterr().err


#: Exact numbers that happen to have few bits: powers of 2, whole numbers, a grid of eighths, one value.
GRIDS = {
    "float32": exact,
    "float64": lambda tokens: exact(tokens).astype(np.float64),
    "whole": lambda tokens: -(4 + tokens[:, 1:]).astype(np.float32),
    "eighths": lambda tokens: -4 - tokens[:, 1:] / np.float32(8),
    "powers": lambda tokens: -np.exp2(tokens[:, 1:] + np.float32(2)),
    "uniform": lambda tokens: np.full(tokens[:, 1:].shape, -5.0),
}


@pytest.mark.parametrize("grid", GRIDS)
def test_exact_log_probs_are_not_called_rounded(capsys, grid):
    evaluate(GRIDS[grid], STREAM, "nonoverlapping", [16])
    assert "rounds" not in capsys.readouterr().err
