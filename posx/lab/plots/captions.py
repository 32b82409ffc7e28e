"""The words of figures and tables: what was scored, what bars and bands are, warnings, failures, omissions."""

import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import pandas as pd

from posx.evaluation import protocols
from posx.lab.plots import look
from posx.lab.plots.groups import Curve, Panel, Point, common_settings, firsts, settings_by_length
from posx.lab.results.columns import FAILED, finite_perplexity
from posx.lab.results.facts import SCORED_STEP
from posx.lab.results.table import PER_POSITION

#: The names of the protocols in captions.
TITLES = {name: protocol.title for name, protocol in protocols.PROTOCOLS.items()}
_MOST_NAMES = 4


def perplexity_name(protocol: str) -> str:
    """Return the name of exp(nll) under a protocol: perplexity, or pseudo-perplexity."""
    known = protocols.PROTOCOLS.get(protocol)
    return known.quantity if known else "perplexity"


def subtitle(panels: Sequence[Panel]) -> list[str]:
    """Return the subtitle: the protocol and the scored targets, then the training length, seeds and text."""
    rows, protocol = panel_rows(panels), panels[0].protocol
    first = TITLES.get(protocol, look.one_line(protocol))
    if protocol == PER_POSITION:
        first += f", windows of {_range(rows.eval_len)} tokens"
    if len(strides := rows.stride[rows.stride.fillna(-1) != rows.eval_len].dropna()):
        first += f", stride {_range(strides)}"
    items, known = rows.num_items.dropna(), {"tokenizer": "tokenizer ", "data_digest": "text "}
    if len(items):
        first, known = f"{first} · {_range(items)} items per length", {"data_source": ""}
    elif len(targets := rows.num_targets.dropna()):
        first += f" · {_range(targets)} targets scored per " + ("run" if protocol == PER_POSITION else "length")
    if len(documents := rows.num_documents.dropna()):
        stretches = rows.num_stretches.dropna()
        first += f", {_range(stretches)} stretches of" if stretches.max() > 1 else " of"
        first += f" {_range(documents)} document{'s' if documents.max() > 1 else ''}"
    seeds = [len(curve.runs) for panel in panels for curve in panel.curves] or [0]
    lengths = ", ".join(f"{panel.train_len}" for panel in panels)
    second = f"trained at L = {lengths} · {_range(pd.Series(seeds))} seed{'s' if set(seeds) != {1} else ''}"
    for key, word in known.items():
        names = sorted(set(rows[key]) - {""})
        if names:
            names = [name[:12] if key == "data_digest" else look.one_line(name, 40) for name in names]
            second += f" · {word}" + ", ".join(names[:3]) + (f" and {len(names) - 3} more" if names[3:] else "")
    return [first[0].upper() + first[1:], second[0].upper() + second[1:]]


def panel_rows(panels: Sequence[Panel]) -> pd.DataFrame:
    """Return the rows of panels."""
    return pd.concat([panel.rows for panel in panels])


def spreads(curves: Sequence[Curve], interval: str = "") -> list[str]:
    """Return a subtitle line on the band, dots and bars of a figure. `interval` names the bars, "" for many points."""
    seeds = f"Line: mean over seeds, band: lowest to highest{', dots: each' if interval else ''}"
    parts = [seeds] if any(curve.seeds[1] > 1 for curve in curves) else []
    points = [("", point) for curve in curves for point in curve.points]
    if interval:
        parts += [f"Bars: {interval}"] if any(point.interval for _, point in points) else []
        parts += no_intervals(points)
    return [" · ".join(parts)] if parts else []


def no_intervals(points: Sequence[tuple[str, Point]]) -> list[str]:
    """Return the reasons why points have no interval, each with the names of its points if others have one."""
    said = _group_names((point.no_interval, name) for name, point in points if point.no_interval)
    if any(point.interval for _, point in points):
        return [f"No interval for {join_names(names, 'cells')}: {why}" for why, names in said.items() if names != [""]]
    return [f"No intervals: {', '.join(said)}"] if said else []


def mixture(rows: pd.DataFrame) -> str:
    """Return a warning if numbers of different texts, tokenizers or targets are compared, else an empty string."""
    if len(set(rows.tokenizer) - {""}) > 1:
        # Their equal numbers of targets end at different places of the text.
        parts = (rows.max_targets > 0).any() or (rows.groupby("protocol").num_bytes.nunique() > 1).any()
        also = ", nor are bits per byte: score one whole text with --num_targets=0" if parts else ""
        return f"different tokenizers: perplexities are not comparable{also}"
    texts = rows[rows.data_digest != ""].groupby("data_digest").targets.agg(set)
    if len(texts) > 1 and not set.intersection(*texts):
        return f"different corpora{other_tokens(rows.tokenizer)}: not comparable"
    scored = rows[~rows.status.isin(["diverged", "apart"])]
    # Losses per position in windows of other lengths are of other targets. A note says so.
    windows = scored.eval_len[scored.protocol == PER_POSITION].nunique() + (scored.protocol != PER_POSITION).any()
    if len(scored.drop_duplicates(["targets", "block_len"])) > windows:
        return "scored on different targets: evaluate all runs again to compare them"
    return ""


def training_mixture(runs: pd.DataFrame) -> str:
    """Return a warning if the training losses of different texts or tokenizers are compared, else an empty string."""
    texts = {settings["data.text"] for settings in runs.settings if "data.text" in settings}
    return "different training texts or tokenizers: losses are not comparable" if len(texts) > 1 else ""


def other_tokens(tokenizers: Iterable[str | None]) -> str:
    """Return the words that a warning adds if tokenizers of one name may differ; "" if all rows are of bytes."""
    return "" if set(tokenizers) <= {"bytes", "", None} else ", or tokenizers of one name"


def notes(panels: Sequence[Panel], points: Sequence[Curve], unit: str = "") -> list[str]:
    """Return the lines under the axes: settings, failures, omissions, and runs that are not finished.

    Args:
      panels: the panels of the figure.
      points: the curves with their points. Their failures and missing runs are listed.
      unit: the text before the abscissas of these points.
    """
    curves = [one for panel in panels for one in panel.curves if not one.window_of]
    rows = panel_rows(panels)
    on_axes = ("train.length", *settings_by_length(_first_runs(curves))) if panels[1:] else ()
    return [
        *_unlike_windows(curves if panels[0].protocol == PER_POSITION else ()),
        *_short_documents(rows),
        *_short_items(rows),
        *shared_settings_line(curves, on_axes),
        *_failures(points, unit),
        *fewer_runs(points, unit),
        *_fewer_windows(panels),
        *omission_lines(pd.concat([panel.left_out for panel in panels])),
        *_rescore_command(rows),
        *unfinished_lines(rows),
        *precisions(rows),
        *without_results(panels[0].missing),
        *tokens_per_step(curves),
    ]


def _unlike_windows(curves: Iterable[Curve]) -> list[str]:
    """Return lines on curves of losses in shorter windows, which are scored on other targets than the longest."""
    said = _group_names((int(curve.rows.eval_len.max()), curve.label) for curve in curves)
    longest = max(said, default=0)
    return [
        f"In windows of {length:,} tokens, so on other targets at these positions than in those of {longest:,}: "
        f"{join_names(said[length], 'curves')}"
        for length in sorted(said.keys() - {longest})
    ]


def _short_documents(rows: pd.DataFrame) -> list[str]:
    """Return a line if less than half of what is before a target in the longest windows is of its own document."""
    shares = rows[rows.own_context.notna()].groupby("eval_len").own_context.min()
    if shares.empty or shares.iloc[-1] >= 0.5:
        return []
    own = f"{shares.iloc[-1]:.0%} in windows of {shares.index[-1]:,} tokens"
    own += f", {shares.iloc[0]:.0%} in those of {shares.index[0]:,}" if len(shares) > 1 else ""
    return [f"The share of the tokens before a target that are of the same document is {own}"]


def _short_items(rows: pd.DataFrame) -> list[str]:
    """Return a line on lengths with items as short as those of training, or without any that fill them."""
    known = rows[rows.item_lens.notna()].drop_duplicates(["train_len", "eval_len"]).sort_values("eval_len")
    said = [
        f"{int(low):,} to {int(high):,} tokens at {length:,}"
        for (low, high), length, trained in zip(known.item_lens, known.eval_len, known.train_len, strict=True)
        if low <= trained < length or high < 0.9 * length
    ]
    return [f"Some items are short: {_places(said)}. Training has items of up to L tokens"] if said else []


def shared_settings_line(curves: Sequence[Curve], on_axes: Collection[str] = ()) -> list[str]:
    """Return a line on the settings that most curves share, so that only the labels of the others name them."""
    common = common_settings(_first_runs(curves), on_axes)
    parts = [f"{name.rpartition('.')[2]}={value}" for name, value in common.items()]
    return [f"If a label does not say otherwise: {', '.join(parts)}"] if parts else []


def _first_runs(curves: Sequence[Curve]) -> pd.DataFrame:
    return firsts([curve.runs for curve in curves])


def _failures(curves: Sequence[Curve], unit: str) -> list[str]:
    """Return a line per curve and kind of failure: the lengths, and the number of runs if others succeeded."""
    lines = []
    for curve in curves:
        for kind in [kind for kind in FAILED if kind != "diverged"]:  # these runs are named with their step
            if points := [point for point in curve.points if kind in point.failures]:
                shares = [(point.failures.count(kind), len(point.values) + len(point.failures)) for point in points]
                of = [f" ({failed} of {runs} runs)" if failed < runs else "" for failed, runs in shares]
                places = [look.length_name(point.x) + share for point, share in zip(points, of, strict=True)]
                lines.append(f"{look.one_line(curve.label)}: {FAILED[kind]} at {unit}{_places(places)}")
    return _first(lines, 8, "failures (see the table)")


def fewer_runs(curves: Sequence[Curve], unit: str) -> list[str]:
    """Return lines on lengths at which only some runs of a curve were measured, so that its mean may jump."""
    lines = []
    for curve in curves:
        runs = [len(point.values) + len(point.failures) for point in curve.points]
        for few in sorted(set(runs) - {0, max(runs, default=0)}):
            names = [look.length_name(point.x) for point, n in zip(curve.points, runs, strict=True) if n == few]
            lines.append(f"{look.one_line(curve.label)}: {few} of {max(runs)} runs measured at {unit}{_places(names)}")
    return _first(lines, 6, "curves of fewer runs at some lengths")


def _fewer_windows(panels: Sequence[Panel]) -> list[str]:
    """Return lines on windows of L that have fewer runs than the curves of the same weights, so that means differ."""
    runs = [{one.label: len(one.runs) for one in panel.curves} for panel in panels]
    said = _group_names(
        (f"{len(one.runs)} of {own[one.window_of]}", one.window_of)
        for panel, own in zip(panels, runs, strict=True)
        for one in panel.curves
        if one.window_of and len(one.runs) < own[one.window_of]
    )
    return [
        f"Thin lines of {few} runs of their curves, so seeds make part of the gap: {join_names(names, 'curves')}"
        for few, names in said.items()
    ]


def omission_lines(rows: pd.DataFrame) -> list[str]:
    """Return lines on rows that are left out, and why. Runs with the same reason share a line."""
    reasons = rows.groupby(["run", "protocol", "rule", "left_out"], sort=False, dropna=False)
    said = _group_names((_omission(why, own), run) for (run, _, _, why), own in reasons)
    return [f"{join_names(runs, 'runs')}{', each' if len(runs) > 1 else ''}: {words}" for words, runs in said.items()]


def _omission(why: str, rows: pd.DataFrame) -> str:
    if why.endswith("are drawn"):
        return f"windows of {', '.join(f'{n:,}' for n in sorted(set(rows.eval_len)))} tokens left out, {why}"
    return f"{len(rows)} row{'s' * (len(rows) > 1)} left out, {why}"


def _rescore_command(rows: pd.DataFrame) -> list[str]:
    """Return the command that scores all runs on the same targets, if some rows have the status "apart"."""
    values, first = rows[finite_perplexity(rows).notna()], rows.iloc[0]
    if values.empty or not (rows.status == "apart").any():
        return []
    lengths = sorted({int(n) for name in ("eval_len", "anchor", "longest") for n in rows[name].dropna()})
    most, strides = _text_tokens(values.iloc[0]), set(values.stride.dropna()) - {values.eval_len.iloc[0]}
    words = f"--protocol {first.protocol} --lengths {','.join(map(str, lengths))}"
    words += f" --num_targets {max(most, lengths[-1]) if most else 0}"
    words += "".join(f" --stride {n}" for n in strides if values.stride.nunique() == 1)
    return [f"To compare all runs: posx evaluate --workdir {shlex.quote(first.workdir or 'FOLDER')} {words}"]


def _text_tokens(row: pd.Series) -> int:
    """Return the tokens of text that hold as many targets as were asked for; 0 for all."""
    protocol: Any = protocols.PROTOCOLS.get(row.protocol, protocols.Nonoverlapping)
    return 0 if pd.isna(row.max_targets) else protocol(num_targets=int(row.max_targets)).text_tokens


def unfinished_lines(rows: pd.DataFrame) -> list[str]:
    """Return lines on runs measured before the end of training, and on those that ended with NaN or were solved."""
    early, ended, solved = [], [], []
    last = dict(zip(rows.run, zip(rows.status, rows.step, rows.settings, strict=True), strict=True))
    for run, (status, step, settings) in last.items():
        steps, name = settings.get("train.steps"), look.one_line(run)
        scored = settings.get(SCORED_STEP)  # `train.steps` if training ended because a task was solved
        if status == "diverged":
            ended.append(f"{name} at step {step:,}")
        elif isinstance(scored, int) and isinstance(steps, int):
            if scored < steps:
                early.append(f"{name} (step {scored:,} of {steps:,})")
            elif pd.notna(step) and step < steps:
                solved.append(f"{name} (step {step:,} of {steps:,})")
    said = {"Measured before the end of training": early, "Training ended with NaN": ended}
    said |= {"Ended early, at the first check without a wrong item": solved}
    return [f"{words}: {join_names(names, 'runs')}" for words, names in said.items() if names]


def precisions(rows: pd.DataFrame) -> list[str]:
    """Return the precisions of float32 products if rows were evaluated in different ones. CPUs have the highest alone.

    Rows that name no precision were evaluated in the default precision of the device.
    """
    devices = rows.env.map(lambda env: (env or {}).get("device"))
    precision = rows.precision.replace("", "default").mask(devices == "cpu", "highest")[devices.notna()]
    said = _group_names(zip(precision, rows.run[precision.index], strict=True))
    parts = [f"{precision} ({join_names(names, 'runs')})" for precision, names in sorted(said.items())]
    return [f"Evaluated in different precisions of float32 products: {', '.join(parts)}"] if len(parts) > 1 else []


def without_results(missing: Mapping[str, str]) -> list[str]:
    """Return lines on runs without a row: those that failed, and why, and those that may still come."""
    said = _group_names((why, name) for name, why in sorted(missing.items(), key=lambda pair: not pair[1]))
    runs = {why: join_names(names, "runs") for why, names in said.items()}
    lines = [f"{of} failed: {look.one_line(why)}" if why else f"No results yet: {of}" for why, of in runs.items()]
    return _first(lines, 8, "reasons why runs have no results")


def tokens_per_step(curves: Sequence[Curve]) -> list[str]:
    """Return the tokens of training text per step if curves differ in them, which makes a comparison unfair."""
    runs = [(curve.label, curve.runs.iloc[0]) for curve in curves]
    several = len({run.train_len for _, run in runs}) > 1
    batches = [(name, run.train_len, run.settings.get("train.batch_size")) for name, run in runs]
    said = _group_names(
        (batch * n, f"L = {n}" if several else name) for name, n, batch in batches if isinstance(batch, int)
    )
    parts = [f"{tokens:,} ({join_names(names, 'curves')})" for tokens, names in sorted(said.items())]
    return [f"Tokens per training step differ: {', '.join(parts)}"] if len(parts) > 1 else []


def join_names(names: Sequence[str], word: str = "") -> str:
    """Join names, with semicolons if a name holds a comma; only a few of many, if there is a `word` for the others."""
    few = [look.one_line(name) for name in (names[:_MOST_NAMES] if word else names)]
    more = f" and {len(names) - len(few)} more {word}" if len(names) > len(few) else ""
    return ("; " if any(", " in name for name in few) else ", ").join(few) + more


def _range(values: pd.Series) -> str:
    low, high = values.min(), values.max()
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _group_names(pairs: Iterable[tuple[Any, str]]) -> dict[Any, list[str]]:
    """Return {statement: the names that it is about, each once}."""
    by_statement: dict[Any, dict[str, None]] = {}
    for said, name in pairs:
        by_statement.setdefault(said, {})[name] = None
    return {said: list(names) for said, names in by_statement.items()}


def _first(lines: list[str], most: int, rest: str) -> list[str]:
    return lines if len(lines) <= most else [*lines[: most - 1], f"and {len(lines) - most + 1} more {rest}"]


def _places(names: list[str]) -> str:
    return ", ".join([*names[:3], f"… {names[-1]} ({len(names)} places)"] if len(names) > 6 else names)
