"""The folder of a run: its files, the process that holds it, its settings, and whether it is done."""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import hashlib
import os
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from posx.errors import Damaged, WorkdirError
from posx.lab.config import RunConfig
from posx.lab.config.run import SCHEMA_VERSION, plain_values
from posx.lab.files import checksums, lines, manifests, rows
from posx.lab.files.atomic import clear
from posx.lab.files.locks import lock
from posx.lab.machine import processes
from posx.lab.progress import process_seconds

#: The field of `config.json` that holds the checksum of `tokenizer.json`.
TOKENIZER_CHECKSUM = "tokenizer_checksum"
#: The field of `config.json` that holds the step at which training ended because all answers were right.
SOLVED_STEP = "solved_step"
#: The letters of a folder's name.
MOST_LETTERS = 120


def _file(name: str) -> Any:
    return property(lambda folder: folder.path / name)


@dataclasses.dataclass(frozen=True)
class RunFolder:
    """The folder of one run.

    If several processes make the run together, process 0 alone writes here, and all use the rows that it reads.
    """

    path: Path

    def __post_init__(self) -> None:
        """Refuse a path that the libraries below, which take UTF-8, cannot open. Raises WorkdirError."""
        try:
            str(self.path).encode("utf-8")
        except UnicodeEncodeError:
            raise WorkdirError(
                f"work folder {str(self.path)!a}: its name is no UTF-8 text, but Python reads names as "
                f"{sys.getfilesystemencoding()}. Unset PYTHONUTF8 and set LC_ALL=C.UTF-8, or use a path in ASCII."
            ) from None

    config_file = _file("config.json")
    env_file = _file("env.json")
    metrics_file = _file("metrics.jsonl")
    eval_file = _file("eval.jsonl")
    ledger_file = _file("rows.json")  # the checksums of the rows that `eval.jsonl` must hold
    tokenizer_file = _file("tokenizer.json")
    checkpoints = _file("checkpoints")
    asked_file = _file("asked.json")  # the settings that a sweep has given to this run
    log_file = _file("log.txt")  # of the processes that a sweep has started
    done_file = _file("DONE")
    status_file = _file("status.json")  # why the last process that ran here failed
    weights_file = _file("weights.txt")  # the path of the exported file or the run whose weights this run has

    def logged_rows(self, notice: Callable[[str], object] = lambda words: None) -> list[dict[str, Any]]:
        """Return the rows of training in the order of writing. `notice` is told of rows that are not whole."""
        return processes.broadcast(lambda: rows.read_row_file(self.metrics_file, notice, rows.log_problem, self.hash))

    def measured_rows(self, notice: Callable[[str], object] = lambda words: None) -> list[dict[str, Any]]:
        """Return the rows of evaluation in the order of writing. `notice` is told of rows that are not whole or gone.

        A row of other weights than the checkpoint of its step has is not whole.
        """

        def read() -> list[dict[str, Any]]:
            every = self.checked_rows()
            problems = [f"{self.eval_file}, line {line}: {why}" for line, _, why in every if why]
            for problem in [*problems, *(f"{self.eval_file}: {why}" for why in self.gone_rows(every))]:
                notice(problem)
            return [row for _, row, why in every if not why]

        return processes.broadcast(read)

    def checked_rows(self) -> list[tuple[int, dict[str, Any], str]]:
        """Return (line, row, its problem) of `eval.jsonl`; the problem is "" for a whole row. Raises WorkdirError."""
        known, checked = self.weights_by_step(), []
        for line, row, problem in rows.check_rows(self.eval_file, run=self.hash):
            held = "" if problem else known.get(row.get("step") or 0, "")
            if held and row.get("weights", held) != held:
                problem = f"it was measured with other weights than checkpoint {row.get('step')} has"
            checked.append((line, row, problem))
        return checked

    def gone_rows(self, every: Iterable[tuple[int, dict[str, Any], str]]) -> list[str]:
        """Return "the row NAME is gone" for each row that was listed once and is not in `every`."""
        there = {str(row.get(checksums.CHECKSUM)) for _, row, _ in every}
        return [f"the row {name} is gone" for one, name in self._listed_rows().items() if one not in there]

    def _listed_rows(self) -> Mapping[str, str]:
        """Return {checksum of a row: its name} of the rows that were listed; empty if the list is damaged."""
        listed = checksums.read_verified(self.ledger_file).get("rows")
        return listed if isinstance(listed, Mapping) else {}

    def weights_by_step(self) -> dict[int, str]:
        """Return {step: digest of its parameters} of the whole checkpoints that this run is measured with."""
        digests: dict[int, str] = {}
        with contextlib.suppress(WorkdirError):  # `weights` says why it cannot be read
            place = self.weights / self.checkpoints.name
            for step in manifests.steps(place):
                with contextlib.suppress(WorkdirError):
                    digests[step] = manifests.weights_digest(place, step)
        return digests

    @property
    def hash(self) -> str:
        """The hash of the run as `config.json` has it, "" if that is missing or damaged."""
        return str(checksums.read_verified(self.config_file).get("hash", ""))

    def append(self, file: Path, row: dict[str, Any]) -> dict[str, Any]:
        """Append a row to a file of JSON lines; return it with its checksum. Raises WorkdirError, OutOfMemoryError."""
        row = checksums.with_checksum(row)
        if processes.is_first():
            lines.append(file, row)
        return row

    def list_rows(self, all_measured: bool) -> None:
        """Write which rows `eval.jsonl` holds, so that a row that is gone is found. Raises WorkdirError.

        all_measured: whether all rows of the run's own settings are there. Otherwise rows that are gone stay listed
        until they are measured again.
        """

        def write() -> None:
            every = rows.read_row_file(self.eval_file, run=self.hash)
            there = {row[checksums.CHECKSUM]: rows.row_name(row) for row in every}
            listed = {} if all_measured else self._listed_rows()
            again = {name for one, name in there.items() if one not in listed}
            gone = {one: name for one, name in listed.items() if one not in there and name not in again}
            checksums.write_checked(self.ledger_file, {"rows": gone | there})

        processes.on_first(write)

    def usual_start(self) -> float | None:
        """Return the seconds until the first step of this process ends, None if they are not known or over.

        The start takes as long as the last one here, else as long as the starts of the runs beside this one.
        """
        own = [row for row in lines.read_lines(self.metrics_file) if "start" in row][-1:]
        beside = own or [lines.first_object(path) for path in self.path.parent.glob(f"*/{self.metrics_file.name}")]
        starts = [start for row in beside if isinstance(start := row.get("start"), dict)]
        took = [seconds for start in starts if isinstance(seconds := start.get("seconds"), float)]
        left = statistics.median(took) - process_seconds() if took else 0.0
        return left if left > 0 else None

    def nan_step(self) -> int | None:
        """Return the last step of training if its loss or gradient was not finite."""
        last = (self.logged_rows() or [{}])[-1]
        return last["step"] if rows.ends_training(last) else None

    def failure(self) -> str:
        """Return why the last process here failed, "" if it did not."""
        return str(checksums.read_verified(self.status_file).get("reason", ""))

    def read_config(self, file: Path | None = None) -> RunConfig:
        """Return the settings that this run was started with, or those in another `file` of its folder.

        Raises:
          Damaged: the file was cut, or does not match its checksum.
          WorkdirError: there is none, or its settings cannot be read for another reason.
        """
        file = file or self.config_file
        if not file.exists():
            raise WorkdirError(
                f"{self.path} holds no run: there is no {file.name} in it. Correct --workdir, or train a run there."
            )
        values = checksums.read_object(file)
        is_ours = values.get("schema_version") == SCHEMA_VERSION
        if is_ours and (problem := checksums.checksum_problem(values)):
            raise Damaged(f"{file} cannot be read: {problem}")
        try:
            return RunConfig.from_json(values)
        except ValueError as error:
            raise WorkdirError(f"{file} cannot be read: {error}") from None

    def owners(self) -> set[str]:
        """Return the hashes of the runs that wrote the whole files here, without that of `config.json`."""
        hashes = {manifests.manifest_run(self.checkpoints, step) for step in manifests.steps(self.checkpoints)}
        hashes |= {str(row.get("hash", "")) for row in rows.read_row_file(self.eval_file)}
        return (hashes | {str(checksums.read_verified(self.done_file).get("hash", ""))}) - {""}

    def check_resumes(self, run: RunConfig) -> None:
        """Raise WorkdirError with every differing setting if the folder holds another run than `run`.

        As long as the text of `run` is not read, it counts as the text of the run in the folder. Damaged settings raise
        nothing if all else in the folder is of `run`. A run that failed before it had trained raises nothing either.
        """
        if not self.config_file.exists():
            if any(self.checkpoints.glob("*.json")):
                raise WorkdirError(
                    f"{self.path} holds checkpoints but no {self.config_file.name}, which says of which run they are. "
                    "Restore it, or use another --workdir."
                )
            return
        try:
            held = self.read_config()
        except Damaged as error:
            if run.text and (others := self.owners() - {run.hash}):
                raise WorkdirError(
                    f"{error}. Its checkpoints and rows are of the run {', '.join(sorted(others))}, not of this one, "
                    f"{run.hash}. Restore the file, or use another --workdir."
                ) from None
            return
        changes = held.differences(run if run.text else dataclasses.replace(run, text=held.text))
        if not changes or not self.is_begun:
            return
        if (held.data.is_task or run.data.is_task) and held.data.source != run.data.source and not run.text:
            changes.append(f"data.source: {held.data.source!r} -> {run.data.source!r}")
        if all(change.startswith("code.") for change in changes):
            fix = "Restore the code to resume, or use another --workdir."
            raise WorkdirError(f"{self.path}: {held.code_changes()} since this run was trained. {fix}")
        if changes == [f"data: {held.text!r} -> {run.text!r}"]:
            digests = f"digest {held.text[:12]}, now {run.text[:12]}"
            what, fix = ("items of the task", "code") if run.data.is_task else ("text or another tokenizer", "text")
            reason = f"was trained on other {what} ({digests}). Restore the {fix}, or use another --workdir."
        else:
            fix = "Use another --workdir, or the same settings to resume."
            reason = f"holds a run of another config ({'; '.join(changes)}). {fix}"
        raise WorkdirError(f"{self.path} {reason}")

    @property
    def is_begun(self) -> bool:
        """Whether weights or rows are held here, not settings alone."""
        files = self.metrics_file, self.eval_file, self.done_file, self.weights_file
        return any(self.checkpoints.glob("*")) or any(file.exists() for file in files)

    def is_finished(self, run: RunConfig) -> bool:
        """Tell whether `DONE` says that `run` was trained and evaluated to the end here."""
        done = checksums.read_verified(self.done_file)
        return done.get("hash") == run.hash and done.get("eval") == plain_values(vars(run.eval))

    @property
    def solved_step(self) -> int | None:
        """The step at which the training of these weights ended because a task was solved, None if it was not."""

        def read() -> Any:
            borrowed = self.is_borrowed and not self.weights.is_file()  # an exported file holds its settings
            file = RunFolder(self.weights).config_file if borrowed else self.config_file
            return checksums.read_verified(file).get(SOLVED_STEP)

        return processes.broadcast(read)

    def mark_solved(self, step: int) -> None:
        """Write into `config.json` that training ended at `step` because a task was solved. Raises WorkdirError."""

        def mark() -> None:
            held = checksums.read_checked(self.config_file)
            checksums.write_checked(self.config_file, held | {SOLVED_STEP: step})

        processes.on_first(mark)

    def mark_done(self, run: RunConfig, num_rows: int, step: int) -> None:
        """Write `DONE` for `run`, as `is_finished` reads it. Raises WorkdirError if the folder was emptied meanwhile.

        Args:
          run: its settings.
          num_rows: of the evaluation.
          step: at which training ended.
        """

        def mark() -> None:
            if not self.config_file.exists():
                raise WorkdirError(
                    f"{self.config_file} was removed during training. Train again with another --workdir."
                )
            done = {"hash": run.hash, "eval": vars(run.eval), "step": step, "rows": num_rows}
            checksums.write_checked(self.done_file, done)
            self.status_file.unlink(missing_ok=True)

        processes.on_first(mark)

    def child(self, changes: Iterable[str]) -> RunFolder:
        """Return the folder, beside this one, of the run that has this run's weights with `changes`."""
        return RunFolder(self.path.with_name(safe_name(f"{self.path.name}@{'+'.join(changes)}")))

    def children(self) -> list[RunFolder]:
        """Return the folders beside this one that `child` has named."""
        return list(map(RunFolder, sorted(self.path.parent.glob(f"{glob.escape(self.path.name)}@*"))))

    @property
    def weights(self) -> Path:
        """The folder or the exported file that holds this run's weights: another run's if it has none of its own.

        Raises Damaged if the file that names it cannot be read.
        """
        if not self.is_borrowed:
            return self.path
        try:
            return (self.path / self.weights_file.read_text("utf-8")).resolve()
        except (OSError, ValueError) as error:
            raise Damaged(f"{self.weights_file} cannot be read: {error}") from None

    @property
    def is_borrowed(self) -> bool:
        """Whether this run has the weights of another one, or of a file."""
        return self.weights_file.exists()

    @property
    def newest_step(self) -> int | None:
        """The step of the newest checkpoint, None if there is none."""
        return max(manifests.steps(self.checkpoints), default=None)

    def take_weights(self, parent: RunFolder, run: RunConfig) -> None:
        """Make this the folder of `run`, whose weights are those of `parent`, unless it is. Raises WorkdirError."""

        def make() -> None:
            if not self.config_file.exists():
                self.tokenizer_file.write_bytes(parent.tokenizer_file.read_bytes())
                self.weights_file.write_text(os.path.relpath(parent.path, self.path), "utf-8")
                self.write_config(run)

        processes.on_first(parent.check_tokenizer)
        with self.hold():
            processes.on_first(make)
        if self.read_config().hash != run.hash:
            raise WorkdirError(f"{self.path} holds another run than these weights under {run.encoding}. Rename it.")

    def check_tokenizer(self) -> None:
        """Raise WorkdirError if `tokenizer.json` does not match its checksum in `config.json`."""
        wanted = checksums.read_verified(self.config_file).get(TOKENIZER_CHECKSUM)
        if wanted and checksums.file_checksum(self.tokenizer_file) != wanted:
            raise WorkdirError(
                f"{self.tokenizer_file} does not match its checksum in {self.config_file.name}, so it was edited or "
                "damaged. Restore it, or repeat the command that made the run: it writes the file again."
            )

    def write_config(self, run: RunConfig, **facts: Any) -> None:
        """Write the settings, with `facts` and the checksum of the tokenizer beside them. A `solved_step` stays."""
        held = checksums.read_verified(self.config_file)
        if held.get("hash") == run.hash and SOLVED_STEP in held:
            facts = {SOLVED_STEP: held[SOLVED_STEP]} | facts
        if self.tokenizer_file.exists():
            facts |= {TOKENIZER_CHECKSUM: checksums.file_checksum(self.tokenizer_file)}
        checksums.write_checked(self.config_file, run.to_json() | facts)

    @contextlib.contextmanager
    def hold(self, facts: Mapping[str, str] = {}, begin: Callable[[], object] = lambda: None) -> Iterator[None]:
        """Hold the folder for this process, or for all processes of one run.

        Args:
          facts: {name: value}. All of these processes must give equal facts, as they were started with equal settings.
          begin: called once the folder is held, by the process that writes in it.

        Raises:
          ConfigError: facts differ.
          WorkdirError: the folder cannot be written, or another process holds it.
        """

        def busy(holder: str) -> None:
            raise WorkdirError(
                f"work folder {self.path} is in use by {holder}. Wait until it ends, or choose another --workdir."
            )

        def hold() -> None:
            try:
                self.path.mkdir(parents=True, exist_ok=True)
                stack.enter_context(lock(self.path / ".lock", busy))
            except OSError as error:
                raise WorkdirError(
                    f"work folder {self.path} cannot be written: {error.strerror}. Choose another --workdir."
                ) from None
            clear(self.path)
            begin()

        processes.check_same(facts)
        with contextlib.ExitStack() as stack:
            processes.on_first(hold)
            yield


def safe_name(text: str) -> str:
    """Return `text` as a name for shells and file systems: rope(base=500000)+my:A is rope-base=500000+my.A.

    A long name ends with a digest in place of the rest.
    """
    safe = re.sub(r"\(|, *", "-", text.replace("=(", "=").replace(":", "."))
    safe = re.sub(r"[^\w.+=@-]", "", safe, flags=re.ASCII)
    return safe if len(safe) <= MOST_LETTERS else f"{safe[:MOST_LETTERS]}-{short_digest(text)}"


def short_digest(text: str) -> str:
    """Return six letters that tell `text` from others."""
    return hashlib.sha256(text.encode()).hexdigest()[:6]
