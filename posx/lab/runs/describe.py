"""The model, the layout on devices and the cost of a run, from its settings alone."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING

import jax

from posx.attention import Mask, choose_executor
from posx.contract import Dims, abstract_params, distance_terms, select_hooks
from posx.contract.shapes import tile_shapes
from posx.encodings import Encoding
from posx.errors import ConfigError
from posx.evaluation.protocols import run_protocols
from posx.evaluation.targets import STRETCHES
from posx.lab.config import RunConfig
from posx.lab.cross_entropy import LARGEST_LOGITS
from posx.lab.data.store import named_tokenizer
from posx.lab.data.tasks import STOP_ITEMS
from posx.lab.positions import Grid, Sequential
from posx.lab.progress import size
from posx.machine.devices import DATA, MODEL, count_devices, parse_mesh
from posx.machine.platforms import platform
from posx.notices import say

if TYPE_CHECKING:
    from posx.lab.model import Model
    from posx.lab.training.layout import Layout

#: The share by which a layer takes longer if its encoding reads the vectors of every pair of tokens. Shaw takes 1.5,
#: Transformer-XL 1.35 and DeBERTa 1.25 times as long as NoPE, measured at L = 64 and width 128. The time is that of
#: training and evaluation to 16 L.
PAIRS_COST = 0.35

#: Bytes of an idle process with the compiled programs of training and of its evaluation. Measured at widths 64 and 256.
TRAINING_MEMORY = 660e6

#: The targets of a whole text that is not read, to weigh rows by.
WHOLE = 2**20

#: Sums over `MODEL` of activations [rows, m] in a layer: forward after `out` and `down`, backward before `query`,
#: `key`, `value` and `up`. A gate adds one, and so does the repeated `out` if layers are computed again. Counted in the
#: programs of XLA's CPU backend. Accelerators may join those of `query`, `key` and `value`.
SUMS = 6


def make_run_model(run: RunConfig, vocab_size: int) -> Model:
    """Return the model that a run trains, with a row for each id of its tokenizer, or for more if its config says so.

    The masked objective adds a row for <mask>. Raises ConfigError for fewer rows.
    """
    is_masked = run.train.objective == "masked"
    if run.model.vocab_size and run.model.vocab_size < vocab_size + is_masked:
        more = " and <mask>" if is_masked else ""
        raise ConfigError(
            f"model.vocab_size={run.model.vocab_size} is less than the tokenizer's {vocab_size} ids{more}."
        )
    from posx.lab.model import Model  # and Flax, which settings are checked without

    return Model(run.model, run.layers, run.model.vocab_size or vocab_size + is_masked, run.dims)


def notice_of_code(run: RunConfig, name: str) -> None:
    """Say if the code of the user's own encodings has changed since a run was trained."""
    if changes := run.code_changes():
        say(
            f"notice: {name}: {changes} since this run was trained, so its new results are kept apart from the "
            "earlier ones"
        )


def layer_executor(run: RunConfig, encoding: Encoding, mask: Mask) -> str:
    """Return the attention executor that trains a layer, also if the config says "auto"."""
    if run.train.executor != "auto":
        return run.train.executor
    params, sizes = abstract_params(encoding, run.dims), (run.train.length, run.train.length)
    tile = tile_shapes(encoding, run.dims, run.model.dtype)
    offset = 0 if run.train.token_positions.policy == Sequential() else None
    return choose_executor(encoding, params, mask, sizes, in_order=True, tile=tile, offset=offset)


def layout(run: RunConfig, model: Model, started: int | None, mesh: str) -> Layout:
    """Return the layout of a run and its model on devices.

    A `mesh`, DATAxMODEL, shards the state over all processes. Without a mesh each device has a copy of the state. A
    resumed run uses as many devices as it was `started` on, if this machine has that many. Raises ConfigError for a
    mesh that does not fit.
    """
    from posx.lab.training.layout import Layout, asked_layout
    from posx.lab.training.step import flops_per_token

    rows, length = run.train.batch_size // run.train.accumulation, run.train.length
    if mesh or jax.process_count() > 1:
        return asked_layout(mesh, rows, run.model.kv_heads)
    if started and started <= jax.device_count() and rows % started == 0:
        return Layout(started)
    flops = rows * length * flops_per_token(model, length, windows=False)
    return Layout(count_devices(rows, flops, 16.0 * count(model)))


def opening(run: RunConfig, model: Model, layout: Layout) -> str:
    """Return one line on the model and the devices of a run that is about to start."""
    most = "up to " if run.data.tokenizer == "bpe" else ""  # a short text has fewer tokens
    layers = zip(model.encodings, run.model.masks, strict=True)
    executors = dict.fromkeys(layer_executor(run, *layer) for layer in dict.fromkeys(layers))
    backend, number = platform(), layout.num_devices
    kinds = sorted({device.device_kind for device in jax.devices()[:number]} - {backend})
    words = [f"{layout} {backend} device{'s' * (number > 1)}", *(f"({kind})" for kind in kinds)]
    words += [f"of {jax.process_count()} processes"] * (jax.process_count() > 1)
    words += ["for masked tokens"] * (run.train.objective == "masked")
    return f"{most}{count(model):,} parameters, {' and '.join(executors)} attention, {' '.join(words)}"


@dataclasses.dataclass(frozen=True)
class Expected:
    """The cost of a run, the most if training may end early.

    Attributes:
      num_params: of the model.
      tokens: of all training steps.
      flops: of training, and of measuring answers in it. Layers with windows count as causal ones.
      eval_flops: of the forward passes of evaluation, None for a whole text of unknown length.
      rows: {(protocol, length): operations behind each required row of evaluation}. A pass that protocols share counts
        for the first of them. A whole text counts as WHOLE targets.
      slower: times the wall time of as many FLOP without an encoding.
      per_useful_flop: `flops` for each that MFU counts, which is 1 without windows.
      memory: bytes of the process, with float32 weights, their gradients and two moments, the activations kept for one
        part of a batch, and logits. On XLA's CPU backend these are within about a tenth if the batch outweighs the
        weights. Vectors of pairs add up to a third.
    """

    num_params: int
    tokens: int
    flops: float
    eval_flops: float | None
    rows: Mapping[tuple[str, int], float]
    slower: float
    per_useful_flop: float
    memory: int

    @property
    def lengths(self) -> int:
        """The number of evaluated lengths that the model is defined for, each a program to compile."""
        return len({length for (_, length), flops in self.rows.items() if flops})


def is_defined(model: Model, length: int) -> bool:
    """Tell whether the model serves windows of `length` tokens."""
    last = model.at_length(length).max_position
    return last is None or (Grid().last(length) if model.position_shape else length - 1) <= last


def expected_cost(run: RunConfig) -> Expected:
    """Return the cost of `run`. Raises ConfigError for a tokenizer that cannot be read."""
    from posx.lab.training.step import flops_per_token

    model, train = expected_model(run), run.train
    computed = flops_per_token(model, train.length, windows=False)
    tokens = train.steps * train.batch_size * train.length
    checks = (train.steps - 1) // train.stop_check_steps if train.stop_check_steps else 0
    rows, protocols = dict[tuple[str, int], float](), run_protocols(run.eval, train.length)
    passes = set[tuple[int, int, int]]()
    for protocol, lengths in protocols:
        for length in protocol.required_lengths(lengths, functools.partial(is_defined, model)):
            stride = protocol.window_stride(length, lengths)
            one = length, stride, protocol.text_tokens
            text = protocol.text_tokens or WHOLE
            windows = text / stride + STRETCHES * (text // STRETCHES % stride > 0)
            flops = windows * length * flops_per_token(model, length, windows=False) / 3
            rows[protocol.name, length] = flops if is_defined(model, length) and one not in passes else 0.0
            passes.add(one)
    is_known = all(protocol.num_targets for protocol, _ in protocols)
    return Expected(
        count(model), tokens,
        (tokens + checks * STOP_ITEMS * train.length / 3) * computed,
        sum(rows.values()) if is_known else None, rows,
        slower(model), computed / flops_per_token(model, train.length),
        round(TRAINING_MEMORY + 16 * count(model) + _activations(run, model)),
    )  # fmt: skip


def slower(model: Model) -> float:
    """Return how many times longer a model takes than one without an encoding, for as many operations."""
    pairs = [_reads_pairs(encoding, model.dims) for encoding in model.encodings]
    return 1 + PAIRS_COST * sum(pairs) / len(pairs)


def describe(run: RunConfig, mesh: str = "") -> str:
    """Return one line on the cost of a run, and one on the share of each device of a mesh, "DATAxMODEL".

    The devices of the mesh need not exist here. Raises ConfigError for a mesh that does not fit.
    """
    from posx.lab.training.layout import check_mesh

    model, cost, on_mesh = expected_model(run), expected_cost(run), ""
    most = "at most " if run.train.stop_check_steps else ""
    masked = ", 15 % of them masked" if run.train.objective == "masked" else ""
    if mesh:
        data, heads = parse_mesh(mesh)
        check_mesh(data, heads, run.train.batch_size // run.train.accumulation, model.config.kv_heads)
        on_mesh = f"\n{mesh}: {share(run, model, data, heads)}"
    return (
        f"{', '.join(map(repr, model.distinct))}, {cost.num_params:,} parameters, {most}{cost.tokens:,} tokens in "
        f"{run.train.steps} steps of {run.train.batch_size} x {run.train.length}{masked}, {cost.flops:.2g} FLOP, "
        f"{size(cost.memory)}, data {run.data.source!r}, evaluated at {run.eval.lengths}{on_mesh}"
    )


@dataclasses.dataclass(frozen=True)
class Share:
    """Bytes of one device of a mesh.

    Attributes:
      state: its part of weights, gradients and two moments.
      gathered: weights of other devices while they are used: of all layers, or of one and its gradients if
        `model.remat` is "layer". XLA's CPU backend keeps all of them even then.
      activations: kept for the backward pass, and logits.
      moved_weights, moved_activations: sent in one step, by rings.
    """

    state: float
    gathered: float
    activations: float
    moved_weights: float
    moved_activations: float

    def __str__(self) -> str:
        memory = self.state + self.gathered + self.activations
        return (
            f"{size(memory)} on each device ({size(self.state)} of weights, gradients and moments, "
            f"{size(self.gathered)} of weights gathered, {size(self.activations)} of activations), which sends "
            f"{size(self.moved_weights + self.moved_activations)} a step ({size(self.moved_weights)} of weights and "
            f"gradients, {size(self.moved_activations)} of activations)"
        )


def share(run: RunConfig, model: Model, data: int, heads: int) -> Share:
    """Return the share of one of `data` x `heads` devices.

    Gradients of arrays that are sharded over `DATA` count as summed on all of its devices, as XLA's CPU backend does
    it. If XLA scatters the sums, half of that is sent.
    """
    from posx.lab.training.layout import spec

    train, config = run.train, model.config
    own = whole = largest = 0.0
    for path, leaf in jax.tree_util.tree_flatten_with_path(model.abstract())[0]:
        axes = spec(path, leaf.shape, {DATA: data, MODEL: heads})
        array = 4.0 * leaf.size / (heads if MODEL in axes else 1)
        own += array / (data if DATA in axes else 1)
        whole += array
        largest = max(largest, array)
    again = config.remat == "layer"
    tables = 4.0 * model.vocab_size * config.model_dim / heads
    layer = (whole - tables * (1 if config.tied else 2)) / config.num_layers
    passes = train.accumulation * ((2 if again else 1) + 2)  # forward, again, and twice for the gradients
    sums = config.num_layers * (SUMS + config.gated + again) + 2
    rows = 4.0 * train.batch_size * train.length / data * config.model_dim
    return Share(
        state=4 * own,
        gathered=(largest + 2 * layer if again else whole) if data > 1 else 0.0,
        activations=_activations(run, model, data, heads, again),
        moved_weights=passes * whole * (data - 1) / data,
        moved_activations=2 * sums * rows * (heads - 1) / heads,
    )


def _activations(run: RunConfig, model: Model, data: int = 1, heads: int = 1, again: bool = False) -> float:
    """Return the bytes of activations and logits of one part of a batch on one device.

    With `again`, only the input of each layer is kept. XLA's CPU backend keeps the same in both cases.
    """
    config, dims = model.config, model.dims
    tokens = run.train.batch_size // run.train.accumulation * run.train.length / data
    inside = (6 if config.gated else 4) * config.hidden_dim + 4 * dims.num_heads * dims.head_dim
    layer = inside / heads + (9 if config.dropout else 6) * config.model_dim
    kept = layer + config.num_layers * config.model_dim if again else config.num_layers * layer
    return 4 * (tokens * kept + 2 * min(tokens * model.vocab_size, LARGEST_LOGITS))


def expected_model(run: RunConfig) -> Model:
    """Return the model of a run whose text is not read yet."""
    if run.data.is_task:
        return make_run_model(run, run.data.task.vocab_size)
    tokenizer = named_tokenizer(run.data)
    return make_run_model(run, tokenizer.vocab_size if tokenizer else run.data.num_ids)


@functools.cache  # the runs of a sweep share models
def count(model: Model) -> int:
    """Return the number of parameters."""
    return sum(leaf.size for leaf in jax.tree.leaves(model.abstract()))


def _reads_pairs(encoding: Encoding, dims: Dims) -> bool:
    """Tell whether attention costs more than products, because the encoding reads the vectors of pairs."""
    terms = distance_terms(encoding, abstract_params(encoding, dims))
    return bool(select_hooks(encoding, "channel", "tile") or terms.keys() - {"bias"})
