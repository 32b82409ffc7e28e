"""`posx autopsy`: why a trained run fails beyond its training length L."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from posx.errors import ConfigError, PartialFailure
from posx.evaluation.protocols import Nonoverlapping, PerPosition
from posx.evaluation.settings import EvalConfig
from posx.lab.commands import work_folder
from posx.lab.commands.evaluate import make_request, redraw, run_variants
from posx.lab.config import RunConfig
from posx.lab.files.lines import json_line
from posx.lab.files.rows import failures
from posx.lab.results.columns import FAILED
from posx.lab.runs import autopsy
from posx.lab.runs.autopsy import TRAINED, Change
from posx.lab.runs.checks import say_unused
from posx.lab.runs.finding import find_run
from posx.lab.runs.folder import RunFolder
from posx.lab.runs.requests import Request, evaluate_request
from posx.lab.runs.targets import row_anchor
from posx.lab.sweeps.plan import align_columns
from posx.machine.devices import use_every_core
from posx.notices import say

#: Windows whose attention weights are read, if the settings do not say how many.
WINDOWS = 16
#: The protocol of all losses, and that of the losses by position.
PROTOCOL, BY_POSITION = Nonoverlapping.name, PerPosition.name
#: The rows of the observations: a title, the name of the number, and its form.
OBSERVED = (
    ("attention weight on tokens L or more back", "far_weight", ".1%"),
    ("  if all tokens had equal weights", "equal_far_weight", ".1%"),
    ("entropy of the weights, nats", "attention_entropy", ".3f"),
    ("weights that are 0 in float32", "zero_weights", ".1%"),
    ("weights that are 0 in bfloat16", "zero_weights_bfloat16", ".1%"),
    ("planes that meet new angles", "new_planes", ".0%"),
)
#: The numbers of each layer: their titles, their names in `attention`, and their form.
OF_LAYERS = (
    ("weight on tokens L or more back", "far_weight", ".1%"), ("entropy, nats", "entropy", ".3f"),
    ("0 in float32", "zero_weights", ".1%"), ("0 in bfloat16", "zero_weights_bfloat16", ".1%"),
)  # fmt: skip


def run_autopsy(values: dict[str, Any], _: None) -> None:
    """Measure a run as trained and under each change, and print what follows.

    Raises ConfigError if the run or the settings do not fit, PartialFailure if a length could not be measured.
    """
    use_every_core()
    values, folder, run = _with_defaults(values)
    trained = make_request(values, folder, run, None)
    say_unused([trained.asked], values["overrides"])
    longest = max(trained.asked.eval.lengths)
    if longest <= trained.run.train.length:
        raise ConfigError(f"--lengths: name one above the training length, {trained.run.train.length} tokens.")
    changes = autopsy.changes(trained.run, longest)
    requests, left_out = _requests(values, trained, changes)
    if values["dry_run"]:
        for name, one in requests.items():
            print(f"{name}: {one.folder.path.name} at {one.asked.eval.lengths}")
        return
    for one in requests.values():
        if one.parent:
            one.folder.take_weights(one.parent, one.run)
    measured = {name: evaluate_request(one, workdir=values["workdir"]) for name, one in requests.items()}
    facts = _facts(trained, requests, measured, left_out, changes)
    for line in [json_line(facts)] if values["json"] else _lines(facts):
        print(line)
    if not values["json"]:
        redraw(one.folder for one in requests.values())
    if problems := failures(row for rows in measured.values() for row in rows):
        raise PartialFailure(f"{'; '.join(problems)} (docs/guides/troubleshooting.md)")


def _with_defaults(values: dict[str, Any]) -> tuple[dict[str, Any], RunFolder, RunConfig]:
    """Return the flags, with those of `posx evaluate`, the run that they name, and its settings.

    Raises ConfigError if the run or a setting does not fit.
    """
    if values["operand"] and values["workdir"]:
        raise ConfigError(f"--workdir={values['workdir']}: {values['operand']} names the run already. Name it once.")
    settings, place = values["overrides"].values(), values["operand"] or values["workdir"]
    if "eval.protocols" in settings:
        raise ConfigError(f"--config.eval.protocols: posx autopsy measures {PROTOCOL} and {BY_POSITION}. Leave it out.")
    folder = find_run(work_folder({"workdir": place}))
    run = folder.read_config()
    if folder.is_borrowed:
        raise ConfigError(f"{place} has the weights of another run. Name that run.")
    if run.data.is_task:
        raise ConfigError(f"{place}: posx autopsy measures losses on text, but this run answers {run.data.source}.")
    run.model.require_causal("posx autopsy")
    if run.train.token_positions.measure(run.train.length) is not None:
        raise ConfigError(
            f"{place}: posx autopsy needs tokens at positions 0 to L - 1, but train.positions={run.train.positions} "
            "gives others, so training met other distances. Measure the run with posx evaluate."
        )
    lengths = values["lengths"]
    if not lengths and "eval.lengths" not in settings:
        lengths = ",".join(str(n * run.train.length) for n in (1, 2, 4))
    own = {"workdir": place, "lengths": lengths, "protocol": f"{PROTOCOL},{BY_POSITION}", "stride": None}
    return values | own | {"encoding": "", "masks": "", "layers": ""}, folder, run


def _requests(
    values: dict[str, Any], trained: Request, changes: Sequence[Change]
) -> tuple[dict[str, Request], dict[str, str]]:
    """Return {name of a change: its request}, and {name: why} of the changes that do not fit the trained weights.

    All have the targets of the longest window that any of them was measured at, so that their losses compare.
    """
    requests, left_out = {TRAINED: trained}, dict[str, str]()
    for change in changes:
        asked = values | {"encoding": change.encoding, "masks": change.masks}
        try:
            ((folder, run, parent),) = run_variants(asked, trained.folder)
        except ConfigError as error:
            left_out[change.name] = str(error)
            continue
        if parent is None:
            left_out[change.name] = "it changes nothing in this run"
        else:
            requests[change.name] = make_request(values | {"protocol": PROTOCOL}, folder, run, parent)
    anchor = max(_anchor(one.folder, trained.asked.eval) for one in requests.values())
    for name, one in requests.items():
        config = one.asked.eval
        windows = config.attention_items or WINDOWS * ("eval.attention_items" not in values["overrides"].values())
        config = dataclasses.replace(
            config,
            sliding_lengths=tuple(sorted({*config.lengths, anchor})),  # not asked for, but they place the targets
            attention_items=windows if name == TRAINED else 0,
        )
        requests[name] = one._replace(asked=dataclasses.replace(one.asked, eval=config))
    return requests, left_out


def _anchor(folder: RunFolder, config: EvalConfig) -> int:
    """Return the longest window that the targets of a run's rows serve; at least the longest of `config`."""
    rows = folder.measured_rows() if folder.eval_file.exists() else []
    same = [row for row in rows if row["protocol"] == PROTOCOL and row.get("max_targets") == config.num_targets]
    return max([*config.lengths, *map(row_anchor, same)])


def _facts(
    trained: Request,
    requests: Mapping[str, Request],
    measured: Mapping[str, Sequence[dict[str, Any]]],
    left_out: Mapping[str, str],
    changes: Sequence[Change],
) -> dict[str, Any]:
    """Return all that is printed, as JSON has it."""
    run, asked = trained.run, {*trained.asked.eval.lengths, trained.run.train.length}
    rows = {
        name: [row for row in own if row["protocol"] == PROTOCOL and row["eval_len"] in asked]
        for name, own in measured.items()
    }
    lines = autopsy.loss_lines(rows, run.train.length)
    by_position = [row for row in measured[TRAINED] if row["protocol"] == BY_POSITION]
    first = rows[TRAINED][0]
    return {
        "run": trained.folder.path.name,
        "encoding": run.encoding,
        "train_len": run.train.length,
        "num_targets": first["num_targets"],
        "targets": first["targets"],
        "data_digest": first["data_digest"],
        "changes": [
            {**change._asdict(), "run": requests[change.name].folder.path.name}
            for change in changes
            if change.name in requests
        ],
        "lines": lines,
        "observations": [autopsy.observations(run, row) for row in rows[TRAINED]],
        "positions": autopsy.losses_by_position(by_position[-1], run.train.length) if by_position else [],
        "left_out": dict(left_out),
        "conclusion": autopsy.conclude(lines, {one.name: one.cause for one in changes}, run.train.length),
    }


def _lines(facts: Mapping[str, Any]) -> Iterator[str]:
    """Yield the tables and the conclusion."""
    lengths = sorted({line["eval_len"] for line in facts["lines"]})
    train_len = facts["train_len"]
    cells = {(line["change"], line["eval_len"]): line for line in facts["lines"]}
    yield f"{facts['run']}: {facts['encoding']}, L = {train_len:,} tokens"
    targets = f"{facts['num_targets']:,} targets, text {facts['data_digest'][:12]}"
    yield f"Perplexity on {targets}; its ratio to that as trained at L; the share of the loss that is restored"
    head = ["", *(text for n in lengths for text in (f"{n:,}", "ratio", *["restored"] * (n > train_len)))]
    table = [head]
    for name in [TRAINED, *(change["name"] for change in facts["changes"])]:
        row = [name]
        for n in lengths:
            row += _cells(cells[name, n], with_share=n > train_len)
        table.append(row)
    yield from _align(table)
    yield ""
    width = max((len(change["name"]) for change in facts["changes"]), default=0)
    yield "If a change restores the loss, the failure comes from" if width else "No change fits this run"
    yield from (f"  {change['name']:{width}}  {change['cause']}" for change in facts["changes"])
    yield ""
    read = max(one["attention_items"] or 0 for one in facts["observations"])
    yield f"As trained, in {read:,} windows of each length" if read else "As trained"
    yield from _align([["", *(f"{n:,}" for n in lengths)], *_observation_lines(facts["observations"])])
    if facts["positions"]:
        yield ""
        yield f"Loss by position in windows of {facts['positions'][-1]['to']:,} tokens, nats per token"
        heads = [f"{one['from']:,}-{one['to']:,}" for one in facts["positions"]]
        yield from _align([["positions", *heads], ["loss", *(f"{one['nll']:.3f}" for one in facts["positions"])]])
    yield ""
    for name, why in facts["left_out"].items():
        say(f"left out: {name}: {why}")
    yield facts["conclusion"]


def _cells(line: Mapping[str, Any], with_share: bool) -> list[str]:
    """Return the perplexity of a change at a length, its ratio and the share of the loss that it restores."""
    if line["nll"] is None:
        return [FAILED.get(line["status"], line["status"]), "-", *["-"] * with_share]
    restored = "-" if line["restored"] is None else f"{round(line['restored'], 2) + 0.0:.0%}"
    ppl = math.inf if line["ppl"] == "inf" else line["ppl"]
    return [f"{ppl:.3f}" if ppl < 1000 else f"{ppl:.3g}", f"{line['ratio']:.3g}", *[restored] * with_share]


def _observation_lines(observations: Sequence[Mapping[str, Any]]) -> Iterator[list[str]]:
    """Yield the rows of observations that are known, followed by those of each layer."""
    for title, name, form in OBSERVED:
        values = [one[name] for one in observations]
        needs = "far_weight" if name == "equal_far_weight" else name
        if any(one[needs] is not None for one in observations):
            yield [title, *("-" if value is None else format(value, form) for value in values)]
    layers = max((len(one["attention"]["entropy"]) for one in observations if one["attention"]), default=0)
    for n in range(layers):
        for title, name, form in OF_LAYERS:
            heads = [one["attention"][name][n] if one["attention"] else None for one in observations]
            means = ("-" if own is None else format(sum(own) / len(own), form) for own in heads)
            if title.startswith("0 ") and not any(map(any, filter(None, heads))):
                continue  # the line of all layers says so
            yield [f"layer {n + 1}: {title}", *means]


def _align(table: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the rows of a table, words in the first column and numbers in the others."""
    words = [n == 0 for n in range(len(table[0]))]
    yield from (f"  {line}" for line in align_columns(table, words))
