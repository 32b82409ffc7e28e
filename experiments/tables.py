"""Read the data files of the studies and recompute the tables of their READMEs.

    python -m experiments.tables collect runs/variants > experiments/variants/runs.jsonl
    python -m experiments.tables show experiments/variants/runs.jsonl
    python -m experiments.tables unpack experiments/variants/runs.jsonl runs/variants
    python -m experiments.tables report train_small > train_small.json

`collect` prints one line of JSON for each finished run of a folder, and for each run that has its weights. A line holds
the facts of the run (`hash`, `settings`, `encoding`, `seed`, `step`, `data_digest`, `env`), its measurements in `rows`
and its training in `log`, as `Logged` has it. Older lines, and runs that were trained under another name, have no
`log`. A third word names the part of the study (`part`). A fourth sums the losses over longer blocks of so many
targets. `show` prints the tables that `posx plot` writes of each part. `unpack` writes the rows of a data file, or of
one part, as run folders for `posx plot`; each part gets a folder of its own. `report` prints a report of the cost study
as its bench wrote it.

A row of `eval.jsonl` is `facts | row`, see `rows_of`, with the version of rows and a checksum, which `unpack` adds.
`collect` refuses a run with a damaged row.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import report
from posx.evaluation.statistics import horizon, row_blocks
from posx.lab.files import lines
from posx.lab.files.checksums import CHECKSUM, with_checksum
from posx.lab.files.rows import ROW_VERSION, read_row_file
from posx.lab.plots.convergence import convergence_tables
from posx.lab.plots.points import Logged, read_log
from posx.lab.plots.tables import RowTable, as_markdown, seed_count, tables
from posx.lab.results.table import build_results, list_runs
from posx.lab.runs.folder import RunFolder

Run = dict[str, Any]
Row = dict[str, Any]
HERE = Path(__file__).parent
#: The facts of a run, which every row of its `eval.jsonl` repeats.
FACTS = (
    "run_id", "hash", "encoding", "layers", "train_len", "seed", "step", "weights", "tokenizer", "data_source",
    "data_digest", "own_text", "settings", "code",
)  # fmt: skip
#: The facts that the seeds of one setting share.
SHARED = ("train_len", "step", "data_digest", "num_params")
WINDOWS, SLIDING = "nonoverlapping", "sliding"


def load(study: str, part: str | None = None, file: str = "runs.jsonl") -> list[Run]:
    """Return the lines of a study's data file, or those of one part of it."""
    found = lines.read_lines(HERE / study / file)
    return [run for run in found if part is None or run["part"] == part]


def rows_of(runs: Iterable[Run]) -> list[Row]:
    """Return the rows of runs as `eval.jsonl` holds them, but for sums over blocks that were dropped."""
    return [{name: run[name] for name in FACTS if name in run} | row for run in runs for row in run["rows"]]


def collect(folder: Path, part: str = "", block: int = 0) -> list[Run]:
    """Return one line of the data file for each finished run of a folder, and for each run with its weights.

    The latter has a part of its own, such as "128x256-window-size=256" of the runs with windows of 256 tokens.

    block: sums are over so many targets, 0 keeps the blocks.
    """
    runs = []
    for path in sorted(folder.rglob("eval.jsonl")):
        own = RunFolder(path.parent)
        trained, change = RunFolder(own.weights), own.path.name.partition("@")[2]
        if not trained.done_file.exists():
            continue
        config, env = (json.loads(file.read_text()) for file in (trained.config_file, trained.env_file))
        rows = [named(row) for row in read_row_file(path, refuse)]
        facts = {n: rows[0][n] for n in FACTS if n in rows[0] and all(row.get(n) == rows[0][n] for row in rows)}
        measured = [{n: value for n, value in row.items() if n not in facts} for row in rows]
        name = "-".join(filter(None, (part, change)))
        runs.append({
            **({"part": name} if name else {}), **facts, "num_params": config["num_params"], "env": named(env),
            "rows": [row | coarser(row, block) if block else row for row in measured],
            **({"log": [[rounded(value) for value in row] for row in log]} if (log := read_log(own.path)) else {}),
        })  # fmt: skip
    return runs


def rounded(value: float) -> float:
    """Return a number of a log to six digits, as an int if it is whole. Else a log takes nearly twice the space."""
    return int(value) if float(value).is_integer() else float(f"{value:.6g}")


def refuse(problem: str) -> None:
    """Raise SystemExit for a damaged row."""
    raise SystemExit(problem)


def named(facts: Row) -> Row:
    """Return facts with the name of the text in place of its path on this machine, without version and checksum."""
    facts = {name: value for name, value in facts.items() if name not in ("schema_version", CHECKSUM)}
    return facts | ({"data_source": Path(facts["data_source"]).name} if "data_source" in facts else {})


def unpack(runs: Iterable[Run], folder: Path) -> None:
    """Write the rows of each run to the `eval.jsonl` of a folder of its own.

    It is named by `run_id`, or by facts of the run if that is missing or of several runs.
    """
    runs = list(runs)
    times = Counter(run.get("run_id") for run in runs)
    for run in runs:
        name = run.get("run_id")
        place = folder / (name if name and times[name] == 1 else f"{run['encoding']}-s{run['seed']}-{run['hash']}")
        place.mkdir(parents=True)
        (place / "eval.jsonl").write_text("".join(map(as_line, rows_of([run]))))


def as_line(row: Row) -> str:
    """Return a collected row as a line of `eval.jsonl`."""
    return json.dumps(with_checksum(row | {"schema_version": ROW_VERSION})) + "\n"


def coarser(row: Row, block: int) -> Row:
    """Return a row's sums of losses over blocks of `block` targets, in nats to two decimals; {} if it has none."""
    if "block_nll" not in row:
        return {}
    sums, _ = row_blocks(row)
    starts = np.arange(0, len(sums), block // row["block_len"])
    return {"block_len": block, "block_nll": np.add.reduceat(sums, starts).round(2).tolist()}


def by_part(runs: Iterable[Run]) -> dict[str, list[Run]]:
    """Return the runs of each part of a study; that of runs without a part is ""."""
    found: dict[str, list[Run]] = defaultdict(list)
    for run in runs:
        found[run.get("part", "")].append(run)
    return found


def by_setting(runs: Iterable[Run]) -> dict[str, list[Run]]:
    """Return the runs that differ only in their seed, in the order of the seeds, under the text of their encoding."""
    found: dict[tuple[str, str], list[Run]] = defaultdict(list)
    for run in sorted(runs, key=lambda run: run["seed"]):
        settings = {name: value for name, value in run["settings"].items() if name != "train.seed"}
        settings |= {name: run.get(name) for name in SHARED}
        found[run["encoding"], json.dumps(settings, sort_keys=True)].append(run)
    if len({encoding for encoding, _ in found}) < len(found):
        raise SystemExit("these runs differ in more than their encoding and seed: use the script of their study")
    for (encoding, _), members in found.items():
        if len({run["seed"] for run in members}) < len(members):
            raise SystemExit(f"{encoding}: these runs repeat a seed")
    return {encoding: members for (encoding, _), members in found.items()}


class Seeds:
    """The rows of one protocol of runs that differ only in their seed. runs: in the order of their seeds."""

    def __init__(self, runs: Sequence[Run], protocol: str = WINDOWS):
        self.runs, self.train_len = runs, runs[0]["train_len"]
        #: By length, then by seed.
        self.rows: dict[int, dict[int, Row]] = defaultdict(dict)
        for run in runs:
            for row in run["rows"]:
                if row["protocol"] == protocol:
                    self.rows[row["eval_len"]][run["seed"]] = row

    def at(self, factor: float) -> list[Row]:
        """Return the rows at `factor` training lengths."""
        return list(self.rows.get(round(factor * self.train_len), {}).values())

    def values(self, name: str, factor: float = 1) -> list[float]:
        """Return a measurement at `factor` training lengths for each seed that has a loss there."""
        return [row[name] for row in self.at(factor) if row["status"] == "ok"]

    def gaps(self, factor: float) -> dict[int, float]:
        """Return ln R_k by seed, the loss at k L less that at L in nats; NaN for a seed that has no loss there."""
        near, far = self.rows[self.train_len], self.rows.get(round(factor * self.train_len), {})
        return {
            seed: row["nll"] - near[seed]["nll"] if row["status"] == "ok" else math.nan for seed, row in far.items()
        }

    def ratios(self, factor: float) -> list[float]:
        """Return R_k = PPL(kL) / PPL(L) of each seed that has a loss at both lengths."""
        return [math.exp(gap) for gap in self.gaps(factor).values() if not math.isnan(gap)]

    def horizons(self) -> list[float]:
        """Return the last length of each seed, in L, up to which PPL stays within 1 % of that at L."""
        gaps = {n / self.train_len: self.gaps(n / self.train_len) for n in self.rows}
        return [horizon({k: math.exp(own[seed]) for k, own in gaps.items()}) for seed in self.rows[self.train_len]]

    def failed(self, factor: float) -> str:
        """Return why there is no loss at a length; "-" if it was not measured."""
        return " and ".join(sorted({row["status"] for row in self.at(factor)} - {"ok"})) or "-"


def multipliers_of(run: Run) -> tuple[float, ...]:
    """Return the multiples of the learning rate that the arrays of positions have, each once; () without them."""
    given = run["settings"]["train.position_lr_multiplier"]
    if given is None:
        return ()
    return tuple(sorted({one for layer in given for one in layer.values()})) if isinstance(given, list) else (given,)


def over_nope(reports: Iterable[Run], field: str = "tokens_per_second") -> dict[str, str]:
    """Return the time of every encoding over NoPE's: of the ratios in a turn the median and the quartiles.

    Args:
      reports: of a bench. If several hold an encoding, the first counts.
      field: a speed, in tokens a second.
    """
    times = {"nope": "1"}
    for one in reports:
        speeds = {row["encoding"]: row[field] for row in one["results"]}
        for name, rates in speeds.items():
            times.setdefault(name, report.cell(report.ratios(speeds["nope"], rates), ".2f"))
    return times


def row_tables(runs: Sequence[Run]) -> list[RowTable]:
    """Return the tables that `posx plot` writes of these runs."""
    return tables(build_results({str(n): rows_of([run]) for n, run in enumerate(runs)}))


def cells_of(made: RowTable) -> list[list[str]]:
    """Return the lines of such a table: encoding, number of seeds, and the text of each cell."""
    return [[curve.label, seed_count(curve), *map(made.write, points.values())] for curve, points in made.lines]


def cell(values: Sequence[float], digits: int = 3) -> str:
    """Return "mean ± standard deviation"."""
    text = f"{statistics.fmean(values):.{digits}f}"
    return f"{text} ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else text


def ratio_text(gap: float, half: float) -> str:
    """Return a ratio of perplexities with its interval, from a difference in nats."""
    middle, low, high = (f"{math.exp(gap + end):.3f}" for end in (0, -half, half))
    return f"{middle} ({low} to {high})"


def length_name(factor: float) -> str:
    """Return the name of `factor` training lengths: "L", "1.25 L", "8 L"."""
    return "L" if factor == 1 else f"{factor:g} L"


def markdown(head: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    return "\n".join(report.rows(head, body))


def training_tables(runs: Iterable[Run]) -> list[RowTable]:
    """Return the tables of the steps to a training loss that `posx table` writes of the runs that have a `log`."""
    logged = {str(n): run for n, run in enumerate(run for run in runs if run.get("log"))}
    stored = list_runs(build_results({name: rows_of([run]) for name, run in logged.items()}))
    return convergence_tables(stored, {name: [Logged(*row) for row in run["log"]] for name, run in logged.items()})


def show(path: Path) -> str:
    """Return the tables of each part of a data file as Markdown."""
    parts = by_part(lines.read_lines(path)).items()
    return "\n\n".join(f"{part}\n\n{as_markdown(row_tables(runs))}".strip() for part, runs in parts)


def main(words: Sequence[str]) -> None:
    """Run one of the commands."""
    match words:
        case ["collect", folder, *more]:
            part, block = [*more, *("", "0")[len(more) :]]
            for run in collect(Path(folder), part, int(block)):
                print(json.dumps(run, separators=(",", ":")))
        case ["show", path]:
            print(show(Path(path)))
        case ["unpack", path, folder, *chosen]:
            parts = by_part(lines.read_lines(Path(path)))
            for part in chosen or parts:
                if part not in parts:
                    raise SystemExit(f"{path} has no part {part!r}. Its parts: {', '.join(parts)}")
                unpack(parts[part], Path(folder) / part)
        case ["report", name]:
            (found,) = (one for one in load("cost", file="measurements.jsonl") if one.pop("name") == name)
            print(json.dumps(found, indent=1))
        case _:
            raise SystemExit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
