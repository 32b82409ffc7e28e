"""Read the data files of the studies and recompute the tables of their READMEs.

    python -m experiments.tables collect runs/variants > experiments/variants/runs.jsonl
    python -m experiments.tables show experiments/variants/runs.jsonl
    python -m experiments.tables unpack experiments/variants/runs.jsonl runs/variants
    python -m experiments.tables report train_small > train_small.json

`collect` prints one line of JSON for each finished run of a folder. A line holds the facts of the run (`hash`,
`settings`, `encoding`, `seed`, `step`, `data_digest`, `env`) and its measurements in `rows`. A third word names the
part of the study (`part`). A fourth sums the losses over longer blocks of so many targets. `show` prints the
perplexities of each part as a Markdown table. `unpack` writes the rows of a data file, or of one part, as run
folders for `posx plot`; each part gets a folder of its own. `report` prints a report of the cost study as its bench
wrote it.

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

from posx.evaluation.statistics import half_width, mean_blocks, row_blocks
from posx.lab.files import lines
from posx.lab.files.checksums import CHECKSUM, with_checksum
from posx.lab.files.rows import ROW_VERSION, read_row_file

Run = dict[str, Any]
Row = dict[str, Any]
HERE = Path(__file__).parent
#: The facts of a run, which every row of its `eval.jsonl` repeats.
FACTS = (
    "run_id", "hash", "encoding", "layers", "train_len", "seed", "step", "weights", "tokenizer", "data_source",
    "data_digest", "own_text", "settings", "code",
)  # fmt: skip
WINDOWS, SLIDING = "nonoverlapping", "sliding"


def load(study: str, part: str | None = None, file: str = "runs.jsonl") -> list[Run]:
    """Return the lines of a study's data file, or those of one part of it."""
    found = lines.read_lines(HERE / study / file)
    return [run for run in found if part is None or run["part"] == part]


def rows_of(runs: Iterable[Run]) -> list[Row]:
    """Return the rows of runs as `eval.jsonl` holds them, but for sums over blocks that were dropped."""
    return [{name: run[name] for name in FACTS if name in run} | row for run in runs for row in run["rows"]]


def collect(folder: Path, part: str = "", block: int = 0) -> list[Run]:
    """Return one line of the data file for each finished run of a folder. block: targets, 0 keeps the blocks."""
    runs = []
    for done in sorted(folder.rglob("DONE")):
        config, env = (json.loads((done.parent / name).read_text()) for name in ("config.json", "env.json"))
        rows = [named(row) for row in read_row_file(done.parent / "eval.jsonl", refuse)]
        facts = {n: rows[0][n] for n in FACTS if n in rows[0] and all(row.get(n) == rows[0][n] for row in rows)}
        measured = [{n: value for n, value in row.items() if n not in facts} for row in rows]
        runs.append({
            **({"part": part} if part else {}), **facts, "num_params": config["num_params"], "env": named(env),
            "rows": [row | coarser(row, block) if block else row for row in measured],
        })  # fmt: skip
    return runs


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
        found[run["encoding"], json.dumps(settings, sort_keys=True)].append(run)
    if len({encoding for encoding, _ in found}) < len(found):
        raise SystemExit("these runs differ in more than their encoding and seed: use the script of their study")
    return {encoding: members for (encoding, _), members in found.items()}


class Seeds:
    """The rows of one protocol of runs that differ only in their seed."""

    def __init__(self, runs: Sequence[Run], protocol: str = WINDOWS):
        self.train_len = runs[0]["train_len"]
        #: By length, then by seed.
        self.rows: dict[int, dict[int, Row]] = defaultdict(dict)
        for run in runs:
            for row in run["rows"]:
                if row["protocol"] == protocol:
                    self.rows[row["eval_len"]][run["seed"]] = row

    def values(self, name: str, factor: float = 1) -> list[float]:
        """Return a measurement at `factor` training lengths for each seed that has a loss there."""
        rows = self.rows.get(round(factor * self.train_len), {})
        return [row[name] for row in rows.values() if row["status"] == "ok"]

    def ratios(self, factor: float) -> list[float]:
        """Return R_k = PPL(kL) / PPL(L) of each seed that has a loss at both lengths."""
        near, far = self.rows[self.train_len], self.rows.get(round(factor * self.train_len), {})
        pairs = [(row, near[seed]) for seed, row in far.items() if row["status"] == "ok"]
        return [row["ppl"] / base["ppl"] for row, base in pairs]

    def half_width(self, factor: float = 1, relative: bool = False) -> float | None:
        """Return half the 95 % interval over text of the mean loss, or of its difference to that at L, in nats."""
        rows = [row for row in self.rows[round(factor * self.train_len)].values() if row["status"] == "ok"]
        sums, counts = mean_blocks(rows)
        if relative:
            sums = sums - mean_blocks(list(self.rows[self.train_len].values()))[0]
        return half_width(sums, counts)

    def failed(self, factor: float) -> str:
        """Return why there is no loss at a length; "-" if it was not measured."""
        rows = self.rows.get(round(factor * self.train_len), {}).values()
        return " and ".join(sorted({row["status"] for row in rows} - {"ok"})) or "-"


def perplexities(
    runs: Iterable[Run], factors: Sequence[float], protocol: str = WINDOWS, bits: bool = True
) -> list[list[str]]:
    """Return the cells of a table: perplexity and bits a byte at L and the ratios R_k, as `posx plot` writes them.

    A cell is the mean over seeds, its standard deviation, and the 95 % interval of the mean over text. The encodings
    stand from the highest perplexity at the last length to the lowest; those that end earlier come first.
    """
    found = {encoding: Seeds(members, protocol) for encoding, members in by_setting(runs).items()}
    found = {encoding: seeds for encoding, seeds in found.items() if seeds.rows}

    def order(encoding: str) -> tuple[Any, ...]:
        defined = [k for k in (1, *factors) if found[encoding].values("ppl", k)]
        return defined[-1], -statistics.fmean(found[encoding].values("ppl", defined[-1])), encoding

    def line(encoding: str) -> list[str]:
        seeds, half = found[encoding], found[encoding].half_width()
        row = next(iter(seeds.rows[seeds.train_len].values()))
        in_bits = half and half * row["num_targets"] / row["num_bytes"] / math.log(2)
        cells = [cell(seeds.values("ppl"), half)]
        if bits:
            cells.append(cell(seeds.values("bpb"), in_bits, relative=False))
        for k in factors:
            ratios = seeds.ratios(k)
            cells.append(cell(ratios, seeds.half_width(k, relative=True)) if ratios else seeds.failed(k))
        return [encoding, str(len(seeds.values("ppl"))), *cells]

    return [line(encoding) for encoding in sorted(found, key=order)]


def cell(values: Sequence[float], half: float | None = None, relative: bool = True, digits: int = 3) -> str:
    """Return "mean ± standard deviation (low-high)". half: of the interval of the mean, or of its logarithm."""
    mean = statistics.fmean(values)
    text = f"{mean:.{digits}f}" + (f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else "")
    if half is None:
        return text
    ends = (mean * math.exp(-half), mean * math.exp(half)) if relative else (mean - half, mean + half)
    return f"{text} ({ends[0]:.{digits}f}-{ends[1]:.{digits}f})"


def spread(values: Iterable[float], form: str = ".2f") -> str:
    """Return "median [lower quartile, upper quartile]"."""
    low, middle, high = np.quantile(list(values), [0.25, 0.5, 0.75])
    return f"{middle:{form}} [{low:{form}}, {high:{form}}]"


def markdown(head: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, [":--", *["---:"] * (len(head) - 1)], *body))


def show(path: Path) -> str:
    """Return the perplexities of each part and protocol of a data file as Markdown tables."""
    tables = []
    for part, runs in by_part(lines.read_lines(path)).items():
        for protocol in (WINDOWS, SLIDING):
            lengths = {row["eval_len"] for run in runs for row in run["rows"] if row["protocol"] == protocol}
            factors = sorted(n / runs[0]["train_len"] for n in lengths if n > runs[0]["train_len"])
            factors = [k for k in factors if len(factors) <= 8 or math.log2(k) % 1 == 0]
            if lengths:
                head = ["encoding", "seeds", "perplexity at L", "bits a byte at L", *(f"R_{k:g}" for k in factors)]
                tables.append(f"{part} {protocol}\n\n{markdown(head, perplexities(runs, factors, protocol))}")
    return "\n\n".join(tables)


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
