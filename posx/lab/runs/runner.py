"""One run from its settings to `DONE`: checks, then training, then evaluation. Finished parts are kept."""

from __future__ import annotations

import contextlib
from typing import Any

import jax

from posx.errors import Damaged, DataError, PartialFailure, PosxError, Stopped, WorkdirError
from posx.lab.config import RunConfig
from posx.lab.data import Dataset, TaskDataset, corpus, prepare
from posx.lab.data.store import cache_folder
from posx.lab.files.checksums import write_checked
from posx.lab.files.rows import failures
from posx.lab.machine.compile_cache import use_compile_cache
from posx.lab.model import Model
from posx.lab.runs import damage, environment, text
from posx.lab.runs.answers import exact_match
from posx.lab.runs.checks import check_disk, check_memory, check_writable, with_text
from posx.lab.runs.describe import count, expected_model, layer_executor, layout, make_run_model, opening
from posx.lab.runs.evaluate import evaluate_run
from posx.lab.runs.folder import RunFolder
from posx.lab.runs.load import inherit_arrays
from posx.lab.training.layout import Layout
from posx.lab.training.loop import train
from posx.notices import say


def train_and_evaluate(
    run: RunConfig, folder: RunFolder, mesh: str = "", parent: RunFolder | None = None
) -> list[dict[str, Any]]:
    """Train, evaluate and mark `folder` done; return the rows. Every finished part is kept and not done again.

    The reason of a failure is kept in `status.json`, from which a sweep reads it.

    Args:
      run: its settings, checked.
      folder: of the run.
      mesh: "DATAxMODEL" to shard the state over devices too, see `posx.lab.training.layout`.
      parent: the run whose weights this one starts from, if `run.parent` names one.

    Raises:
      PosxError: the run cannot be made, or was stopped.
    """
    use_compile_cache(cache_folder(run.data))
    try:
        return _train_and_evaluate(run, folder, mesh, parent)
    except PosxError as error:
        if not isinstance(error, WorkdirError | Stopped) and (folder.path / ".lock").exists():
            with contextlib.suppress(PosxError):  # the first error is the one to report
                write_checked(folder.status_file, {"code": error.exit_code, "reason": str(error)})
        raise


def _train_and_evaluate(run: RunConfig, folder: RunFolder, mesh: str, parent: RunFolder | None) -> list[dict[str, Any]]:
    run, how, dataset, model = _prepare(run, folder, mesh)
    facts = {
        "settings": run.hash, "text": dataset.digest, "--mesh": str(how), "--workdir": str(folder.path),
        "versions": str(environment.versions()),
    }  # fmt: skip

    def begin() -> None:
        folder.check_resumes(run)  # another process may have started one here meanwhile
        folder.status_file.unlink(missing_ok=True)
        damage.mend_settings(folder)
        environment.record(folder, run, dataset, how)
        executors = [layer_executor(run, *layer) for layer in zip(model.encodings, run.model.masks, strict=True)]
        dataset.tokenizer.save(folder.tokenizer_file)
        folder.write_config(run, num_params=count(model), executors=executors)
        damage.mend(folder, run.hash)

    def first(params: dict[str, Any]) -> dict[str, Any]:
        return inherit_arrays(params, run, dataset.tokenizer, parent) if parent else params

    with folder.hold(facts, begin):
        task = dataset if run.train.stop_check_steps and isinstance(dataset, TaskDataset) else None
        right = exact_match(run, model, task, how) if task else None
        state = train(run, model, dataset, folder, how, first, right)
        step = int(state["step"])
        rows = evaluate_run(run, run.eval, model, state["params"], dataset, folder, step, how)
        if failed := failures(rows):
            raise PartialFailure(f"{folder.path.name}: {'; '.join(failed)}")
        folder.mark_done(run, len(rows), step)
    return rows


def _prepare(run: RunConfig, folder: RunFolder, mesh: str) -> tuple[RunConfig, Layout, Dataset, Model]:
    """Return the run with the digest of its text, its layout on devices, its text and its model. Raises PosxError.

    A sweep that planned the run has checked its settings. The folder, the text, memory and disk are checked here in
    any case: they may have changed since, or be those of another machine.
    """
    check_writable(folder.path)
    if folder.is_borrowed:
        raise WorkdirError(f"{folder.path} has the weights of another run, so it is not trained. Name a new folder.")
    is_held = folder.config_file.exists()
    with contextlib.suppress(Damaged):  # it is written again if all else is of this run
        run = text.with_known_places(run, folder.read_config()) if is_held else run
    folder.check_resumes(run)
    at_hand = text.with_saved_tokenizer(folder, run)
    if is_held:
        corpus.check_there(at_hand.data, folder.path.name)
    expected = expected_model(at_hand)
    how = layout(at_hand, expected, environment.started_devices(folder), mesh)
    say(f"{folder.path.name}  {opening(at_hand, expected, how)}")
    dataset = prepare(at_hand.data, log=say)
    if not run.text:
        run = with_text(run, dataset)
    elif run.text != dataset.digest:  # with the digest that a sweep has read, its checks of the text hold too
        raise DataError(
            f"data.source={at_hand.data.source}: the text or its tokenizer has changed since the settings of "
            f"this run were written (digest {run.text[:12]}, now {dataset.digest[:12]}). Restore it, or name it "
            "with --config.data.source=PATH."
        )
    model = make_run_model(run, dataset.tokenizer.vocab_size)
    num_params = count(model)
    say(f"{folder.path.name}  {dataset.summary()}; {num_params:,} parameters")
    check_memory(num_params // jax.process_count() if how.model else num_params)
    checkpoint = 12 * num_params  # float32 weights and two moments
    check_disk(folder.path, checkpoint * (run.train.keep_checkpoints + 1), "lower --config.train.keep_checkpoints")
    return run, how, dataset, model
