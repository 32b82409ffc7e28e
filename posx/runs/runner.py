"""One run from its settings to `DONE`: checks first, then training, then evaluation; what is finished is kept."""

from __future__ import annotations

import dataclasses
from typing import Any

from posx.config import RunConfig
from posx.config.stored import digest
from posx.data import check_length, places, prepare
from posx.errors import PartialFailure, WorkdirError
from posx.files.atomic import write_json
from posx.progress import say
from posx.runs import environment, text
from posx.runs.checks import check_disk, check_memory, check_stream, check_writable
from posx.runs.describe import count, executor_of, layout, model_of, opening
from posx.runs.evaluate import evaluate_run
from posx.runs.folder import RunFolder
from posx.training.loop import train


def train_and_evaluate(run: RunConfig, folder: RunFolder) -> None:
    """Trains, evaluates and marks `folder` done; every finished part is kept and not done again."""
    check_writable(folder.path)
    run = folder.resumed(run)
    data = text.settings(folder, run.data)
    if folder.config_file.exists():
        places.check_there(data, folder.path.name)
    asked = dataclasses.replace(run, data=data)
    num_devices = layout(asked, environment.devices_of(folder))
    say(f"{folder.path.name}  {opening(asked, num_devices)}")
    dataset = prepare(data, log=say)
    check_stream(run.eval, run.train.length, dataset)
    check_length(len(dataset.train.tokens), run.train.length, "the training text")
    model = model_of(run, dataset.tokenizer.vocab_size)
    check_memory(count(model))
    check_disk(folder.path, 12 * count(model) * (run.train.keep_checkpoints + 1))
    with folder.held():
        folder.resumed(run)  # another process may have started one here meanwhile
        environment.record(folder, dataset, num_devices)
        executors = [executor_of(run, e) for e in model.encodings]
        found = text.facts(folder, run, data, dataset)
        folder.write_config(run, num_params=count(model), executors=executors, data=found)
        dataset.tokenizer.save(folder.tokenizer_file)
        state = train(asked, model, dataset, folder, num_devices)
        rows = evaluate_run(run, run.eval, model, state["params"], dataset, folder, run.train.steps)
        failed = [row for row in rows if row["status"] in ("oom", "nonfinite")]
        if failed:
            raise PartialFailure(f"{folder.path.name}: {listed(failed)}")
        if not folder.config_file.exists():
            raise WorkdirError(
                f"{folder.config_file} was removed while the run went on: what it is of is not known any more"
            )
        done = {"digest": digest(run), "data_digest": dataset.digest, "step": run.train.steps, "rows": len(rows)}
        write_json(folder.done_file, done)
        folder.status_file.unlink(missing_ok=True)


def listed(rows: list[dict[str, Any]]) -> str:
    return "; ".join(f"{row['run_id']} {row['protocol']} at {row['eval_len']}: {row['status']}" for row in rows)
