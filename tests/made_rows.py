"""Rows of `eval.jsonl` as runs would have left them, with results near published ones, and readers of what is drawn."""

import dataclasses
import itertools
import json
import math
import pathlib
import random
import re
from collections.abc import Iterable
from typing import Any

import pandas as pd

from posx.lab.config import RunConfig, base_config, run_config
from posx.lab.files.checksums import with_checksum
from posx.lab.files.rows import ROW_VERSION, SCORES
from posx.lab.results.columns import make_table
from posx.lab.results.facts import run_facts
from posx.lab.runs.folder import RunFolder

L = 64
DIGEST = "9f2c11d0aa"
LENGTHS = (32, 64, 128, 256, 512, 1024)
AT_TRAIN = {
    "nope": 5.12,
    "sinusoidal": 4.55,
    "learned": 4.60,
    "shaw": 4.50,
    "transformer_xl": 4.47,
    "t5": 4.59,
    "tupe": 4.57,
    "deberta": 4.49,
    "rope": 4.35,
    "alibi": 4.54,
}
GROWTH = {
    "nope": 3.15,
    "sinusoidal": 6.1,
    "shaw": 1.9,
    "transformer_xl": 1.45,
    "t5": 3.18,
    "tupe": 2.6,
    "deberta": 1.7,
    "rope": 5.3,
    "alibi": 0.97,
}


def growth(encoding: str, k: float) -> float:
    """R_k of the made-up results, near published ones."""
    rate = {"sinusoidal": 1.6, "rope": 0.35, "alibi": 4.0}.get(encoding, 0.5)
    return 1.0 + (GROWTH[encoding] - 1.0) * (1 - math.exp(-rate * (k - 1))) if k > 1 else 1.0 + 0.11 * -math.log2(k)


def row(encoding: str, length: int, seed: int = 0, **changes: Any) -> dict[str, Any]:
    """One eval.jsonl row of a made-up run."""
    learned_out = encoding == "learned" and length > L
    noise = 1.0 + 0.012 * random.Random(f"{encoding}{seed}{length}").gauss(0, 1) * max(1.0, math.log2(length / L))
    ppl = None if learned_out else AT_TRAIN[encoding] * growth(encoding, length / L) * noise
    made = {
        "schema_version": ROW_VERSION,
        "run_id": f"{encoding}-L{L}-s{seed}",
        "encoding": encoding,
        "protocol": "nonoverlapping",
        "train_len": L,
        "eval_len": length,
        "stride": length,
        "seed": seed,
        "num_targets": 262144,
        "num_bytes": 262144,
        "num_separators": 5,
        "nll": ppl and math.log(ppl),
        "ppl": ppl,
        "bpb": ppl and math.log2(ppl),
        "status": "undefined" if learned_out else "ok",
        "data_digest": DIGEST,
        "own_text": True,
        "tokenizer": "bytes",
    }
    made |= changes
    names = {"encoding.name": "encoding", "train.length": "train_len", "train.seed": "seed", "data": "data_digest"}
    return {"settings": {name: made[key] for name, key in names.items()}} | made


def as_table(made: list[dict[str, Any]]) -> pd.DataFrame:
    """Rows as they are, as a table, of runs that their run_id tells apart."""
    facts = {one["run_id"]: run_facts(one) for one in made}
    own = [
        facts[one["run_id"]] | one | {"run": one["run_id"], "settings": facts[one["run_id"]]["settings"]}
        for one in made
    ]
    return make_table({"status": "ok", "anchor": one["eval_len"]} | one for one in own)


def position_row(encoding: str, seed: int = 0) -> dict[str, Any]:
    edges = sorted({int(2 ** (i / 6)) - 1 for i in range(61)} | {1024})
    nll = []
    for low, high in itertools.pairwise(edges):
        place = (low + 1 + high) / 2
        loss = (
            math.log(AT_TRAIN[encoding])
            + 1.6 / place**0.6
            + 0.02 * random.Random(f"{place}{seed}{encoding}").gauss(0, 1)
        )
        nll.append(loss if place <= L else loss + 1.25 * math.log(growth(encoding, place / L)))
    return row(
        encoding,
        1024,
        seed,
        protocol="per_position",
        position_edges=edges,
        position_nll=nll,
        position_targets=[256 * (high - low) for low, high in itertools.pairwise(edges)],
    )


def config(encoding: str = "rope", **changes: Any) -> RunConfig:
    """The settings of a run on the text of `row`, with `section__name=value` in place of some."""
    made = base_config(encoding)
    usual = {"train__length": L, "train__batch_size": 64, "train__learning_rate": 0.002, "train__warmup_steps": 10}
    for name, value in (usual | changes).items():
        section, _, key = name.partition("__")
        made[section][key] = value
    return dataclasses.replace(run_config(made), text=DIGEST)


def start(run: pathlib.Path, settings: RunConfig) -> None:
    """A run's folder with its settings, and no results yet."""
    run.mkdir(parents=True, exist_ok=True)
    RunFolder(run).write_config(settings)


def agreeing(made: dict[str, Any]) -> dict[str, Any]:
    """A row whose numbers follow from its losses by position, by block, or else from its perplexity."""
    row, losses = dict(made), None
    if row.get("status", "ok") != "ok":
        return row | {name: None for name in SCORES if name in row}
    if row.get("position_nll"):
        counts = row["position_targets"]
        losses = sum(loss * n for loss, n in zip(row["position_nll"], counts, strict=True))
        row |= {"num_targets": sum(counts)}
        row.pop("block_nll", None)
    elif row.get("block_nll"):
        losses = sum(row["block_nll"])
    elif row.get("ppl"):
        row |= {"nll": math.log(row["ppl"])}
    if losses is not None:
        row |= {"nll": losses / row["num_targets"], "ppl": math.exp(losses / row["num_targets"])}
    if row.get("bpb") is not None:
        most = row["nll"] * row["num_targets"] / math.log(2) / row["num_bytes"]
        row |= {"bpb": min(row["bpb"], most) if row.get("num_separators") else most}
    return row


def as_lines(made: Iterable[dict[str, Any]]) -> str:
    """The lines of `eval.jsonl` that hold rows, as a run writes them: their numbers agree, and each has a checksum."""
    return "".join(json.dumps(with_checksum(agreeing(one))) + "\n" for one in made)


#: The facts in each line of `metrics.jsonl` of a run that was never stopped.
UNDISTURBED = {"attempt": 1, "attempt_start": 0}


def logged(*losses: float | str, **facts: Any) -> str:
    """Lines of `metrics.jsonl` with these losses."""
    rows = ({"step": step, "loss": loss} | UNDISTURBED | facts for step, loss in enumerate(losses))
    return "".join(json.dumps(with_checksum(row)) + "\n" for row in rows)


def write(folder: pathlib.Path, made: list[dict[str, Any]]) -> pathlib.Path:
    """A sweep's folder: one sub-folder per run id."""
    for one in made:
        name = re.sub(r"\W", "_", one["run_id"])[:60]
        (folder / name).mkdir(parents=True, exist_ok=True)
        with (folder / name / "eval.jsonl").open("a", encoding="utf-8") as file:
            file.write(as_lines([one]))
    return folder


def sweep_rows(encodings: tuple[str, ...] = tuple(AT_TRAIN), seeds: int = 1) -> list[dict[str, Any]]:
    """Every encoding at every length, T5 out of memory at the longest for the first seed, and losses per position."""
    made = [row(name, length, seed) for name in encodings for seed in range(seeds) for length in LENGTHS]
    for one in made:
        if one["encoding"] == "t5" and one["eval_len"] == 1024 and one["seed"] == 0:
            one.update(status="oom", ppl=None, nll=None, bpb=None)
    return made + [position_row(name, seed) for name in encodings if name != "learned" for seed in range(seeds)]


FIVE = ("nope", "sinusoidal", "rope", "t5", "alibi")


def cells(table: str, name: str) -> list[str]:
    (line,) = [line for line in table.splitlines() if line.startswith(f"| {name} |")]
    return [cell.strip() for cell in line.strip("|").split("|")]


def words(figure: Any) -> list[str]:
    """Every text that a figure shows."""
    return [text.get_text() for text in figure.findobj(match=lambda artist: hasattr(artist, "get_text"))]
