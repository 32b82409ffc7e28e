"""Evaluate a trained run and append its rows. A row that exists is not computed again."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from posx import interrupts
from posx.config import EvalConfig, RunConfig
from posx.config.data import PLACES
from posx.config.sections import cycle_of
from posx.data import Dataset, Tokenizer
from posx.encodings import code_of
from posx.errors import UndefinedLength
from posx.evaluation.base import Protocol
from posx.evaluation.protocols import BeginEveryWindow
from posx.evaluation.scoring import Documents, Measured, digest_of
from posx.files.checksums import with_checksum
from posx.files.rows import ROW_VERSION, result_of
from posx.layers import sequential
from posx.machine import processes
from posx.machine.devices import DATA, mesh, on_devices, on_each, over_devices, worth
from posx.model import Model
from posx.progress import Meter, counted, say
from posx.runs import damage
from posx.runs.describe import is_defined
from posx.runs.environment import measured_with
from posx.runs.folder import RunFolder
from posx.runs.targets import Question, questions
from posx.training.layout import Layout
from posx.training.step import flops_per_token


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _log_probs(model: Model, executor: str, num_devices: int, params: Any, tokens: jax.Array) -> jax.Array:
    """Return log-probabilities with the rows sharded over devices, or over the mesh that is set around the call."""

    def one(params: Any, tokens: jax.Array) -> jax.Array:
        return model.log_probs(params, tokens, sequential(tokens.shape[1] - 1), None, executor)

    return on_each(one, num_devices, PartitionSpec(DATA))(params, tokens)


def model_log_probs(model: Model, params: Any, executor: str = "auto", layout: Layout = Layout()):
    """Return the model as `evaluate` takes it: tokens [b, t + 1] -> log-probabilities [b, t].

    Sharded parameters stay sharded, and every process that holds some calls this. Many windows are sharded over `DATA`,
    few by the tokens of each. Raises UndefinedLength for windows that the model does not serve.
    """
    on = functools.cache(functools.partial(on_devices, params))

    def log_probs(tokens: np.ndarray) -> np.ndarray:
        length = tokens.shape[1] - 1
        at_length = model.at_length(length)
        if not is_defined(model, length):
            raise UndefinedLength(f"defined up to position {at_length.max_position}, but {length} tokens are requested")
        if layout.is_global:
            return _together(at_length, executor, layout, params, tokens)
        devices = worth(tokens[:, 1:].size * flops_per_token(model, length) / 3)
        if len(tokens) < devices:  # few windows, long ones: blocks of their queries are sharded
            with jax.set_mesh(mesh(devices)):
                return np.asarray(_log_probs(at_length, executor, 1, on(devices), on_devices(tokens, devices)))
        rows = over_devices(np.pad(tokens, ((0, -len(tokens) % devices), (0, 0))), devices)
        return np.asarray(_log_probs(at_length, executor, devices, on(devices), rows))[: len(tokens)]

    return log_probs


def _together(model: Model, executor: str, layout: Layout, params: Any, tokens: np.ndarray) -> np.ndarray:
    """Return log-probabilities by all devices of a layout: rows are sharded if there are as many, else their tokens."""
    rows = layout.mesh.shape[DATA]
    padded = np.pad(tokens, ((0, -len(tokens) % rows if len(tokens) >= rows else 0), (0, 0)))
    with jax.set_mesh(layout.mesh):
        return np.asarray(program(layout, model, executor)(params, padded))[: len(tokens)]


@functools.cache
def program(layout: Layout, model: Model, executor: str) -> Any:
    """Return the compiled program of a sharded model."""
    whole = NamedSharding(layout.mesh, PartitionSpec())
    return jax.jit(functools.partial(_log_probs, model, executor, 1), out_shardings=whole)


def evaluate_run(
    run: RunConfig,
    config: EvalConfig,
    model: Model,
    params: Any,
    dataset: Dataset,
    folder: RunFolder,
    step: int,
    layout: Layout = Layout(),
) -> list[dict[str, Any]]:
    """Return all rows that `config` asks for. Missing rows are computed and appended to `eval.jsonl` one by one.

    If a longer window than ever changes which tokens are scored, the lengths measured before are measured again. The
    validation text must be long enough: see `posx.runs.checks.check_stream`.
    """
    processes.first(lambda: damage.mend_rows(folder))
    facts = _facts(run, model, dataset, folder, step)
    log_probs = model_log_probs(model, params, config.executor, layout)
    text, eos, work = dataset.validation, dataset.tokenizer.eos, _Work(model)
    # The begin token before the text is the context of the very first target.
    stream = np.insert(text.tokens, 0, dataset.tokenizer.begin)
    documents = Documents(1 + text.offsets[:-1], text.offsets[1:])
    token_bytes = None if text.token_bytes is None else np.insert(text.token_bytes, 0, 0)
    # One for all protocols: per-position loss is read off a pass that the non-overlapping protocol makes.
    measured = Measured(log_probs, stream, token_bytes, (eos,), documents, config.batch_tokens, work.report)
    here = {name: facts[name] for name in ("hash", "step", "data_digest", "weights") if name in facts}
    stored = [row for row in folder.measured() if here.items() <= row.items()]
    stored = [row for row in stored if row.get("code", {}) == facts.get("code", {})]
    rows: list[dict[str, Any]] = []
    missing: list[tuple[Question, int]] = []
    for one in questions(
        config, run.eval, run.train.length, stored,
        lambda protocol, length: protocol.targets(stream, [length], documents).digest,
        functools.partial(is_defined, model),
    ):  # fmt: skip
        known = {length: row for length, row in one.stored.items() if _answers(row, config)}
        wanted = sorted({*one.lengths, *one.moved})
        rows += [with_checksum(known[length] | facts) for length in wanted if length in known]
        missing += [(one, length) for length in wanted if length not in known]
        if not known.keys() >= set(wanted):
            _say_why(one, facts["run_id"])
    for one, length in missing:
        if is_defined(model, length):
            work.add(one.protocol, measured, length)
    work.say_without_begin(dataset.tokenizer, facts["run_id"])
    with work.shown(f"{facts['run_id']} evaluating") if missing else contextlib.nullcontext():
        for one, length in missing:
            for row in one.protocol.measure(measured, [length]):
                interrupts.check()
                more = {"anchor": one.anchor, "executor": config.executor, "env": measured_with()}
                rows.append(with_checksum(facts | row | more))
                folder.append(folder.eval_file, rows[-1])
                work.finished(_line(rows[-1]))
    folder.list_rows()
    return rows


def _answers(row: dict[str, Any], config: EvalConfig) -> bool:
    """Tell whether a stored row need not be computed again.

    A named executor is measured itself. A row of status "oom" is tried again, as this may be another machine.
    """
    return row.get("status") != "oom" and config.executor in ("auto", row.get("executor", "auto"))


def _say_why(one: Question, name: str) -> None:
    """Say which lengths are measured again, and which stored rows are not compared."""
    what = f"{name}  {one.protocol.name}"
    if one.moved:
        lengths = ", ".join(map(str, one.moved))
        say(
            f"notice: {what}: windows of {one.anchor} tokens change which tokens are scored. Measuring "
            f"{lengths} again (docs/guides/protocols.md)"
        )
    if one.apart:
        counts = sorted({(row["max_targets"], row["stride"]) for row in one.apart})
        before = "; ".join(f"{targets or 'all'} targets, stride {stride}" for targets, stride in counts)
        say(f"notice: {what}: rows with other targets or strides ({before}) are not compared with the new ones")


def _facts(run: RunConfig, model: Model, dataset: Dataset, folder: RunFolder, step: int) -> dict[str, Any]:
    """Return the fields that all rows of a run have.

    code: of the user's own encodings, as they are now. weights: a digest of the parameters in their checkpoint.
    """
    code, weights = code_of(model.encodings), processes.told(lambda: folder.weights_by_step().get(step, ""))
    return {
        "schema_version": ROW_VERSION,
        "hash": run.hash,
        "run_id": folder.path.name,
        "settings": run.settings,
        "encoding": run.encoding,
        "layers": list(cycle_of(run.layer_texts)),
        "train_len": run.train.length,
        "seed": run.train.seed,
        "step": step,
        **({"weights": weights} if weights else {}),
        "tokenizer": dataset.tokenizer.name,
        "data_source": dataset.source,
        "data_digest": dataset.digest,
        "data_settings": {name: value for name, value in run.data.named().items() if name not in PLACES},
        **({"code": code} if code else {}),
    }


def _line(row: dict[str, Any]) -> str:
    """Return a row as one line of text."""
    scored = f"{row['num_targets']:,} targets of {counted(row['num_documents'], 'document')}"
    return f"{row['run_id']}  {row['protocol']} at {row['eval_len']}: {result_of(row)}  ({scored})"


class _Work:
    """The work of an evaluation and the finished part of it, in windows weighed by their cost."""

    def __init__(self, model: Model):
        self.model = model
        self.passes: dict[tuple[int, str], int] = {}
        self.firsts: dict[str, list[np.ndarray]] = {}  # by protocol, the first token of each window
        self.before = self.inside = 0  # done in the passes before this one, and in this one
        self.meter: Meter

    def add(self, protocol: Protocol, measured: Measured, length: int) -> None:
        """Add a length at which the model is defined. A pass that protocols share counts once."""
        targets = protocol.targets(measured.stream, [length], measured.documents)
        windows = protocol.windows(targets, length, protocol.stride_at(length, [length]))
        begins = protocol.begins(targets, windows)
        self.passes[length, digest_of(windows, begins)] = len(windows) * self._cost(length)
        firsts = np.where(begins, measured.stream[0], measured.stream[windows[:, 0]])
        self.firsts.setdefault(protocol.name, []).append(firsts)

    def say_without_begin(self, tokenizer: Tokenizer, run_id: str) -> None:
        """Say how many windows begin with the begin token of the tokenizer's own template, unless all do."""
        begin, found = tokenizer.begin, []
        for name, firsts in self.firsts.items():
            has = np.concatenate(firsts) == begin
            found += [] if has.all() else [f"{has.sum():,} of {len(has):,} of {name}"]
        if not found or begin not in tokenizer.template:
            return
        say(
            f"notice: {run_id}: the tokenizer puts the begin token {begin} ({tokenizer.shown(begin)}) before every "
            f"text, but not every window begins with it: {', '.join(found)}. --protocol {BeginEveryWindow.name} puts "
            "it before each"
        )

    def _cost(self, length: int) -> int:
        """Return a number proportional to the operations of a forward pass over one window."""
        return round(length * flops_per_token(self.model, length))

    @contextlib.contextmanager
    def shown(self, title: str) -> Iterator[None]:
        """Show a bar of all that was added."""
        with Meter(title, sum(self.passes.values())) as self.meter:
            yield

    def report(self, length: int, done: int) -> None:
        """Report the number of finished windows of a pass. At 0 its program is being compiled."""
        self.inside = done * self._cost(length)
        if done:
            self.meter.update(self.before + self.inside, f"windows of {length} tokens")
        else:
            self.meter.waiting(f"compiling for windows of {length} tokens")

    def finished(self, line: str) -> None:
        """End the pass and print its `line` above the bar."""
        self.before, self.inside = self.before + self.inside, 0
        say(line)
