"""Set the ratios R_k of the studies beside published ones.

    python -m experiments.anchors table train_short_test_long
    python -m experiments.anchors table leaderboard
    python -m experiments.anchors draw

`anchors.toml` holds the published perplexities, with their sources. `table` prints Markdown: a line for each encoding
of a study and each source, with the published R_k before the mean over the seeds of the study. Both are at the same k,
or the published k differs by less than 7 % and is named. Protocols are those that `anchors.toml` names. `draw` writes
`train_short_test_long/ratio.png`, the R_k of the ten with some published ones in grey.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import sys
import tomllib
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from experiments.tables import HERE, Run, Seeds, by_setting, load, markdown, row_tables
from posx.evaluation.protocols import Nonoverlapping
from posx.lab.config.sections import CLASSIC
from posx.lab.plots import look
from posx.lab.plots.curves import ratio

FILE = HERE / "anchors.toml"
#: The runs of the studies whose tables these are, by their part.
STUDIES = {"train_short_test_long": "study", "leaderboard": "cells"}
DRAWN = "train_short_test_long"
FACTORS = (2, 4, 8, 16)
_APART = 0.1  # octaves between a published k and that of a column
LINE = {"color": "#8A8A8A", "linewidth": 0.7, "markersize": 3.2, "zorder": 1.5}
BOX = {"facecolor": "white", "edgecolor": "none", "alpha": 0.6, "pad": 0.3}


@dataclasses.dataclass(frozen=True)
class Anchor:
    """Published perplexities of one table, text, size and training length; `anchors.toml` says what the fields mean."""

    paper: str
    source: str
    text: str
    tokenizer: str
    parameters: str
    train_len: int
    protocol: str
    differs: str
    lengths: Sequence[int]
    perplexity: Mapping[str, Sequence[float]]
    drawn: bool = False

    def ratios(self, encoding: str) -> dict[float, float]:
        """Return {k: R_k} of an encoding at the lengths beyond L that have a number; {} if it has none."""
        values = dict(zip(self.lengths, self.perplexity.get(encoding, ()), strict=False))
        known = {length: value for length, value in values.items() if length > self.train_len and math.isfinite(value)}
        return {length / self.train_len: value / values[self.train_len] for length, value in known.items()}

    @property
    def name(self) -> str:
        """The source with its table, and what was trained."""
        slid = f", {self.protocol}" if self.protocol != Nonoverlapping.name else ""
        return f"{self.paper}, {self.source}: {self.text}, {self.parameters}, L = {self.train_len}{slid}"

    @property
    def same(self) -> str:
        """Whether its protocol is that of the studies, and the difference."""
        return f"no: {self.differs}" if self.differs else "yes"


def runs_of(study: str) -> list[Run]:
    """Return the runs of a study's table. The ten stand in that of their own study, not in the leaderboard's."""
    own = load(study, STUDIES[study])
    return own if study == DRAWN else [run for run in own if run["encoding"] not in CLASSIC]


def load_anchors() -> list[Anchor]:
    return [Anchor(**entry) for entry in tomllib.loads(FILE.read_text(encoding="utf-8"))["anchor"]]


def nearest(ratios: Mapping[float, float], factor: float) -> float | None:
    """Return the published k that stands for `factor`; None if none is near."""
    near = min(ratios, key=lambda k: abs(math.log2(k / factor)), default=math.nan)
    return near if abs(math.log2(near / factor)) < _APART else None


def table(runs: Sequence[Run], anchors: Sequence[Anchor]) -> list[list[str]]:
    """Return the cells of a line for each encoding of the runs and each anchor that has one of its R_k."""
    found = by_setting([run for run in runs if any(run["encoding"] in one.perplexity for one in anchors)])
    lines = []
    for encoding, members in found.items():
        for anchor in anchors:
            ratios, seeds = anchor.ratios(encoding), Seeds(members, anchor.protocol)
            cells = [_cell(ratios, seeds, k) for k in FACTORS]
            if any(cells):
                lines.append([f"`{encoding}`", anchor.name, *cells, anchor.same])
    return lines


def _cell(ratios: Mapping[float, float], seeds: Seeds, factor: int) -> str:
    """Return "published / ours", "" if there is no published number, with the published k if it is another one."""
    near = nearest(ratios, factor)
    if near is None:
        return ""
    ours = seeds.ratios(factor) if seeds.rows else []
    text = f"{_number(ratios[near])} / {_number(statistics.fmean(ours)) if ours else '-'}"
    return text if near == factor else f"{text} (k = {near:.3g})"


def _number(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def draw(target: Path) -> None:
    """Write the figure of R_k of the ten, with the anchors that are drawn, as PNG.

    These are thin grey lines with the mark of their encoding, named at their ends. Names at about the same k are moved
    apart.
    """
    made = row_tables(runs_of(DRAWN))
    (panel,) = (one.panel for one in made if one.panel and one.panel.protocol == Nonoverlapping.name)
    curves, last = {curve.label: curve for curve in panel.curves}, max(panel.rows.eval_len) / panel.train_len
    drawn = [(name, one) for one in load_anchors() if one.drawn for name in one.perplexity if name in curves]
    lines = [
        (name, one, known) for name, one in drawn if (known := {k: r for k, r in one.ratios(name).items() if k <= last})
    ]
    papers, ends = Counter((name, one.paper) for name, one, _ in lines), defaultdict(list)
    with look.style():
        figure = ratio(panel)
        ax = figure.axes[0]
        look.log_axis(ax, [*ax.get_ylim(), *(value for *_, known in lines for value in known.values())])
        low, high = map(math.log, ax.get_ylim())
        for name, one, known in lines:
            style, k = curves[name].look, max(known)
            ax.plot([1, *known], [1, *known.values()], marker=style.marker, linestyle=style.dashes, **LINE)
            text = one.paper + f", L = {one.train_len}" * (papers[name, one.paper] > 1)
            ends[round(math.log2(k))].append(((math.log(known[k]) - low) / (high - low), k, text, style.color))
        for near in map(sorted, ends.values()):
            for (_, k, text, color), height in zip(near, look.spread([end[0] for end in near], 0.028), strict=True):
                place = {"xycoords": ax.get_xaxis_transform(), "textcoords": "offset points", "bbox": BOX}
                ax.annotate(text, (k, height), (5, 0), size=6.5, color=color, va="center", zorder=4, **place)
        ax.annotate(
            "grey: published, on other texts and targets, most at other L",
            (0.02, 0.97),
            xycoords="axes fraction",
            size=8,
            color="0.4",
            va="top",
        )
        left, right = ax.get_xlim()
        ax.set_xlim(left, right * (right / left) ** 0.14)  # room for the names at the last k
        figure.savefig(target, dpi=120, bbox_inches="tight", pad_inches=0.15)


def main(words: Sequence[str]) -> None:
    """Run one of the commands."""
    match words:
        case ["table", study] if study in STUDIES:
            head = ["encoding", "source", *(f"R_{k}" for k in FACTORS), "same protocol"]
            print(markdown(head, table(runs_of(study), load_anchors())))
        case ["draw"]:
            draw(HERE / DRAWN / "ratio.png")
        case _:
            raise SystemExit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
