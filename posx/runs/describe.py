"""What a run comes to, from its settings alone: no text is read and nothing is written."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from posx.attention import causal, choose_executor
from posx.config import RunConfig
from posx.contract import Dims, abstract_params, distance_terms, of_kinds
from posx.cross_entropy import LARGEST_LOGITS
from posx.data import ByteTokenizer, load_tokenizer
from posx.encodings import Encoding
from posx.evaluation.protocols import run_protocols
from posx.machine import processes
from posx.machine.devices import devices_for, mesh_of
from posx.progress import say, size
from posx.runs import text
from posx.runs.folder import RunFolder

if TYPE_CHECKING:
    from posx.model import Model
    from posx.runs.share import Share
    from posx.training.layout import Layout


def model_of(run: RunConfig, vocab_size: int) -> Model:
    """The model that a run trains. Raises ConfigError for sizes and encodings that do not fit."""
    from posx.model import Model  # and Flax, which settings are checked without

    return Model(run.model, run.layers, vocab_size, run.dims)


def notice_of_code(run: RunConfig, name: str) -> None:
    """Say if the user's own encodings of a trained run have other code by now."""
    if changes := run.code_changes():
        say(f"notice: {name}: {changes} since this run was trained; its results now are kept apart from those of then")


def executor_of(run: RunConfig, encoding: Encoding) -> str:
    """Return the attention executor that trains `encoding`, also if the config says "auto"."""
    params = abstract_params(encoding, run.dims)
    sizes, dtype = (run.train.length, run.train.length), jnp.dtype(run.model.dtype)
    return choose_executor(run.train.executor, encoding, params, causal(), sizes, in_order=True, dtype=dtype)


def layout(run: RunConfig, started: int | None = None, mesh: str = "") -> Layout:
    """How a run lies on devices: as `mesh` asks for, DATAxMODEL, or for several processes; else whole on as many as it
    was `started` on, where there are so many. Raises ConfigError for a mesh that does not fit."""
    from posx.training.layout import Copies, asked_layout
    from posx.training.step import flops_per_token

    rows, length = run.train.batch_size // run.train.accumulation, run.train.length
    if mesh or processes.several():
        return asked_layout(mesh, rows, run.model.kv_heads, jax.device_count())
    if started and started <= jax.device_count() and rows % started == 0:
        return Copies(started)
    model = _model_of(run)
    return Copies(devices_for(rows, rows * length * flops_per_token(model, length), 16.0 * count(model)))


def opening(run: RunConfig, layout: Layout) -> str:
    """What is about to be trained and on what, in one line. Nothing is computed for it but shapes."""
    model = _model_of(run)
    most = "up to " if run.data.tokenizer == "bpe" else ""  # a short text has fewer tokens
    executors = dict.fromkeys(executor_of(run, encoding) for encoding in model.distinct)
    return f"{most}{count(model):,} parameters, {' and '.join(executors)} attention, {_devices(layout)}"


def _devices(layout: Layout) -> str:
    """What a run computes on."""
    backend, number = jax.default_backend(), layout.num_devices
    kinds = {device.device_kind for device in jax.devices()[:number]} - {backend}
    words = [f"{layout} {backend} device{'s' * (number > 1)}", *(f"({kind})" for kind in sorted(kinds))]
    return " ".join(words + [f"of {jax.process_count()} processes"] * processes.several())


@dataclasses.dataclass(frozen=True)
class Expected:
    """What a run costs, from its settings alone.

    num_params; tokens of all training steps; flops of training, and of the forward passes of evaluation, None where
    that goes over a whole text of unknown length; lengths that are evaluated, those the model is defined for, each a
    program to compile; slower: times the wall time of as many flops without what the encodings add; memory, bytes:
    float32 weights, their gradients and two moments, what the layers keep for the backward pass over one part of a
    batch, and logits (measured on XLA's CPU backend: within about a tenth, where the batch outweighs the weights;
    Shaw's and DeBERTa's vectors come on top, up to a third more). An accelerator or a Python process takes its own on
    top.
    """

    num_params: int
    tokens: int
    flops: float
    eval_flops: float | None
    lengths: int
    slower: float
    memory: int


#: How much longer a layer takes whose encoding works on every pair of tokens, by vectors or hooks of its own. Measured
#: at L = 64, width 128, training and evaluating to 16 L: Shaw 1.5, Transformer-XL 1.35, DeBERTa 1.25 times NoPE.
PAIRS_COST = 0.35


def is_defined(model: Model, length: int) -> bool:
    """Whether the model serves windows of `length` tokens."""
    last = model.at_length(length).max_position
    return last is None or length - 1 <= last


def expected(run: RunConfig) -> Expected:
    """The cost of `run`. Raises ConfigError for sizes and encodings that do not fit."""
    return _cost(run, _model_of(run))


def expected_in(folder: RunFolder, run: RunConfig) -> Expected:
    """Return the cost of `run`, whose tokenizer its folder may hold. Raises ConfigError as `expected` does."""
    return expected(dataclasses.replace(run, data=text.readable(folder, run)))


def _cost(run: RunConfig, model: Model) -> Expected:
    from posx.training.step import flops_per_token

    train = run.train
    tokens, dims, config = train.steps * train.batch_size * train.length, model.dims, model.config
    kept = (4 if config.mlp == "gelu" else 6) * config.hidden_dim + 4 * dims.num_heads * dims.head_dim
    kept += (9 if config.dropout else 6) * config.model_dim
    part = train.batch_size // train.accumulation * train.length
    logits = 2 * min(part * model.vocab_size, LARGEST_LOGITS)
    owed = {n for protocol, asked in run_protocols(run.eval, train.length) for n in protocol.owed(asked)}
    pairs = [_reads_pairs(encoding, model.dims) for encoding in model.encodings]
    return Expected(
        count(model), tokens, tokens * flops_per_token(model, train.length), _eval_flops(run, model),
        sum(is_defined(model, n) for n in owed), 1 + PAIRS_COST * sum(pairs) / len(pairs),
        16 * count(model) + 4 * (part * config.num_layers * kept + logits),
    )  # fmt: skip


def _eval_flops(run: RunConfig, model: Model) -> float | None:
    """Passes that protocols share are counted once."""
    from posx.training.step import flops_per_token

    passes = {}
    for protocol, lengths in run_protocols(run.eval, run.train.length):
        for length in (n for n in protocol.owed(lengths) if is_defined(model, n)):
            passes[length, protocol.stride_at(length, lengths)] = protocol.num_targets
    if not all(passes.values()):
        return None
    tokens = {place: num_targets * place[0] / place[1] for place, num_targets in passes.items()}
    return sum(n * flops_per_token(model, length) / 3 for (length, _), n in tokens.items())


def describe(run: RunConfig, mesh: str = "") -> str:
    """What a run would be, in one line; and in another what each device of a mesh, "DATAxMODEL", has of it, which need
    not be here. Raises ConfigError for a mesh that does not fit."""
    model = _model_of(run)
    on_mesh = f"\n{mesh}: {_share(run, model, mesh)}" if mesh else ""
    cost = _cost(run, model)
    encodings = ", ".join(map(repr, model.distinct))
    return (
        f"{encodings}, {cost.num_params:,} parameters, {cost.tokens:,} tokens in {run.train.steps} steps of "
        f"{run.train.batch_size} x {run.train.length}, {cost.flops:.2g} FLOP, {size(cost.memory)}, "
        f"data {run.data.source!r}, evaluated at {run.eval.lengths}{on_mesh}"
    )


def _share(run: RunConfig, model: Model, mesh: str) -> Share:
    from posx.runs.share import share
    from posx.training.layout import check_mesh

    data, heads = mesh_of(mesh)
    check_mesh(data, heads, run.train.batch_size // run.train.accumulation, model.config.kv_heads)
    return share(run, model, data, heads)


def _model_of(run: RunConfig) -> Model:
    """The model of a run whose text nobody has read yet."""
    known = {"bytes": ByteTokenizer.vocab_size, "bpe": run.data.vocab_size}
    tokenizer = run.data.tokenizer
    return model_of(run, known[tokenizer] if tokenizer in known else load_tokenizer(tokenizer).vocab_size)


@functools.cache  # the runs of a sweep share models
def count(model: Model) -> int:
    """Number of parameters."""
    return sum(leaf.size for leaf in jax.tree.leaves(model.abstract()))


def _reads_pairs(encoding: Encoding, dims: Dims) -> bool:
    """Return whether attention costs more than products: the encoding reads the vectors of pairs."""
    terms = distance_terms(encoding, abstract_params(encoding, dims))
    return bool(of_kinds(encoding, "channel", "tile") or terms.keys() - {"bias"})
