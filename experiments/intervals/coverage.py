"""Measure how often posx's 95 % intervals over text cover the true value, on simulated text and on trained models.

    python experiments/intervals/coverage.py                # simulated: a minute
    python experiments/intervals/coverage.py seeds          # differences between runs of several seeds: 5 minutes
    python experiments/intervals/coverage.py RUN_FOLDER     # trained: rows of the whole stream, see the README

Simulated losses are exp(0.6 z), right-skewed as losses are. z is a Gaussian AR(1) process over targets, whose
correlation falls by e within the correlation length. No white noise is added, which makes the case hard. Prints
Markdown.
"""

import itertools
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from scipy.special import stdtr

from posx.evaluation.differences import SIGNIFICANCE, holm, loss_difference, rise_difference
from posx.evaluation.statistics import BLOCK_LEN, half_width
from posx.lab.results.table import read_results

SKEW = 0.6
#: Targets, correlation length, stretch length (0: one stretch).
CASES = [
    (262144, 50, 0), (262144, 500, 0), (262144, 2000, 0), (65536, 50, 0), (65536, 500, 0),
    (262144, 2000, 8192), (65536, 500, 2048), (65536, 2000, 2048), (32768, 2000, 1024),
    (65536, 2000, 0), (32768, 2000, 0), (16384, 500, 0), (16384, 2000, 0), (8192, 50, 0), (8192, 500, 0), (4096, 50, 0),
]  # fmt: skip


def simulate(targets: int, length: float, stretch: int, texts: int, rng: np.random.Generator) -> np.ndarray:
    """Return sums of losses over blocks, less their expectation, [texts, blocks]. Stretches are independent.

    If neighbours are nearly equal, only every step-th target is drawn.
    """
    step = max(1, min(32, int(length / 25)))
    slope = math.exp(-step / length)
    noise, decay = np.float32(math.sqrt(1 - slope**2)), np.float32(slope)
    sums = np.empty((texts, targets // BLOCK_LEN))
    for block in range(targets // BLOCK_LEN):
        if block * BLOCK_LEN % (stretch or targets) == 0:
            state = rng.standard_normal(texts, np.float32)
        losses = np.zeros(texts, np.float32)
        for shock in rng.standard_normal((BLOCK_LEN // step, texts), np.float32) * noise:
            state = decay * state + shock
            losses += np.exp(SKEW * state)
        sums[:, block] = losses / (BLOCK_LEN // step) * BLOCK_LEN
    return sums - math.exp(SKEW**2 / 2) * BLOCK_LEN


def coverage(series: np.ndarray) -> tuple[float, float, float]:
    """Return three shares of texts [n, blocks] with true mean 0: with an interval, of these covered, of all misled."""
    counts = np.full(series.shape[1], BLOCK_LEN)
    halves = [half_width(sums, counts) for sums in series]
    given = np.array([half is not None for half in halves])
    right = np.abs(series.mean(axis=1) / BLOCK_LEN) <= np.array([half or 0.0 for half in halves])
    return float(given.mean()), float(right[given].mean()) if given.any() else math.nan, float((given & ~right).mean())


def independent_blocks(series: np.ndarray, merged: int = 4) -> float:
    """Return the coverage if blocks of 1024 targets are taken as independent."""
    blocks = series.reshape(len(series), -1, merged).sum(axis=2)
    half = 1.96 * blocks.std(axis=1, ddof=1) / math.sqrt(blocks.shape[1])
    return float((np.abs(blocks.mean(axis=1)) <= half).mean())


def simulated(texts: int = 4000) -> Iterator[str]:
    """Yield the lines of the table of simulated texts."""
    rng = np.random.default_rng(0)
    yield "| targets | correlation length | stretches | given | cover | given and wrong | independent blocks cover |"
    yield "|---:|---:|---:|---:|---:|---:|---:|"
    for targets, length, stretch in CASES:
        series = simulate(targets, length, stretch, texts, rng)
        given, cover, wrong = coverage(series)
        what = f"{targets:,} | {length:,} | {targets // stretch if stretch else 1}"
        shares = f"{given:.0%} | {f'{cover:.1%}' if given else '-'} | {wrong:.1%} | {independent_blocks(series):.0%}"
        yield f"| {what} | {shares} |"


#: Effects of a seed, with mean 0 and variance 1: without tails, with heavy tails (Student's t of 3), one-sided.
EFFECTS: dict[str, Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]] = {
    "normal": lambda rng, shape: rng.standard_normal(shape),
    "heavy tails": lambda rng, shape: rng.standard_t(3, shape) / math.sqrt(3),
    "skewed": lambda rng, shape: rng.exponential(1, shape) - 1,
    "skewed, of one run": lambda rng, shape: rng.exponential(1, shape) - 1,
}
#: The standard deviation of a seed's effect on a difference, over that of the mean over the text.
SPREADS = {"text only": 0.0, "equal": 1.0, "seeds mostly": 10.0}


def of_seeds(seeds: int, effect: str, spread: str, calls: int, rng: np.random.Generator) -> dict[str, float]:
    """Return how often the intervals of a difference cover its true value, 0, by the source that they are for.

    Two runs share an effect of their seed, and have one each that is their own. Keys: "seeds" (paired, for this text),
    "text" (these runs), "both" (paired), "unpaired" (both, as if the seeds were others), "R_k" (both, of rises from L
    to kL).
    """
    counts, blocks = np.full(256, BLOCK_LEN), 256
    text = simulate(blocks * BLOCK_LEN, 500, 2048, 4 * calls, rng).reshape(4, calls, blocks) / BLOCK_LEN
    deviation = float(text.mean(axis=2).std())
    draw = EFFECTS[effect]
    common = deviation * draw(rng, (calls, seeds)) * 3
    own = deviation * SPREADS[spread] * draw(rng, (4, calls, seeds)) / math.sqrt(2)
    if effect.endswith("of one run"):
        own *= math.sqrt(2) * np.array([1, 0, 1, 0])[:, None, None]
    noise = 0.05 * rng.standard_normal((4, calls, seeds, blocks))  # of one seed at one passage
    effects = common + own
    hits: dict[str, list[bool]] = {name: [] for name in ("seeds", "text", "both", "unpaired", "R_k")}
    for n in range(calls):
        far_a, far_b, near_a, near_b = (
            [row_of(text[m, n] + effects[m, n, seed] + noise[m, n, seed], counts) for seed in range(seeds)]
            for m in range(4)
        )
        found = loss_difference(far_a, far_b, paired=True)
        rise = rise_difference(
            *(list(zip(*sides, strict=True)) for sides in ((far_a, near_a), (far_b, near_b))), paired=True
        )
        if found.over_text is None or rise.over_text is None or found.over_seeds is None:
            continue
        here = float((text[0, n] - text[1, n]).mean())  # the true value of new seeds on this text
        these = float((effects[0, n] - effects[1, n]).mean())  # that of these runs on all text
        hits["seeds"].append(abs(found.mean - here) <= found.over_seeds)
        hits["text"].append(abs(found.mean - these) <= found.over_text)
        hits["both"].append(abs(found.mean) <= found.half)
        hits["unpaired"].append(abs(found.mean) <= loss_difference(far_a, far_b).half)
        hits["R_k"].append(abs(rise.mean) <= rise.half)
    return {name: float(np.mean(found)) for name, found in hits.items()}


def row_of(losses: np.ndarray, counts: np.ndarray) -> dict[str, Any]:
    facts = {"targets": "t", "block_len": BLOCK_LEN, "num_targets": int(counts.sum())}
    return facts | {"block_nll": (losses * counts).tolist(), "nll": float(losses.mean())}


def seeds_table(calls: int = 2000) -> Iterator[str]:
    """Yield the lines of the table of differences between runs of several seeds."""
    yield "| effects of seeds | their size | seeds | over seeds | over text | both | both, unpaired | R_k, both |"
    yield "|---|---|---:|---:|---:|---:|---:|---:|"
    for n, effect in enumerate(EFFECTS):
        for spread in SPREADS:
            for seeds in (2, 3, 5):
                found = of_seeds(seeds, effect, spread, calls, np.random.default_rng([n, seeds]))
                yield f"| {effect} | {spread} | {seeds} | " + " | ".join(f"{one:.1%}" for one in found.values()) + " |"


def family(runs: int = 6, places: int = 8, calls: int = 1000) -> Iterator[str]:
    """Yield how often a call that compares equal runs has a wrong verdict, without and with Holm's correction.

    The effects of a seed at two places have a correlation of 0.9.
    """
    for seeds in (3, 5):
        rng, wrong = np.random.default_rng(0), np.zeros(2)
        for _ in range(calls):
            shared, own = rng.standard_normal((runs, seeds, 1)), rng.standard_normal((runs, seeds, places))
            effects = math.sqrt(0.9) * shared + math.sqrt(0.1) * own
            gaps = np.concatenate([a - b for a, b in itertools.combinations(effects, 2)], axis=1)
            size = np.abs(gaps.mean(axis=0)) / (gaps.std(axis=0, ddof=1) / math.sqrt(seeds))
            chances = (2 * stdtr(seeds - 1, -size)).tolist()
            wrong += min(chances) < SIGNIFICANCE, min(holm(chances)) < SIGNIFICANCE
        alone, corrected = wrong / calls
        yield f"{runs} equal runs, {places} places, {seeds} seeds: {alone:.0%} alone, {corrected:.1%} with Holm"


def real(folder: Path, texts: int = 2000) -> Iterator[str]:
    """Yield the coverage of the whole stream's value by its samples, for losses and differences between lengths."""
    rows = read_results(folder).query("left_out == '' and status == 'ok' and num_stretches == 1")
    rows = rows[rows.protocol != "sliding"]
    places = zip(rows.run_id, rows.eval_len, rows.block_nll, strict=True)
    series = {(run, length): np.array(blocks[:-1]) for run, length, blocks in places}
    runs = sorted({run for run, _ in series})
    short, long = (choose(length for _, length in series) for choose in (min, max))
    judged = {f"{run}: loss at {short}": series[run, short] for run in runs}
    judged |= {f"{run}: {long} against {short}": series[run, long] - series[run, short] for run in runs}
    judged |= {f"{a} against {runs[0]} at {short}": series[a, short] - series[runs[0], short] for a in runs[1:]}
    rng = np.random.default_rng(0)
    yield "| judged | 65,536 in 32 stretches | 262,144 in 32 stretches | 65,536 in a row | 262,144 in a row |"
    yield "|---|---:|---:|---:|---:|"
    for name, blocks in judged.items():
        blocks = blocks - blocks.mean()
        cells = []
        for stretches in (32, 1):
            for targets in (65536, 262144):
                given, cover, _ = coverage(sample(blocks, targets // BLOCK_LEN, stretches, texts, rng))
                cells.append(f"{cover:.1%}" + (f" of {given:.0%}" if given < 1 else ""))
        yield f"| {name} | " + " | ".join(cells) + " |"


def sample(blocks: np.ndarray, size: int, stretches: int, texts: int, rng: np.random.Generator) -> np.ndarray:
    """Return blocks [texts, size] of evenly spread stretches, each text with another start."""
    share, each = len(blocks) // stretches, size // stretches
    starts = rng.integers(0, share - each + 1, texts)[:, None] + share * np.arange(stretches)
    return blocks[(starts[:, :, None] + np.arange(each)).reshape(texts, size)]


if __name__ == "__main__":
    match sys.argv[1:]:
        case []:
            print("\n".join(simulated()))
        case ["seeds"]:
            for line in itertools.chain(seeds_table(), family()):
                print(line, flush=True)
        case [folder]:
            print("\n".join(real(Path(folder))))
        case _:
            raise SystemExit(__doc__)
