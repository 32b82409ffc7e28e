"""Which runs a sweep makes, and how far each of them is."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from posx.config import RunConfig, encoding_fields
from posx.config.stored import like
from posx.data import check_length, prepare
from posx.errors import ConfigError
from posx.evaluation.protocols import Nonoverlapping, run_protocols
from posx.files import lines
from posx.progress import say
from posx.runs.checks import check_stream, problems
from posx.runs.folder import RunFolder

MOST_RUNS = 1000


@dataclasses.dataclass(frozen=True)
class Job:
    """One run of a sweep; its folder's name says what it is."""

    run: RunConfig
    folder: RunFolder

    @property
    def name(self) -> str:
        return self.folder.path.name

    def finished(self, data_digest: str = "") -> bool:
        """Whether these settings were trained and evaluated to the end (on just this text, if its digest is given)."""
        return self.folder.finished(self.run, data_digest)

    def progress(self) -> float:
        """The finished part, 0 to 1; evaluation counts as a quarter of a run, and 1 is for those that have ended."""
        steps = max((row.get("step", 0) for row in lines.read(self.folder.metrics_file)), default=0)
        rows = len(lines.read(self.folder.eval_file))
        asked = run_protocols(self.run.eval, self.run.train.length)
        expected = sum(len(protocol.owed(lengths)) for protocol, lengths in asked)
        return 0.75 * min(steps / self.run.train.steps, 1) + 0.24 * min(rows / expected, 1)

    def state(self) -> str:
        """What the run is at, a few words."""
        rows = lines.read(self.folder.eval_file)
        if rows:
            return f"{self.name} evaluating {rows[-1]['protocol']} at {rows[-1]['eval_len']}"
        last = lines.read(self.folder.metrics_file)[-1:]
        if not last:
            return self.name
        return f"{self.name} {last[0]['step']}/{self.run.train.steps} loss {float(last[0]['loss']):.3f}"

    def outcome(self) -> str:
        """Perplexities of the non-overlapping protocol, shortest and longest length."""
        rows = [row for row in lines.read(self.folder.eval_file) if row["protocol"] == Nonoverlapping.name]
        ends = [min(rows, key=_length), max(rows, key=_length)] if rows else []
        return ", ".join(
            f"ppl {row['ppl']:.3f} at {row['eval_len']}"
            if row["status"] == "ok"
            else f"{row['status']} at {row['eval_len']}"
            for row in ends
        )


def plan(config: ConfigDict, workdir: Path, earlier: RunConfig | None = None) -> list[Job]:
    """The runs of the sweep: encodings x train_lens x seeds. Raises ConfigError listing every problem of every run.

    `earlier` is the run that `config` repeats, if any: what it left open stays what it was.
    """
    sweep = config.sweep
    axes = {"encodings": sweep.encodings, "train_lens": sweep.train_lens, "seeds": sweep.seeds}
    for name, values in axes.items():
        if not values:
            raise ConfigError(f"sweep.{name} is empty: name at least one")
        if len(set(values)) != len(values):
            raise ConfigError(f"sweep.{name}={tuple(values)} names a value twice")
    count = len(sweep.encodings) * len(sweep.train_lens) * len(sweep.seeds)
    if count > MOST_RUNS:
        raise ConfigError(f"this sweep has {count} runs, more than {MOST_RUNS}: split it")
    jobs, found = [], []
    for length in sweep.train_lens:
        for encoding in sweep.encodings:
            for seed in sweep.seeds:
                run = with_encoding(config, encoding, length, seed)
                safe = encoding.replace(":", ".")
                folder = RunFolder(workdir / f"{safe}-L{length}-s{seed}")
                job = Job(folder.as_started(like(run, earlier)), folder)
                found += [f"{job.name}: {problem}" for problem in problems(job.run)]
                jobs.append(job)
    if found:
        raise ConfigError("; ".join(dict.fromkeys(found)))
    return jobs


def with_encoding(config: ConfigDict, encoding: str, length: int, seed: int) -> RunConfig:
    """The run of a sweep that trains `encoding` at `length` with `seed`; its fields are kept if it is the config's."""
    values = config.to_dict()
    if values["encoding"]["name"] != encoding:
        values["encoding"] = encoding_fields(encoding)
    values["train"] |= {"length": length, "seed": seed}
    return RunConfig.from_json(values)


def unfinished(jobs: Sequence[Job]) -> list[Job]:
    """The jobs still to run on the text as it is now. Raises DataError where it is too short for any of them."""
    dataset = prepare(jobs[0].run.data, log=say)
    todo = [job for job in jobs if not job.finished(dataset.digest)]
    for job in todo:
        check_stream(job.run.eval, job.run.train.length, dataset)
        check_length(len(dataset.train.tokens), job.run.train.length, "the training text")
    return todo


def _length(row: dict[str, Any]) -> int:
    return row["eval_len"]
