"""Tokens/s of greedy decoding per encoding: with the key/value cache, and recomputing the whole prefix for every token.

A model with random weights (4 layers, width 256, 8 heads, float32) continues a prompt of random bytes, batch 1. Weights
are scaled by --scale so that the text does not settle on one token. Cached: `posx.lab.generate.generate`, timed from
the first new token to the last, so without the prompt's prefill. Recomputing: the whole forward pass, timed at
--samples of the steps, spread evenly from the first new token to the last. Each has its exact length and a program
compiled before; its tokens/s are the inverse of their mean.

`--samples=0` times the cache alone: each round continues the same text by --new tokens, so that the prompt is read
once. `--prompt=3968 --new=16 --samples=0` is the cost of a cached token near 4,096 tokens, within minutes for all.

Otherwise the cache's tokens are then compared with the argmax of one full pass over the whole text. They may differ
only if the two largest logits lie within 1e-4 of each other; anything else is a wrong answer.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import measure, report
from benchmarks.report import cell, quartiles, ratios
from posx.lab.config.sections import ModelConfig
from posx.lab.generate import Sampling, generate
from posx.lab.layers import sequential
from posx.lab.model import Model, make_model

TIE = 1e-4
VOCAB = 257


def add_arguments(parser: argparse.ArgumentParser) -> None:
    measure.add_rounds(parser, 5)
    for name, default in (("prompt", 1024), ("new", 1024), ("layers", 4), ("width", 256), ("heads", 8)):
        parser.add_argument(f"--{name}", type=measure.positive, default=default)
    parser.add_argument("--samples", type=int, default=8, help="steps at which recomputing is timed; 0: none")
    parser.add_argument("--scale", type=float, default=3.0, help="of all weight matrices")


def build(encoding: str, options: argparse.Namespace) -> tuple[Model, Any]:
    """Make the model, with tables for all positions, and its parameters, matrices scaled."""
    config = ModelConfig(num_layers=options.layers, model_dim=options.width, num_heads=options.heads)
    model = make_model(config, encoding, VOCAB, options.prompt + new_tokens(options))
    params = model.init(jax.random.key(0))
    scaled = jax.tree.map(lambda x: x * options.scale if x.ndim == 2 else x, params["layers"])
    return model, params | {"layers": scaled}


def new_tokens(options: argparse.Namespace) -> int:
    """Return the number of new tokens of a text; a round before all others is not timed."""
    return options.new if options.samples else options.new * (options.rounds + 1)


@functools.partial(jax.jit, static_argnums=0)
def next_token(model: Model, params: Any, tokens: jax.Array) -> jax.Array:
    """Choose the token after tokens [1, t], by a full forward pass."""
    return jnp.argmax(model(params, tokens, sequential(tokens.shape[1]))[0, -1])


@functools.partial(jax.jit, static_argnums=0)
def all_logits(model: Model, params: Any, tokens: jax.Array) -> jax.Array:
    return model(params, tokens, sequential(tokens.shape[1]))[0]


class Contestant:
    """One model, decoding the same prompt both ways; both are timed on the cached way's text."""

    def __init__(self, encoding: str, options: argparse.Namespace):
        self.encoding, self.options = encoding, options
        self.model, self.params = build(encoding, options)
        self.prompt = np.random.default_rng(0).integers(256, size=options.prompt).astype(np.int32)
        self.running = None if options.samples else self.decode()
        new = itertools.islice(self.running or self.decode(), options.new)
        self.text = np.concatenate([self.prompt, *new])
        steps = np.linspace(0, options.new - 1, min(options.samples, options.new)).round().astype(int)
        self.prefixes = [jnp.asarray(self.text[None, : options.prompt + n]) for n in steps]
        for prefix in self.prefixes:
            next_token(self.model, self.params, prefix)

    def decode(self) -> Any:
        count = new_tokens(self.options)
        return generate(self.model, self.params, [self.prompt], count, sampling=Sampling(temperature=0))

    def cached(self) -> float:
        """Return the tokens/s after the first new one, or of the next --new tokens of the running text."""
        tokens = self.running or self.decode()
        if not self.running:
            next(tokens)
        start = time.perf_counter()
        count = sum(1 for _ in itertools.islice(tokens, self.options.new))
        return count / (time.perf_counter() - start)

    def recomputed(self) -> float:
        """Return the tokens/s over the sampled steps."""
        next_token(self.model, self.params, self.prefixes[0]).block_until_ready()
        start = time.perf_counter()
        for prefix in self.prefixes:
            next_token(self.model, self.params, prefix).block_until_ready()
        return len(self.prefixes) / (time.perf_counter() - start)

    def compare(self) -> dict[str, int]:
        """Count the tokens that are not the full pass's argmax, and the ones among them that are no ties."""
        logits = np.asarray(all_logits(self.model, self.params, jnp.asarray(self.text[None, :-1])))
        return differences(logits[self.options.prompt - 1 :], self.text[self.options.prompt :])


def differences(logits: np.ndarray, tokens: np.ndarray) -> dict[str, int]:
    """Compare tokens [t] with the choices of logits [t, v]."""
    best = np.sort(logits, axis=-1)
    differ = logits.argmax(axis=-1) != tokens
    wrong = differ & ~(best[:, -1] - best[:, -2] <= TIE)
    return {"tokens": len(tokens), "different": int(differ.sum()), "wrong": int(wrong.sum())}


def run(options: argparse.Namespace, save: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    contestants = []
    for encoding in options.encodings:
        contestants.append(Contestant(encoding, options))
        print(f"{encoding} is ready", file=sys.stderr)
    ways = ("cached", "recomputed") if options.samples else ("cached",)
    rates = iter(measure.interleave([getattr(one, way) for one in contestants for way in ways], options.rounds))
    results: list[dict[str, Any]] = [
        {"encoding": one.encoding, **{way: next(rates) for way in ways}, **(one.compare() if options.samples else {}),
         "distinct": len(np.unique(one.text[options.prompt :]))}
        for one in contestants
    ]  # fmt: skip
    sizes = ("prompt", "new", "layers", "width", "heads", "scale")
    problems = [f"wrong: {row['wrong']} tokens cached with {row['encoding']}" for row in results if row.get("wrong")]
    return {
        **{name: getattr(options, name) for name in sizes}, "samples": len(contestants[0].prefixes),
        "results": results, "problems": problems,
    }  # fmt: skip


def table(stored: dict[str, Any]) -> str:
    """Format one row per encoding."""
    nope = next((row["cached"] for row in stored["results"] if row["encoding"] == "nope"), None)
    size = f"{stored['layers']} layers, width {stored['width']}, {stored['heads']} heads, float32, greedy, batch 1, "
    if not stored["samples"]:
        body = [
            [row["encoding"], cell(quartiles(row["cached"]), ",.0f"), cell(ratios(nope, row["cached"]), ".2f")]
            for row in stored["results"]
        ]
        return "\n".join([
            f"{size}{stored['new']} new tokens a round after {stored['prompt'] + stored['new']}; "
            f"{report.place(stored)}; {len(stored['results'][0]['cached'])} rounds: median [quartiles]",
            "", *report.rows(["encoding", "cached tokens/s", "time of a token / NoPE's"], body),
        ])  # fmt: skip
    body = [
        [
            row["encoding"], cell(quartiles(row["cached"]), ",.0f"), cell(quartiles(row["recomputed"]), ",.2f"),
            cell(ratios(row["cached"], row["recomputed"]), ".1f"), cell(ratios(row["cached"], nope), ".2f"),
            f"{row['tokens'] - row['different']} of {row['tokens']}", str(row["wrong"]), str(row["distinct"]),
        ]
        for row in stored["results"]
    ]  # fmt: skip
    head = ["encoding", "cached tokens/s", "recomputed tokens/s", "ratio", "cached / NoPE's", "same tokens", "wrong",
            "distinct tokens"]  # fmt: skip
    return "\n".join([
        f"{size}prompt {stored['prompt']}, {stored['new']} new tokens; recomputing timed at {stored['samples']} steps; "
        f"{report.place(stored)}; {len(stored['results'][0]['cached'])} rounds: median [quartiles]; wrong: differs "
        f"although the two largest logits are more than {TIE:g} apart",
        "", *report.rows(head, body),
    ])  # fmt: skip
