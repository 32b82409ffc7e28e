"""Tokens/s of greedy decoding per encoding: with the key/value cache, and computing the whole prefix for every token.

A model with random weights (4 layers, width 256, 8 heads, float32; weights scaled by --scale so that the text does not
settle on one token) continues a prompt of random bytes, batch 1. Cached: `posx.generate.generate`, timed from the first
new token to the last, so without the prompt's prefill. Recomputing: the whole forward pass, timed at --samples of the
steps, spread evenly from the first new token to the last, each at its exact length with a program of its own compiled
before; its tokens/s are the inverse of their mean.

The cache's tokens are then compared with the argmax of one full pass over the whole text. They may differ only where
the two largest logits lie within 1e-4 of each other; anything else is a wrong answer.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from benchmarks import measure
from benchmarks.measure import cell, quartiles
from posx.config.model import ModelConfig
from posx.generate import Sampling, generate
from posx.model import Model, make_model
from posx.plots import look
from posx.positions import sequential

TIE = 1e-4
VOCAB = 257


def add_arguments(parser: argparse.ArgumentParser) -> None:
    measure.add_rounds(parser, 5)
    for name, default in (("prompt", 1024), ("new", 1024), ("layers", 4), ("width", 256), ("heads", 8), ("samples", 8)):
        parser.add_argument(f"--{name}", type=measure.positive, default=default)
    parser.add_argument("--scale", type=float, default=3.0, help="of all weight matrices")


def build(encoding: str, options: argparse.Namespace) -> tuple[Model, Any]:
    """The model, with tables for all positions, and its parameters, matrices scaled."""
    config = ModelConfig(num_layers=options.layers, model_dim=options.width, num_heads=options.heads)
    model = make_model(config, encoding, VOCAB, options.prompt + options.new)
    params = model.init(jax.random.key(0))
    scaled = jax.tree.map(lambda x: x * options.scale if x.ndim == 2 else x, params["layers"])
    return model, params | {"layers": scaled}


@functools.partial(jax.jit, static_argnums=0)
def next_token(model: Model, params: Any, tokens: jax.Array) -> jax.Array:
    """What follows tokens [1, t], by a full forward pass."""
    return jnp.argmax(model(params, tokens, sequential(tokens.shape[1]))[0, -1])


@functools.partial(jax.jit, static_argnums=0)
def all_logits(model: Model, params: Any, tokens: jax.Array) -> jax.Array:
    return model(params, tokens, sequential(tokens.shape[1]))[0]


class Contestant:
    """One model, decoding the same prompt both ways; the cached way's text is what both are timed on."""

    def __init__(self, encoding: str, options: argparse.Namespace):
        self.encoding, self.options = encoding, options
        self.model, self.params = build(encoding, options)
        self.prompt = np.random.default_rng(0).integers(256, size=options.prompt).astype(np.int32)
        self.text = np.concatenate([self.prompt, *self.decode()])
        steps = np.linspace(0, options.new - 1, min(options.samples, options.new)).round().astype(int)
        self.prefixes = [jnp.asarray(self.text[None, : options.prompt + n]) for n in steps]
        for prefix in self.prefixes:
            next_token(self.model, self.params, prefix)

    def decode(self) -> Any:
        return generate(self.model, self.params, [self.prompt], self.options.new, sampling=Sampling(temperature=0))

    def cached(self) -> float:
        """Tokens/s after the first new one."""
        tokens = self.decode()
        next(tokens)
        start = time.perf_counter()
        count = sum(1 for _ in tokens)
        return count / (time.perf_counter() - start)

    def recomputed(self) -> float:
        """Tokens/s over the sampled steps."""
        next_token(self.model, self.params, self.prefixes[0]).block_until_ready()
        start = time.perf_counter()
        for prefix in self.prefixes:
            next_token(self.model, self.params, prefix).block_until_ready()
        return len(self.prefixes) / (time.perf_counter() - start)

    def compare(self) -> dict[str, int]:
        """How many tokens are not the full pass's argmax, and how many of those are no ties."""
        logits = np.asarray(all_logits(self.model, self.params, jnp.asarray(self.text[None, :-1])))
        return differences(logits[self.options.prompt - 1 :], self.text[self.options.prompt :])


def differences(logits: np.ndarray, tokens: np.ndarray) -> dict[str, int]:
    """Of tokens [t] against logits [t, v] that should have chosen them."""
    best = np.sort(logits, axis=-1)
    differ = logits.argmax(axis=-1) != tokens
    wrong = differ & ~(best[:, -1] - best[:, -2] <= TIE)
    return {"tokens": len(tokens), "different": int(differ.sum()), "wrong": int(wrong.sum())}


def run(options: argparse.Namespace, save: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    contestants = []
    for encoding in options.encodings:
        contestants.append(Contestant(encoding, options))
        print(f"{encoding} is ready", file=sys.stderr)
    turns = list(itertools.chain.from_iterable((one.cached, one.recomputed) for one in contestants))
    rates = measure.interleave(turns, options.rounds)
    results = [
        {"encoding": one.encoding, "cached": rates[2 * n], "recomputed": rates[2 * n + 1], **one.compare(),
         "distinct": len(np.unique(one.text[options.prompt :]))}
        for n, one in enumerate(contestants)
    ]  # fmt: skip
    sizes = ("prompt", "new", "layers", "width", "heads", "scale")
    problems = [f"wrong: {row['wrong']} tokens cached with {row['encoding']}" for row in results if row["wrong"]]
    return {
        **{name: getattr(options, name) for name in sizes}, "samples": len(contestants[0].prefixes),
        "results": results, "problems": problems,
    }  # fmt: skip


def table(report: dict[str, Any]) -> str:
    """Markdown, one row per encoding."""
    nope = next((row["cached"] for row in report["results"] if row["encoding"] == "nope"), None)
    body = [
        [
            row["encoding"], cell(quartiles(row["cached"]), ",.0f"), cell(quartiles(row["recomputed"]), ",.2f"),
            cell(measure.ratios(row["cached"], row["recomputed"]), ".1f"),
            cell(measure.ratios(row["cached"], nope), ".2f"),
            f"{row['tokens'] - row['different']} of {row['tokens']}", str(row["wrong"]), str(row["distinct"]),
        ]
        for row in report["results"]
    ]  # fmt: skip
    head = [
        "encoding", "cached tokens/s", "recomputed tokens/s", "ratio", "cached / NoPE's", "same tokens", "wrong",
        "distinct tokens",
    ]  # fmt: skip
    return "\n".join([
        f"{report['layers']} layers, width {report['width']}, {report['heads']} heads, float32, greedy, batch 1, "
        f"prompt {report['prompt']}, {report['new']} new tokens; recomputing timed at {report['samples']} steps; "
        f"{measure.place(report)}; {len(report['results'][0]['cached'])} rounds: median [quartiles]; wrong: differs "
        f"where the two largest logits are more than {TIE:g} apart",
        "",
        *measure.rows(head, body),
    ])  # fmt: skip


def draw(report: dict[str, Any], path: Path) -> None:
    """Two bars per encoding on a logarithmic axis, the ratio at the longer one."""
    rows = report["results"][::-1]
    with look.style():
        made = look.figure(7.5, 1.2 + 0.4 * len(rows))
        ax = made.add_subplot()
        made.subplots_adjust(top=0.99)
        for place, row in enumerate(rows):
            for name, shift, color in (
                ("cached", 0.19, look.look(row["encoding"]).color),
                ("recomputed", -0.19, "#C4C4C4"),
            ):
                middle, low, high = quartiles(row[name])
                spread = [[middle - low], [high - middle]]
                ax.barh(place + shift, middle, 0.36, color=color, xerr=spread, ecolor="#555555", capsize=2)
            ratio = measure.ratios(row["cached"], row["recomputed"])
            at = (quartiles(row["cached"])[2], place + 0.19)
            text = f" {ratio[0]:.3g}x" if ratio else ""
            ax.annotate(text, at, xytext=(3, 0), textcoords="offset points", va="center", size=9, color="#333333")
        ax.set_xscale("log")
        ax.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        ax.xaxis.set_major_formatter(FuncFormatter(lambda rate, _: f"{rate:,g}"))
        ax.xaxis.set_minor_locator(NullLocator())
        ax.set_yticks(range(len(rows)), [look.look(row["encoding"]).name for row in rows])
        ax.grid(axis="y", visible=False)
        ax.margins(x=0.1, y=0.02)
        ax.set_xlabel("tokens/s (median; whiskers: quartiles)")
        lines = [
            f"prompt {report['prompt']}, {report['new']} new tokens, greedy, batch 1, {report['cores']} cores",
            "colour: key/value cache; grey: the whole prefix for every token; the number: median ratio, round by round",
        ]
        look.headings(made, "Decoding speed", lines)
        look.save(made, path.parent, path.stem)
