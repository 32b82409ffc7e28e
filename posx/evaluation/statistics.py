"""Uncertainty from blocks of text: tokens next to each other are not independent, long blocks nearly are."""

from __future__ import annotations

import numpy as np


def block_sums(values: np.ndarray, block: int) -> tuple[np.ndarray, np.ndarray]:
    """Sums and counts of `values` [n] over consecutive blocks of `block` targets; the last may be shorter."""
    starts = np.arange(0, len(values), block)
    sums = np.add.reduceat(values.astype(np.float64), starts)
    return sums, np.minimum(block, len(values) - starts)


def standard_error(sums: np.ndarray, counts: np.ndarray) -> float | None:
    """Standard error (nats/token) of sum(sums) / sum(counts), blocks taken as independent; None for one block."""
    n = len(sums)
    if n < 2:
        return None
    residuals = sums - sums.sum() / counts.sum() * counts
    return float(np.sqrt(n / (n - 1) * (residuals**2).sum()) / counts.sum())


def paired_ratio(
    sums_a: np.ndarray, sums_b: np.ndarray, counts: np.ndarray, *, seed: int = 0, resamples: int = 2000
) -> tuple[float, float, float]:
    """Perplexity ratio a / b on the same targets and its 95 % interval, by a bootstrap over common blocks.

    sums_a, sums_b, counts: [n] per block. Each resample draws n blocks and takes both models on the same draw, so that
    what a hard passage does to both cancels.
    """
    difference = np.asarray(sums_a, np.float64) - np.asarray(sums_b, np.float64)
    counts = np.asarray(counts, np.float64)
    draws = np.random.default_rng(seed).integers(0, len(counts), (resamples, len(counts)))
    ratios = difference[draws].sum(axis=1) / counts[draws].sum(axis=1)
    low, high = np.quantile(ratios, (0.025, 0.975))
    return float(np.exp(difference.sum() / counts.sum())), float(np.exp(low)), float(np.exp(high))
