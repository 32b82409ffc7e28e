"""One run from its settings to `DONE`: checks first, then training, then evaluation; what is finished is kept."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from posx.attention import causal, choose_executor
from posx.config import RunConfig
from posx.data import ByteTokenizer, check_length, load_tokenizer, prepare
from posx.encodings import Encoding
from posx.errors import OutOfMemoryError, PartialFailure, WorkdirError
from posx.evaluation.run import check_stream, evaluate_run
from posx.model import Model
from posx.parallel import check_batch
from posx.progress import say
from posx.runs import RunFolder, environment, layout_changes, write_json
from posx.stored import digest
from posx.training.ceiling import flops_per_token
from posx.training.loop import train


def train_and_evaluate(run: RunConfig, folder: RunFolder) -> None:
    """Trains, evaluates and marks `folder` done; every finished part is kept and not done again."""
    check_writable(folder.path)
    run = folder.resumed(run)
    check_batch(run.train.batch_size, run.train.accumulation)
    dataset = prepare(run.data, log=say)
    check_stream(run.eval, run.train.length, dataset)
    check_length(len(dataset.train.tokens), run.train.length, "the training text")
    model = run.make_model(dataset.tokenizer.vocab_size)
    _check_disk(folder.path, 12 * count(model) * (run.train.keep_checkpoints + 1))
    with folder.held():
        folder.resumed(run)  # another process may have started one here meanwhile
        _write_environment(folder, environment(dataset))
        executors = [executor_of(run, e) for e in model.encodings]
        folder.write_config(run, num_params=count(model), executors=executors)
        dataset.tokenizer.save(folder.tokenizer_file)
        state = train(run, model, dataset, folder)
        rows = evaluate_run(run, run.eval, model, state["params"], dataset, folder, run.train.steps)
        failed = [row for row in rows if row["status"] in ("oom", "nonfinite")]
        if failed:
            raise PartialFailure(f"{folder.path.name}: {listed(failed)}")
        done = {"digest": digest(run), "data_digest": dataset.digest, "step": run.train.steps, "rows": len(rows)}
        write_json(folder.done_file, done)
        (folder.path / "status.json").unlink(missing_ok=True)


def executor_of(run: RunConfig, encoding: Encoding) -> str:
    """The attention executor that trains `encoding`, also where the config says "auto"."""
    length = run.train.length
    return choose_executor(
        run.train.executor, encoding, causal(), length, length, in_order=True, dtype=jnp.dtype(run.model.dtype)
    )


def describe(run: RunConfig) -> str:
    """What a run would be, from its settings alone: no text is read and nothing is written."""
    known = {"bytes": ByteTokenizer.vocab_size, "bpe": run.data.vocab_size}
    tokenizer = run.data.tokenizer
    model = run.make_model(known[tokenizer] if tokenizer in known else load_tokenizer(tokenizer).vocab_size)
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


def check_writable(path: Path) -> None:
    """Raises WorkdirError before anything long starts; a file is tried, for access bits do not tell all."""
    try:
        nearest_folder = next(p for p in (path, *path.parents) if p.exists())
        if not nearest_folder.is_dir():
            raise WorkdirError(f"work folder {path} cannot be made: {nearest_folder} is a file")
        with tempfile.TemporaryFile(dir=nearest_folder):
            pass
    except OSError as error:
        raise WorkdirError(f"work folder {path} cannot be written: {error.strerror}") from None


def _check_disk(path: Path, needed: int) -> None:
    """Raises OutOfMemoryError if the checkpoints a run keeps (float32 weights and two moments each) cannot fit."""
    free = shutil.disk_usage(next(p for p in (path, *path.parents) if p.exists())).free
    if free < needed:
        raise OutOfMemoryError(
            f"{path} has {free / 1e6:,.0f} MB free, its checkpoints need {needed / 1e6:,.0f} MB: free space, or lower "
            "train.keep_checkpoints"
        )


def _write_environment(folder: RunFolder, now: dict[str, Any]) -> None:
    """Writes `env.json` at the first start; later starts are listed in it, with a notice where bits may differ."""
    if not folder.env_file.exists():
        write_json(folder.env_file, now | {"resumed": []})
        return
    first = json.loads(folder.env_file.read_text())
    if first["data_digest"] != now["data_digest"]:
        raise WorkdirError(
            f"{folder.path} was trained on other text or another tokenizer (digest {first['data_digest'][:12]}, now "
            f"{now['data_digest'][:12]}): use another --workdir"
        )
    changes = layout_changes(first, now)
    if changes:
        say(f"notice: {folder.path.name} resumes under another layout, not bit for bit ({'; '.join(changes)})")
    resumed = [*first.get("resumed", []), {"git": now["git"], "changes": changes}]
    write_json(folder.env_file, first | {"resumed": resumed})


def listed(rows: list[dict[str, Any]]) -> str:
    return "; ".join(f"{row['run_id']} {row['protocol']} at {row['eval_len']}: {row['status']}" for row in rows)
