"""Print the tables, and a few sentences, of two pages: docs/guides/choose.md and docs/guides/compare.md.

    python -m experiments.guides choose
    python -m experiments.guides compare

Every number comes from the data files of the studies. An interval is 95 %, over text and over seeds together, as in the
leaderboard; "one seed" marks an interval over text alone.

Far context. Windows of 2k tokens score every target once, half of them with k + 1 to 2k tokens of context. The other
half has 1 to k, as in windows of k tokens. So the mean loss with more than k tokens of context is 2 NLL(2k) - NLL(k),
up to the difference between the texts of the two halves. The interval over text includes that difference.
"""

from __future__ import annotations

import functools
import itertools
import math
import statistics
import sys
from collections.abc import Sequence

import numpy as np

from benchmarks.memory import summarise
from experiments.cost.cost import REPORTS
from experiments.leaderboard.leaderboard import Entry, difference, entries_of, multiplier
from experiments.recipe.recipe import cells_of, records
from experiments.tables import (
    SLIDING,
    WINDOWS,
    Row,
    Seeds,
    by_setting,
    cell,
    length_name,
    load,
    markdown,
    over_nope,
    ratio_text,
)
from experiments.tasks import tasks
from posx.evaluation.differences import (
    Difference,
    error_over_text,
    errors_over_seeds,
    judge,
    loss_difference,
)
from posx.evaluation.statistics import mean_blocks

STUDY = "train_short_test_long"
#: The entries of the page, by the rise of their loss beyond L: not seen, slow, fast.
LEVEL = ("bam", "grape_a", "transformer_xl", "dape(kernel=3)", "fox", "dape", "kerple", "dynamic_bias")
SLOW = ("t5", "shaw", "xpos", "nape", "sandwich", "path", "alibi")
FAST = ("deberta", "inkling", "pope", "cope", "rope", "fire", "selective_rope", "fope", "sinusoidal", "nope")
UNDEFINED = ("tupe", "learned")
SHOWN = (*LEVEL, *SLOW, *FAST, *UNDEFINED)


def judged(ours: Sequence[Row], theirs: Sequence[Row], paired: bool = False) -> str:
    """Return the ratio of perplexities of two encodings, or of one at two lengths if `paired`, over their seeds."""
    found = loss_difference(ours, theirs, paired)
    assert found.over_text is not None
    text = ratio_text(found.mean, found.half)
    return text if len(ours) > 1 else f"{text}, one seed"


def far(entry: Entry, factor: int) -> list[float]:
    """Return the loss of targets with `factor` to twice `factor` training lengths of context, by seed, in nats."""
    near, window = entry.values("nll", factor), entry.values("nll", 2 * factor)
    return [2 * b - a for a, b in zip(near, window, strict=True)]


def rise(entry: Entry, factor: int = 8) -> str:
    """Return the perplexity with `factor` to twice `factor` training lengths of context over that with 1 to 2."""
    sums = [mean_blocks(entry.at(n))[0] for n in (2 * factor, factor, 2, 1)]
    counts = mean_blocks(entry.at(1))[1]
    series = (2 * sums[0] - sums[1]) - (2 * sums[2] - sums[3])
    gaps = [a - b for a, b in zip(far(entry, factor), far(entry, 1), strict=True)]
    mean = float(series.sum() / counts.sum())
    return ratio_text(mean, Difference(mean, error_over_text(series, counts), errors_over_seeds(gaps), "").half)


def link(name: str) -> str:
    """Return an entry as a link to the page of its encoding."""
    return f"[`{name}`](../../posx/encodings/{name.partition('(')[0]}.py)"


def at_length(entries: dict[str, Entry], name: str) -> list[str]:
    """Return the cells of an entry at L: its name, rate, perplexity, and that over RoPE's."""
    entry = entries[name]
    against = "-" if name == "rope" else ratio_text(*(difference(entry, 1, entries["rope"], 1) or (0, 0)))
    return [link(name), multiplier(entry.runs[0]), cell(entry.values("ppl")), against]


@functools.cache
def answer_cells() -> tuple[tasks.Cells, tasks.Cells]:
    """Return the answers of the catalogue, and those with keys that see the token before."""
    return tasks.read_cells(tasks.catalogue()), tasks.read_cells(load("tasks", "recall"))


def answers(name: str) -> list[str]:
    """Return the right answers of small models at 4 L: the flip-flop, and recall behind `key_offset`."""
    alone, behind = answer_cells()
    found = alone[name]["flip_flop"], behind[f"key_offset+{name}"]["mqar(symbols=16)"]
    return [tasks.answers_text(rows, 4) for rows in found]


ANSWERS = ("flip-flop, 4 L", "recall, 4 L")


def lasting(entries: dict[str, Entry]) -> str:
    """Return the table of the encodings whose windows of 16 L are no worse than those of L."""
    body = [
        [*at_length(entries, name), entries[name].ratio(16), rise(entries[name]), *answers(name)]
        for name in (*LEVEL, *SLOW)
    ]
    return markdown(["encoding", "rate", "PPL at L", "over RoPE's", "R_16", "far context", *ANSWERS], body)


def failing(entries: dict[str, Entry]) -> str:
    """Return the table of the encodings that rise beyond L, or are undefined there."""
    body = [
        [*at_length(entries, name), *(entries[name].ratio(k) for k in (2, 16)), entries[name].horizon(), *answers(name)]
        for name in (*FAST, *UNDEFINED)
    ]
    return markdown(["encoding", "rate", "PPL at L", "over RoPE's", "R_2", "R_16", "1 % horizon", *ANSWERS], body)


def corrected(entries: dict[str, Entry]) -> str:
    """Say the verdicts against RoPE at L on the methods that have enough seeds, with p after Holm's correction."""
    names = [name for name in entries if name != "rope"]
    verdicts = judge([loss_difference(entries[name].at(1), entries["rope"].at(1)) for name in names])
    found = [
        (method.word, method.adjusted_p, name)
        for name, (_, method) in zip(names, verdicts, strict=True)
        if method.adjusted_p is not None
    ]
    told = []
    for word, group in itertools.groupby(sorted(found), key=lambda one: one[0]):
        told.append(f"{word.capitalize()}: {', '.join(f'`{name}` (p = {p:.2g})' for _, p, name in group)}.")
    return " ".join([*told, f"The other {len(names) - len(found)} entries have too few seeds."])


def memory_over_nope(length: int = 16384) -> dict[str, str]:
    """Return by encoding the peak memory of one attention with gradients over NoPE's, each above that at 64 tokens."""
    rows = {row["encoding"]: row["bytes"] for row in summarise(REPORTS["memory"]) if row["kind"] == "gradient"}
    return {name: f"{sizes[length] / rows['nope'][length]:.1f}" for name, sizes in rows.items()}


def costs(entries: dict[str, Entry]) -> str:
    """Return the table of costs, each over NoPE's in the same report."""
    at_64 = over_nope(load("leaderboard", file="steps.jsonl"))
    at_512 = over_nope((REPORTS["train_512_v2"], REPORTS["train_512"]))
    decoding = over_nope((report for name, report in REPORTS.items() if name.startswith("decode")), "cached")
    memory, least = memory_over_nope(), entries["rope"].runs[0]["num_params"]
    body = [
        [
            link(name), at_64.get(name, "-"), at_512.get(name, "-"), decoding.get(name, "-"), memory.get(name, "-"),
            f"{entries[name].runs[0]['num_params'] / least - 1:+.1%}",
        ]
        for name in SHOWN
    ]  # fmt: skip
    return markdown(["encoding", "step, L = 64", "step, L = 512", "decoding", "memory", "parameters"], body)


def rates(entries: dict[str, Entry]) -> str:
    """Return what other multipliers of the position parameters' rate cost at L, in nats, at 2 M bytes and 4e-3."""
    cells = {}
    for study in ("recipe", "leaderboard"):
        for tried, losses in cells_of(records(study)).items():
            if tried.rate == 4e-3:
                cells[tried.encoding, tried.multiplier] = statistics.fmean(losses)
    body = []
    for name in SHOWN:
        own = multiplier(entries[name].runs[0])
        if not own.endswith(" x") or " and " in own:
            continue
        here = {m: loss for (encoding, m), loss in cells.items() if encoding == name}
        costs = (f"{here[m] - here[float(own[:-2])]:+.3f}" if m in here else "-" for m in (0.1, 1, 3, 10, 30))
        body.append([link(name), own, *costs])
    return markdown(["encoding", "class", "x 0.1", "x 1", "x 3", "x 10", "x 30"], body)


def settings() -> str:
    """Return perplexity at L and R_16 of the encodings that were run in other settings too."""
    parts = (("leaderboard", "cells"), ("recipe", "without"), ("recipe", "budget"), ("quick", None))
    found, body = [by_setting(load(*part)) for part in parts], []
    for name in ("t5", "shaw", "transformer_xl", "rope", "alibi", "sinusoidal", "nope"):
        each = [Seeds(runs[name]) if name in runs else None for runs in found]
        pairs = ((one.values("ppl"), one.ratios(16)) if one else () for one in each)
        body.append([link(name), *(", ".join(f"{statistics.fmean(one):.2f}" for one in pair) or "-" for pair in pairs)])
    return markdown(["encoding", "the table above", "base rate 2e-3, x 1", "20 M bytes", "Python source"], body)


def second_text() -> str:
    """Return the losses of the runs on Python source, of one seed: intervals over text alone."""
    entries, body = entries_of(load("leaderboard", "source")), []
    for name, entry in sorted(entries.items(), key=lambda one: one[1].values("ppl")[0]):
        pairs = (entry.at(1), entries["rope"].at(1)), (entry.at(16), entry.at(1))
        over, at_16 = (judged(*pair).removesuffix(", one seed") for pair in pairs)
        body.append([link(name), f"{entry.values('ppl')[0]:.3f}", "-" if name == "rope" else over, at_16, rise(entry)])
    return markdown(["encoding", "PPL at L", "over RoPE's", "R_16", "far context"], body)


def bases() -> str:
    """Return R_k of RoPE alone by its base, over the seeds of the variants."""
    found = by_setting(load("variants"))
    names = {"100": "rope(base=100)", "10,000": "rope", "1,000,000": "rope(base=1000000)"}
    body = [[base, *(cell(Seeds(found[name]).ratios(k)) for k in (1.5, 2, 16))] for base, name in names.items()]
    return markdown(["RoPE's base", "R_1.5", "R_2", "R_16"], body)


Study = dict[tuple[str, str], Entry]


def recall(entries: dict[str, Entry]) -> str:
    """Return the right answers of the ten to items beyond L, by their R_16 on text."""
    cells = tasks.read_cells(load("tasks", "cells"))
    columns = [(task, k) for task in tasks.tasks_in(cells) if task != "binary_majority" for k in tasks.FACTORS]
    body = []
    for name in sorted(cells, key=lambda name: (name in UNDEFINED, SHOWN.index(name))):
        answers = (tasks.answers_text(cells[name][task], k) for task, k in columns)
        body.append([link(name), entries[name].ratio(16), *answers])
    heads = (f"{tasks.short_name(task).replace('_', ' ')}, {length_name(k)}" for task, k in columns)
    return markdown(["encoding", "R_16 on text", *heads], body)


def load_study() -> Study:
    """Return the rows of the study of the ten by encoding and protocol."""
    found = by_setting(load(STUDY, "study"))
    return {(name, rule): Entry(runs, rule) for name, runs in found.items() for rule in (WINDOWS, SLIDING)}


def protocols(study: Study) -> str:
    """Return R_16 under both protocols: of every seed that has both."""
    body = []
    for name in ("transformer_xl", "alibi", "t5", "shaw", "deberta", "rope", "sinusoidal"):
        cells = []
        for protocol in (WINDOWS, SLIDING):
            count = len(study[name, SLIDING].at(1))
            pair = [study[name, protocol].at(k)[:count] for k in (16, 1)]
            cells.append(judged(*pair, paired=True).removesuffix(", one seed"))
        body.append([link(name), str(count), *cells])
    return markdown(["encoding", "seeds", "R_16, non-overlapping", "R_16, sliding"], body)


def pairs(study: Study) -> str:
    """Return comparisons of two encodings whose ratio depends on the protocol."""
    body = []
    for a, b, k in (("deberta", "shaw", 2), ("shaw", "transformer_xl", 16)):
        cells = [judged(*(study[name, protocol].at(k)[:3] for name in (a, b))) for protocol in (WINDOWS, SLIDING)]
        body.append([f"`{a}` over `{b}`", f"{k} L", *cells])
    for a, b, k in (("nope", "rope", 2), ("rope", "sinusoidal", 16)):
        one, other = study[a, WINDOWS], study[b, WINDOWS]
        windows = ratio_text(*(difference(one, k, other, k) or (0, 0)))
        gaps = [x - y for x, y in zip(far(one, k // 2), far(other, k // 2), strict=True)]
        each = ", ".join(f"{math.exp(gap):.2f}" for gap in gaps)
        body.append([f"`{a}` over `{b}`", f"{k} L", windows, f"far half, five seeds: {each}"])
    return markdown(["perplexity", "windows", "non-overlapping", "sliding, or far half"], body)


def same_encoding(entries: dict[str, Entry], factor: int) -> str:
    """Count the pairs of seeds of one encoding whose interval over text excludes "no difference"."""
    found = []
    for entry in entries.values():
        if entry.is_defined(factor):
            for pair in itertools.combinations(entry.at(factor), 2):
                gap = loss_difference(*([row] for row in pair))
                found.append(abs(gap.mean) > gap.half)
    return f"{sum(found)} of {len(found)} pairs at {length_name(factor)}"


def one_seed(entries: dict[str, Entry]) -> str:
    """Count the pairs of encodings that three seeds do not order alike at L, by the size of their difference."""
    bounds = (0, 0.005, 0.01, 0.02, math.inf)
    found: dict[int, list[bool]] = {n: [] for n in range(4)}
    for a, b in itertools.combinations(entries.values(), 2):
        gaps = [x - y for x, y in zip(a.values("nll")[:3], b.values("nll")[:3], strict=True)]
        size = abs(statistics.fmean(gaps))
        found[sum(size >= bound for bound in bounds[1:])].append(min(gaps) < 0 < max(gaps))
    names = ("below 0.5 %", "0.5 to 1 %", "1 to 2 %", "above 2 %")
    body = [
        [name, str(len(f)), str(sum(f)), f"{sum(f) / len(f):.0%}"]
        for name, f in zip(names, found.values(), strict=True)
    ]
    return markdown(["difference of the means", "pairs", "seeds disagree", "share"], body)


def small_samples(study: Study, blocks: int = 20, draws: int = 20000) -> str:
    """Return how often samples of 20 blocks of 256 targets name the wrong winner at L, on other or equal targets."""
    random, body = np.random.default_rng(0), []
    for a, b in (("t5", "alibi"), ("t5", "rope"), ("t5", "transformer_xl"), ("t5", "shaw")):
        sums = [mean_blocks(study[name, WINDOWS].at(1)[:3])[0] / 256 for name in (a, b)]
        totals = [np.concatenate([[0], np.cumsum(one)]) for one in sums]
        # A stretch has 32 blocks; a sample lies in one stretch.
        places = random.integers(0, 32, (2, draws)) * 32 + random.integers(0, 33 - blocks, (2, draws))
        means = [[(one[place + blocks] - one[place]) / blocks for place in places] for one in totals]
        truth = float((sums[0] - sums[1]).mean())
        wrong = [float(np.mean((means[0][0] - means[1][other]) * truth < 0)) for other in (1, 0)]
        body.append([f"`{a}`, `{b}`", f"{math.exp(truth):.3f}", *(f"{share:.0%}" for share in wrong)])
    return markdown(["encodings", "ratio, all targets", "wrong, other targets", "wrong, same targets"], body)


def position_rates() -> str:
    """Return T5's loss at L, in nats at 2 M bytes, beside RoPE's and ALiBi's, by base rate and multiplier."""
    cells = {cell: statistics.fmean(losses) for cell, losses in cells_of(records("recipe")).items()}
    body = []
    for rate in (1e-3, 2e-3, 4e-3):
        at = {(c.encoding, c.multiplier): loss for c, loss in cells.items() if c.rate == rate}
        row = [at["t5", m] for m in (1, 3, 10, 30)] + [at["rope", 1], at["alibi", 1]]
        body.append([f"{rate:g}", *(f"{loss:.3f}" for loss in row)])
    return markdown(["base rate", "T5 x 1", "x 3", "x 10", "x 30", "RoPE", "ALiBi"], body)


def main(words: Sequence[str]) -> None:
    """Print the tables and sentences of one page."""
    entries = entries_of(load("leaderboard", "cells"))
    match words:
        case ["choose"]:
            parts = (lasting, corrected, failing, costs, rates)
            print(*(part(entries) for part in parts), settings(), second_text(), bases(), recall(entries), sep="\n\n")
        case ["compare"]:
            study = load_study()
            print(protocols(study), pairs(study), small_samples(study), one_seed(entries), sep="\n\n")
            print("", same_encoding(entries, 1), same_encoding(entries, 8), "", position_rates(), sep="\n")
        case _:
            raise SystemExit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
