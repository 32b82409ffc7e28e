"""Where copies by learned positions go wrong: at single positions that do not attend to the token before them.

    python -m experiments.tasks.places measure runs/tasks_gates/03 "10 x, 2,000 steps" >> experiments/tasks/places.jsonl
    python -m experiments.tasks.places table
    python -m experiments.tasks.places figure

A model of two layers copies by induction. The first layer brings each symbol the one before it. The second looks for
the symbol whose predecessor was just written. `measure` takes a folder of runs and a name. It prints a line of JSON for
each run, with numbers for each of the positions 1 to 102 that a symbol can stand at. These are the tokens of answers
that are read there, how many of them are wrong, and the weight on the position before in the first layer.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.tables import HERE, Run, load, markdown, rows_of
from experiments.tasks.tasks import values_at

#: The most symbols that 206 tokens hold, twice those of training.
SYMBOLS, LENGTH = 102, 206
ITEMS, BATCH = 2000, 100
#: So many positions are compared with all, in the table.
FEW = 10


def measure(folder: Path) -> dict[str, Any]:
    """Return what the run in a folder has at each of the positions 1 to `SYMBOLS`, for items of 51 symbols or more."""
    import jax
    import jax.numpy as jnp

    import posx
    from posx.lab.tasks.base import draw_rows
    from posx.lab.tasks.copying import UniqueCopy

    apply, params, _ = posx.load(folder)
    model = apply.model.at_length(LENGTH)
    place = jnp.arange(1, SYMBOLS + 1)

    @jax.jit
    def count(keys: jax.Array) -> tuple[jax.Array, jax.Array]:
        items = draw_rows(UniqueCopy(), keys, jnp.int32(51), jnp.int32(SYMBOLS), LENGTH)
        assert items.source is not None
        found = model(params, items.tokens[:, :-1], None).argmax(-1)
        wrong = items.scored[:, 1:] & (found != items.tokens[:, 1:])
        at = items.source[:, 1:, None] == place
        return at.sum((0, 1)), (at & wrong[..., None]).sum((0, 1))

    @jax.jit
    def before(keys: jax.Array) -> jax.Array:
        tokens = draw_rows(UniqueCopy(), keys, jnp.int32(SYMBOLS), jnp.int32(SYMBOLS), LENGTH).tokens[:, :-1]
        return model.read_attention(params, tokens, None, lambda weights, _: weights[:, :, place, place - 1])[0]

    keys = jax.random.split(jax.random.key(0), (ITEMS // BATCH, BATCH))
    read, wrong = (np.sum(each, 0).tolist() for each in zip(*map(count, keys), strict=True))
    weights = np.asarray(before(keys[0])).max(1).mean(0)  # of the head that has most, if there are several
    return {"read": read, "wrong": wrong, "before": weights.round(4).tolist()}


def measured(folder: Path, name: str) -> list[dict[str, Any]]:
    """Return the numbers of each finished run in a folder."""
    found = []
    for done in sorted(folder.rglob("DONE")):
        config = json.loads((done.parent / "config.json").read_text())
        facts = {"part": name, "hash": config["hash"], "seed": config["train"]["seed"]}
        found.append(facts | measure(done.parent))
    return found


def table(runs: Sequence[Run], places: Sequence[dict[str, Any]]) -> str:
    """Return a line of Markdown for each part of `places`, with a number for each seed.

    runs: of the study, with the rows of their answers.
    """
    stored = {(run["hash"], run["seed"]): run for run in runs}
    body = []
    for part in dict.fromkeys(place["part"] for place in places):
        found = sorted((place for place in places if place["part"] == part), key=lambda place: place["seed"])
        own = [stored[place["hash"], place["seed"]] for place in found]
        right = (", ".join(f"{value:.3f}" for value in values_at(rows_of(own), k)) for k in (1, 2))
        weights = [np.array(place["before"]) for place in found]
        body.append([
            part, ", ".join(f"{run['step']:,}" for run in own), *right,
            ", ".join(f"{np.median(each):.2f}" for each in weights), ", ".join(f"{each.min():.2f}" for each in weights),
            ", ".join(map(share_of_weakest, found)),
        ])  # fmt: skip
    head = ["position parameters", "steps", "right at L", "right at 2 L", "median weight", "least weight", "in the ten"]
    return markdown(head, body)


def share_of_weakest(place: dict[str, Any]) -> str:
    """Return the share of wrong tokens that are read at the `FEW` positions with the least weight on the one before."""
    wrong = np.array(place["wrong"])
    weakest = np.argsort(place["before"])[:FEW]
    return f"{100 * wrong[weakest].sum() / wrong.sum():.0f} %" if wrong.sum() >= FEW else "-"


def figure(places: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw the weights and the wrong tokens of each position, a column for each part and a line for each seed."""
    import matplotlib.pyplot as plt

    parts = list(dict.fromkeys(place["part"] for place in places))
    size = (1 + 3.4 * len(parts), 4.4)
    drawn, axes = plt.subplots(2, len(parts), figsize=size, sharex=True, sharey="row", layout="constrained")
    place = np.arange(1, SYMBOLS + 1)
    for column, part in zip(axes.T, parts, strict=True):
        for found in (found for found in places if found["part"] == part):
            column[0].plot(place, found["before"], linewidth=1, label=f"seed {found['seed']}")
            column[1].plot(place, 100 * np.array(found["wrong"]) / np.array(found["read"]), linewidth=1)
        column[0].set_title(part, fontsize=9)
        column[0].set_ylim(0, 1)
        column[1].set_xlabel("position of a symbol")
    axes[0, 0].set_ylabel("weight on the token before,\nfirst layer")
    axes[1, 0].set_ylabel("copied wrong, %")
    axes[0, 0].legend(fontsize=8, loc="lower left")
    drawn.savefig(path, dpi=120)


def main(words: Sequence[str]) -> None:
    """Run the command that the first word names."""
    match words:
        case ["measure", folder, name]:
            print("\n".join(map(json.dumps, measured(Path(folder), name))))
        case ["table"]:
            print(table(load("tasks"), load("tasks", file="places.jsonl")))
        case ["figure"]:
            figure(load("tasks", file="places.jsonl"), HERE / "tasks" / "places.png")
        case _:
            raise SystemExit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
