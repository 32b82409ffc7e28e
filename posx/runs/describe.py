"""What a run comes to, from its settings alone: no text is read and nothing is written."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from posx.attention import causal, choose_executor
from posx.config import RunConfig
from posx.data import ByteTokenizer, load_tokenizer
from posx.encodings import Encoding
from posx.model import Model
from posx.training.step import flops_per_token


def model_of(run: RunConfig, vocab_size: int) -> Model:
    """The model that a run trains. Raises ConfigError for sizes and encodings that do not fit."""
    found = run.resolution
    return Model(found.model, found.layers, vocab_size, found.model.dims(run.train.length))


def executor_of(run: RunConfig, encoding: Encoding) -> str:
    """The attention executor that trains `encoding`, also where the config says "auto"."""
    length = run.train.length
    return choose_executor(
        run.train.executor, encoding, causal(), length, length, in_order=True, dtype=jnp.dtype(run.model.dtype)
    )


def describe(run: RunConfig) -> str:
    """What a run would be, in one line."""
    known = {"bytes": ByteTokenizer.vocab_size, "bpe": run.data.vocab_size}
    tokenizer = run.data.tokenizer
    model = model_of(run, known[tokenizer] if tokenizer in known else load_tokenizer(tokenizer).vocab_size)
    tokens = run.train.steps * run.train.batch_size * run.train.length
    flops = tokens * flops_per_token(model, run.train.length)
    encodings = " + ".join(map(repr, model.distinct))
    return (
        f"{encodings}, {count(model):,} parameters, {tokens:,} tokens in {run.train.steps} steps of "
        f"{run.train.batch_size} x {run.train.length}, {flops:.2g} FLOP, data {run.data.source!r}, "
        f"evaluated at {run.eval.lengths}"
    )


def count(model: Model) -> int:
    """Number of parameters."""
    return sum(leaf.size for leaf in jax.tree.leaves(model.abstract()))
