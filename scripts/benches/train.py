"""Training tokens/s per encoding, posx beside x-transformers; `scripts/bench.py` says how to read it."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benches import measure
from benches.measure import Spread, cell, quartiles
from posx.config import TrainConfig
from posx.data.stdlib import stdlib_files
from posx.model import make_model
from posx.model_config import ModelConfig
from posx.plots import look
from posx.training.ceiling import flops_per_token
from posx.training.step import init_state, train_step

VOCAB = 257
LEARNING_RATE = 1e-3
OURS, PEER = "posx", "x-transformers"


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of a model and of one step: `batch` windows of `length` tokens."""

    layers: int
    width: int
    heads: int
    batch: int
    length: int

    @property
    def tokens(self) -> int:
        return self.batch * self.length

    @property
    def config(self) -> ModelConfig:
        return ModelConfig(num_layers=self.layers, model_dim=self.width, num_heads=self.heads)

    def __str__(self) -> str:
        return f"{self.layers} layers, width {self.width}, {self.heads} heads, {self.batch} windows of {self.length}"


SHAPES = {"small": Shape(4, 128, 4, 32, 128), "medium": Shape(6, 256, 8, 8, 512), "tiny": Shape(1, 32, 2, 2, 16)}


@dataclasses.dataclass
class Contestant:
    """One model in training: `step(batch number)` returns its loss without waiting, `wait()` waits for all work."""

    library: str
    encoding: str
    parameters: int
    step: Callable[[int], Any]
    wait: Callable[[], Any]
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)
    losses: list[Any] = dataclasses.field(default_factory=list)

    def run(self, steps: int) -> float:
        """Seconds for that many further steps."""
        start = time.perf_counter()
        self.losses += [self.step(len(self.losses) + n) for n in range(steps)]
        self.wait()
        return time.perf_counter() - start


def text_batches(shape: Shape, count: int = 64) -> list[np.ndarray]:
    """Windows int32 [batch, length + 1] of the interpreter's own source code, the same for everyone."""
    text = np.frombuffer(b"\n".join(path.read_bytes() for path in stdlib_files()[0].paths[:60]), np.uint8)
    starts = np.random.default_rng(0).integers(len(text) - shape.length, size=(count, shape.batch, 1))
    return list(text[starts + np.arange(shape.length + 1)].astype(np.int32))


def posx_contestant(encoding: str, shape: Shape, batches: Sequence[np.ndarray]) -> Contestant:
    model = make_model(shape.config, {"name": encoding}, VOCAB, shape.length)
    config = TrainConfig(
        length=shape.length, batch_size=shape.batch, steps=1_000_000, warmup_steps=0,
        learning_rate=LEARNING_RATE, final_learning_rate=LEARNING_RATE,
    )  # fmt: skip
    state = init_state(model, config)
    tokens = [jax.device_put(batch) for batch in batches]

    def step(n: int) -> jax.Array:
        nonlocal state
        state, metrics = train_step(model, config, state, tokens[n % len(tokens)])
        return metrics["loss"]

    parameters = sum(leaf.size for leaf in jax.tree.leaves(state["params"]))
    facts = {"resolved": str(model.encodings[0]), "flops_per_token": flops_per_token(model, shape.length)}
    return Contestant(OURS, encoding, parameters, step, lambda: jax.block_until_ready(state), facts)


def peer_options(encoding: str, shape: Shape, flash: bool) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """What to tell x-transformers' wrapper and layers for an encoding; None where it has no such encoding."""
    layers: dict[str, Any] = {"attn_flash": flash and encoding != "t5"}  # it refuses flash with a T5 bias
    layers |= {
        "t5": {
            "rel_pos_bias": True,
            "rel_pos_max_distance": shape.length // 2,
            "rel_pos_num_buckets": min(32, shape.length // 2),
        },
        "rope": {"rotary_pos_emb": True, "rotary_emb_dim": shape.width // shape.heads},
        "alibi": {"alibi_pos_bias": True},
    }.get(encoding, {})
    absolute = {"sinusoidal": {"scaled_sinu_pos_emb": True}, "learned": {}}
    has = encoding in ("nope", "sinusoidal", "learned", "t5", "rope", "alibi")
    return (absolute.get(encoding, {"use_abs_pos_emb": False}), layers) if has else None


def peer_contestant(encoding: str, shape: Shape, batches: Sequence[np.ndarray], flash: bool) -> Contestant | None:
    options = peer_options(encoding, shape, flash)
    if options is None:
        return None
    import torch
    from x_transformers import Decoder, TransformerWrapper

    torch.set_num_threads(measure.cores())
    torch.manual_seed(0)
    wrapper, layers = options
    model = TransformerWrapper(
        num_tokens=VOCAB, max_seq_len=shape.length, tie_embedding=shape.config.tied, **wrapper,
        attn_layers=Decoder(
            dim=shape.width, depth=shape.layers, heads=shape.heads, attn_dim_head=shape.width // shape.heads,
            use_rmsnorm=True, ff_mult=4, ff_no_bias=True, verbose=False, **layers,
        ),
    )  # fmt: skip
    ours, parameters = TrainConfig(), list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim == 2], "weight_decay": ours.weight_decay},
        {"params": [p for p in parameters if p.ndim != 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=(ours.beta1, ours.beta2), fused=True)
    tokens = [torch.from_numpy(batch).long() for batch in batches]

    def step(n: int) -> Any:
        rows = tokens[n % len(tokens)]
        loss = torch.nn.functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, ours.clip_norm)
        optimizer.step()
        return loss.detach()

    return Contestant(
        PEER, encoding, sum(p.numel() for p in parameters), step, lambda: None, {"options": [wrapper, layers]}
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--steps", type=measure.positive, default=10, help="timed steps of one contestant in one round")
    parser.add_argument("--posx_only", action="store_true", help="without x-transformers")
    parser.add_argument("--flash", action="store_true", help="x-transformers with flash attention where it allows it")


def run(options: argparse.Namespace) -> dict[str, Any]:
    shape, steps = SHAPES[options.shape], options.steps
    batches, peers = text_batches(shape), not options.posx_only and peers_installed()
    contestants = []
    for encoding in options.encodings:
        contestants.append(posx_contestant(encoding, shape, batches))
        if peers and (rival := peer_contestant(encoding, shape, batches, options.flash)):
            contestants.append(rival)
    for contestant in contestants:  # compiles, and lets allocators settle
        contestant.facts["first_step_seconds"] = contestant.run(1)
        contestant.run(2)
        print(f"{contestant.library} {contestant.encoding} is ready", file=sys.stderr)

    def turn(contestant: Contestant) -> float:
        contestant.run(1)
        return steps * shape.tokens / contestant.run(steps)

    ceiling: list[float] = []
    rates = measure.interleave(
        [functools.partial(turn, contestant) for contestant in contestants],
        options.rounds,
        before=lambda: ceiling.append(measure.fresh_ceiling()),
    )
    results = [
        {"library": one.library, "encoding": one.encoding, "parameters": one.parameters, **one.facts,
         "tokens_per_second": rate, "losses": [float(loss) for loss in one.losses]}
        for one, rate in zip(contestants, rates, strict=True)
    ]  # fmt: skip
    sizes = {"shape": dataclasses.asdict(shape), "steps": steps, "ceiling": ceiling}
    return {**sizes, "peak_rss": measure.peak_rss(), "results": results}


def peers_installed() -> bool:
    try:
        import torch  # noqa: F401
        import x_transformers  # noqa: F401
    except ImportError as error:
        print(f"posx alone: {error.name} is missing; pip install '.[peers]' brings it\n")
        return False
    return True


def summarise(report: dict[str, Any]) -> list[dict[str, Any]]:
    """One row per encoding from a report's stored numbers; None where there is nothing to compare with."""
    results = {(row["library"], row["encoding"]): row for row in report["results"]}
    ceiling = statistics.median(report["ceiling"])

    def ratio(top: dict[str, Any] | None, bottom: dict[str, Any] | None) -> Spread | None:
        if top is None or bottom is None:
            return None
        rates = zip(top["tokens_per_second"], bottom["tokens_per_second"], strict=True)
        return quartiles(a / b for a, b in rates)

    rows = []
    for (library, encoding), ours in results.items():
        if library == OURS:
            peer, nope = results.get((PEER, encoding)), results.get((OURS, "nope"))
            rate = quartiles(ours["tokens_per_second"])
            rows.append({
                "encoding": encoding, "ours": ours, "peer": peer, "rate": rate,
                "share": rate[0] * ours["flops_per_token"] / ceiling,
                "step_time_to_nope": ratio(nope, ours),
                "peer_rate": quartiles(peer["tokens_per_second"]) if peer else None,
                "ratio": ratio(ours, peer),
            })  # fmt: skip
    return rows


def table(report: dict[str, Any]) -> str:
    """Markdown: speed, then what shows that the comparison is fair."""
    shape, whole, two = Shape(**report["shape"]), ",.0f", ".2f"
    ceiling, loads = quartiles(flops / 1e9 for flops in report["ceiling"]), report["load_average"]
    lines = [
        f"{shape}, {shape.tokens} tokens a step, float32; {report['cpu']}, {report['cores']} cores, "
        f"load {loads[0][0]} before and {loads[-1][0]} after; matmul ceiling {cell(ceiling, whole)} GFLOP/s; "
        f"{len(report['ceiling'])} rounds of {report['steps']} steps: median [quartiles]",
        "",
        f"| encoding | {OURS} tokens/s | share of ceiling | step time / NoPE's | {PEER} tokens/s | {OURS} / {PEER} |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    rows = summarise(report)
    for row in rows:
        lines.append(
            f"| {row['encoding']} | {cell(row['rate'], whole)} | {row['share']:.2f} | "
            f"{cell(row['step_time_to_nope'], two)} | {cell(row['peer_rate'], whole)} | {cell(row['ratio'], two)} |"
        )
    lines += [
        "",
        f"| encoding | parameters: {OURS} | {PEER} | loss, first step to last {report['steps']}: {OURS} | {PEER} |",
        "|---|---:|---:|---:|---:|",
    ]
    for row in rows:
        sides = [side for side in (row["ours"], row["peer"]) if side]
        losses = [f"{s['losses'][0]:.2f} to {np.mean(s['losses'][-report['steps'] :]):.2f}" for s in sides] + ["-"]
        sizes = [f"{side['parameters']:,}" for side in sides] + ["-"]
        lines.append(f"| {row['encoding']} | {sizes[0]} | {sizes[1]} | {losses[0]} | {losses[1]} |")
    return "\n".join(lines)


def draw(report: dict[str, Any], path: Path) -> None:
    """A pair of bars per encoding, tokens/s, with quartiles; the ratio stands at posx's bar."""
    rows = summarise(report)[::-1]
    with look.style():
        made = look.figure(7.5, 1.2 + 0.5 * len(rows))
        ax = made.add_subplot()
        made.subplots_adjust(top=0.99)
        for place, row in enumerate(rows):
            for rate, shift, color in (
                (row["rate"], 0.19, look.look(row["encoding"]).color),
                (row["peer_rate"], -0.19, "#C4C4C4"),
            ):
                if rate:
                    spread = [[rate[0] - rate[1]], [rate[2] - rate[0]]]
                    ax.barh(place + shift, rate[0], 0.36, color=color, xerr=spread, ecolor="#555555", capsize=2)
            if row["ratio"]:
                label = (f" {row['ratio'][0]:.2f}x", (row["rate"][2], place + 0.19))
                ax.annotate(*label, xytext=(3, 0), textcoords="offset points", va="center", size=9, color="#333333")
        ax.set_yticks(range(len(rows)), [look.look(row["encoding"]).name for row in rows])
        ax.grid(axis="y", visible=False)
        ax.margins(x=0.1, y=0.02)
        ax.set_xlabel("training tokens/s (median; whiskers: quartiles)")
        shape = Shape(**report["shape"])
        sizes = f"{shape} tokens, float32, {report['cores']} cores"
        pairs = any(row["peer"] for row in rows)
        grey = [f"colour: {OURS}; grey: {PEER}; the number: median of their ratios, round by round"] if pairs else []
        look.headings(made, f"Training speed of {OURS}", [sizes, *grey])
        look.save(made, path.parent, path.stem)
