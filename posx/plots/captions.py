"""What figures and tables say in words: labels, what was scored, what bars and bands are, warnings, failures."""

from collections.abc import Sequence

from posx.evaluation.statistics import targets_key
from posx.plots import look, rows
from posx.plots.points import Curve, Point
from posx.plots.rows import Row

FAILURE_NAMES = {"undefined": "undefined", "nonfinite": "not finite", "oom": "out of memory"}
PROTOCOLS = {
    "nonoverlapping": "non-overlapping windows",
    "sliding": "sliding window",
    rows.PER_POSITION: "loss per position",
}


def labels(curves: Sequence[Curve], most: int | None = None) -> list[str]:
    """A curve's name, what tells it from its namesakes, and its number of seeds where that is not everybody's."""
    everybody = most if most is not None else max((curve.seeds[1] for curve in curves), default=0)
    found = []
    for curve in curves:
        name = look.shown(look.look(curve.encoding).name, 26)
        if curve.detail:
            name += "\n" + look.shown(curve.detail, 30)
        few, many = curve.seeds
        if many and (few, many) != (everybody, everybody):
            name += f" (n = {few})" if few == many else f" (n = {few} to {many})"
        found.append(name if many else f"{name} (no value)")
    return found


def facts(panel_rows: Sequence[Row], train_len: int, protocol: str) -> list[str]:
    """Subtitle lines: the protocol and what was scored; the training length, seeds and text."""
    strides = sorted({row["stride"] for row in panel_rows if isinstance(row.get("stride"), int)})
    first = PROTOCOLS.get(protocol, look.shown(protocol))
    if protocol == rows.PER_POSITION:
        first += f", windows of {_range(sorted({row['eval_len'] for row in panel_rows}))} tokens"
    if protocol == "sliding" and strides:
        first += f", stride {_range(strides)}"
    if targets := _numbers(panel_rows, "num_targets"):
        first += f" · {_range(targets)} targets scored per " + ("run" if protocol == rows.PER_POSITION else "length")
    if documents := _numbers(panel_rows, "num_documents"):
        stretches = _numbers(panel_rows, "num_stretches")
        first += f", {_range(stretches)} stretches of" if stretches and stretches[-1] > 1 else " of"
        first += f" {_range(documents)} document{'s' if documents[-1] > 1 else ''}"
    seeds = rows.seed_count(panel_rows)
    second = f"trained at L = {train_len} · {seeds} seed{'s' if seeds != 1 else ''}"
    for key, word in (("tokenizer", "tokenizer"), ("data_digest", "text")):
        names = sorted({str(row[key]) for row in panel_rows if row.get(key)})
        if names:
            second += f" · {word} " + ", ".join(
                look.shown(name, 12 if key == "data_digest" else 24) for name in names[:3]
            )
    return [first[0].upper() + first[1:], second[0].upper() + second[1:]]


def spreads(curves: Sequence[Curve], panel_rows: Sequence[Row], interval: str) -> list[str]:
    """A subtitle line on what the band and the bars of a figure are; none where there are neither."""
    parts = ["Line: mean over seeds, band: lowest to highest"] if any(curve.seeds[1] > 1 for curve in curves) else []
    points = [point for curve in curves for point in curve.points]
    if interval:
        parts += [f"Bars: {interval}"] if any(point.interval for point in points) else no_intervals(panel_rows, points)
    return [" · ".join(parts)] if parts else []


def no_intervals(panel_rows: Sequence[Row], points: Sequence[Point]) -> list[str]:
    """Why no point has an interval, where rows have what it takes; else nothing."""
    owed = any(row.get("block_nll") for row in panel_rows) and not any(point.interval for point in points)
    return ["No intervals: too little text"] if owed else []


def mixture(panel_rows: Sequence[Row]) -> str:
    """A warning where numbers of different texts, tokenizers or targets stand side by side, else an empty string."""
    for key, word in (("data_digest", "corpora"), ("tokenizer", "tokenizers")):
        if len({str(row[key]) for row in panel_rows if row.get(key)}) > 1:
            return f"different {word}: not comparable"
    if len({targets_key(row) for row in panel_rows}) > 1:
        return "scored on different targets: evaluate all runs again to compare them"
    return ""


def _numbers(panel_rows: Sequence[Row], key: str) -> list[int]:
    return sorted({row[key] for row in panel_rows if isinstance(row.get(key), int)})


def _range(values: Sequence[int]) -> str:
    return f"{values[0]:,}" if len(values) == 1 else f"{values[0]:,} to {values[-1]:,}"


def notes(curves: Sequence[Curve], missing: Sequence[str], unit: str = "") -> list[str]:
    """What stands under the axes: failures, and runs without results."""
    lines = failures(curves, unit)
    if missing:
        named = ", ".join(look.shown(name, 24) for name in missing[:4])
        lines.append(f"No results yet: {named}" + (f" and {len(missing) - 4} more runs" if len(missing) > 4 else ""))
    return lines


def failures(curves: Sequence[Curve], unit: str) -> list[str]:
    """One line per encoding and kind of failure: where, and for how many runs where some succeeded."""
    lines = []
    for curve in curves:
        for kind in rows.FAILED:
            points = [point for point in curve.points if kind in point.failures]
            if not points:
                continue
            places = [look.length_name(point.x) + _share(point, kind) for point in points]
            if len(places) > 6:
                places = [*places[:3], f"… {places[-1]} ({len(places)} places)"]
            name = look.shown(look.look(curve.encoding).name, 26) + (
                f" {look.shown(curve.detail, 26)}" if curve.detail else ""
            )
            lines.append(f"{name}: {FAILURE_NAMES[kind]} at {unit}{', '.join(places)}")
    return lines if len(lines) <= 8 else [*lines[:7], f"and {len(lines) - 7} more failures (see the table)"]


def _share(point: Point, kind: str) -> str:
    """ " (1 of 3 runs)" where only some runs failed."""
    runs = len(point.values) + len(point.failures)
    failed = point.failures.count(kind)
    return f" ({failed} of {runs} runs)" if failed < runs else ""
