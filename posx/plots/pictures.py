"""Pictures of the encodings themselves, computed from their own code: what each does to a pair of positions.

Distances and positions in tokens, biases in logits (before the softmax).
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from posx.plots import look

_HEADS = 8
_MOST_ROWS = 256  # of an image
_HEAD_COLORS = ("#332288", "#0072B2", "#56B4E9", "#009E73", "#8A8A1F", "#E69F00", "#D55E00", "#882255")


def rope_bound(head_dim: int, distances: np.ndarray, base: float = 10000.0) -> np.ndarray:
    """RoFormer's bound on RoPE's decay with distance r: (2/d) sum_{c=1}^{d/2} |S_c|, S_c = sum_{i<c} exp(i r theta_i).

    Su et al. 2021 (arXiv 2104.09864), section 3.4.3; at r = 0 it is (d/2 + 1) / 2.
    """
    theta = base ** (-2.0 * np.arange(head_dim // 2) / head_dim)
    partial = np.cumsum(np.exp(1j * np.asarray(distances, np.float64)[:, None] * theta), axis=1)
    return np.asarray(np.abs(partial).mean(axis=1))


def encodings(train_len: int, t5_params: dict[str, Any] | None = None, t5: Any = "t5") -> Figure:
    """Eight panels: sinusoidal, RoPE, ALiBi, T5 (`t5` a spec, `t5_params` its learned arrays; else as initialised)."""
    from posx.encodings import Dims

    dims = Dims(model_dim=64, num_heads=_HEADS, head_dim=8, num_layers=1, train_len=train_len)
    made = look.figure(16.0, 7.4)
    grid = {"left": look.MARGIN, "right": 0.98, "top": 0.95, "bottom": 0.08, "wspace": 0.42, "hspace": 0.38}
    (heat, dots, decay, stairs), (slopes, alibi_image, table, t5_image) = made.subplots(2, 4, gridspec_kw=grid)
    _sinusoidal(heat, dots, dims, min(2 * train_len, _MOST_ROWS))
    _rope(decay)
    distances = np.arange(2 * train_len + 1)
    alibi, learned = _curve("alibi", dims, distances), _curve(t5, dims, distances, t5_params)
    _heads(slopes, distances, alibi, train_len, f"ALiBi: bias per head (H = {len(alibi)})")
    _heads(
        table,
        distances,
        learned,
        train_len,
        f"T5: bias per head ({'random table' if t5_params is None else 'trained'})",
    )
    published = {"name": "t5", "num_buckets": 32, "max_distance": 128}
    _stairs(stairs, dims, distances, {"as drawn below": t5, "32 buckets to 128": published})
    _image(alibi_image, alibi[_HEADS // 2 - 1], f"ALiBi: bias, head {_HEADS // 2}")
    _image(t5_image, learned[0], "T5: bias, head 1")
    text = f"Computed from the encodings; dashed: L = {train_len}; positions and distances in tokens, biases in logits"
    look.headings(made, "What the encodings add", [text], lift=0.02)
    return made


def _curve(spec: Any, dims: Any, distances: np.ndarray, params: dict[str, Any] | None = None) -> np.ndarray:
    """Bias [head, distance] of a distance-only encoding, for distances >= 0."""
    import jax

    from posx.encodings import build

    encoding = build(spec, dims)
    arrays = encoding.init(jax.random.key(0), dims) if params is None else params
    return np.asarray(encoding.curve(arrays, jax.numpy.asarray(distances, "float32")))


def _sinusoidal(heat: Axes, dots: Axes, dims: Any, length: int) -> None:
    """PE(p) [position, channel], and the inner products PE(p) . PE(q), which depend on p - q only."""
    import jax.numpy as jnp

    from posx.encodings import build

    nothing, pos = jnp.zeros((length, dims.model_dim), jnp.float32), jnp.arange(length, dtype=jnp.int32)
    values = np.asarray(build("sinusoidal", dims).embed({}, nothing, pos))
    _show(heat, values, "RdBu_r", "Sinusoidal: what is added", "channel", "position", limit=1.0)
    _show(dots, values @ values.T, "cividis", "Sinusoidal: PE(p) · PE(q)", "position q", "position p")


def _show(ax: Axes, values: np.ndarray, colors: str, title: str, x: str, y: str, limit: float | None = None) -> None:
    """A matrix as an image with its colour bar; `limit` makes the colours symmetric about 0."""
    low = None if limit is None else -limit
    image = ax.imshow(values, cmap=colors, aspect="auto", interpolation="nearest", vmin=low, vmax=limit)
    ax.set(title=title, xlabel=x, ylabel=y)
    ax.grid(False)
    bar = ax.figure.colorbar(image, ax=ax, fraction=0.05, pad=0.03)
    bar.outline.set_visible(False)
    bar.locator = MaxNLocator(5)
    bar.ax.tick_params(labelsize=8.5)


def _rope(ax: Axes) -> None:
    distances = np.arange(0, 257)
    for head_dim, dashes in ((64, "-"), (128, (0, (5, 2)))):
        bound = rope_bound(head_dim, distances)
        ax.plot(distances, bound, color=look.look("rope").color, linestyle=dashes, label=f"d = {head_dim}")
    ax.set(title="RoPE: bound on q·k by distance", xlabel="distance r = i - j", ylabel="(2/d) Σ |S_c|")
    ax.set_ylim(bottom=0.0)
    ax.legend(loc="upper right")


def _heads(ax: Axes, distances: np.ndarray, bias: np.ndarray, train_len: int, title: str) -> None:
    """One curve per head, its number (from 1) at its right end."""
    colors = [_HEAD_COLORS[head % len(_HEAD_COLORS)] for head in range(len(bias))]
    for values, color in zip(bias, colors, strict=True):
        ax.plot(distances, values, color=color, linewidth=1.4)
    low, high = ax.get_ylim()
    heights = _spread([float(values[-1]) for values in bias], 0.05 * (high - low))
    for head, (height, color) in enumerate(zip(heights, colors, strict=True)):
        ax.text(1.01, height, f"{head + 1}", transform=ax.get_yaxis_transform(), va="center", size=8.5, color=color)
    ax.set_ylim(min(low, *heights), max(high, *heights))
    ax.set_xlim(0, distances[-1])
    _mark(ax, train_len)
    ax.set(title=title, xlabel="distance r = i - j", ylabel="bias")


def _stairs(ax: Axes, dims: Any, distances: np.ndarray, specs: dict[str, Any]) -> None:
    """T5's bucket of each distance, for several settings."""
    import jax.numpy as jnp

    from posx.encodings import build

    for (name, spec), dashes in zip(specs.items(), ("-", (0, (3, 1.5))), strict=True):
        encoding: Any = build(spec, dims)
        bucket = np.asarray(encoding.bucket(jnp.asarray(distances, jnp.float32)))
        ax.step(distances, bucket, where="mid", color=look.look("t5").color, linestyle=dashes, label=name)
    _mark(ax, dims.train_len)
    ax.set(title="T5: bucket of a distance", xlabel="distance r = i - j", ylabel="bucket index")
    ax.legend(loc="lower right")


def _mark(ax: Axes, train_len: int) -> None:
    ax.axvline(train_len, color="#888888", linewidth=1.0, dashes=(4, 3), zorder=1)


def _image(ax: Axes, curve: np.ndarray, title: str) -> None:
    """A causal bias matrix [query, key] from its curve over distances; what a query cannot see stays white."""
    length = min((len(curve) - 1) // 2, _MOST_ROWS)
    distance = np.arange(length)[:, None] - np.arange(length)[None, :]
    _show(ax, np.where(distance >= 0, curve[np.maximum(distance, 0)], np.nan), "cividis", title, "key j", "query i")


def _spread(values: Sequence[float], gap: float) -> list[float]:
    """The same heights in the same order, moved apart until no two are closer than `gap` (for labels at line ends)."""
    order = sorted(range(len(values)), key=lambda index: values[index])
    groups: list[list[int]] = []  # neighbours that touch, each laid out around its members' mean
    for index in order:
        groups.append([index])
        while (
            len(groups) > 1
            and _middle(groups[-1], values) - _middle(groups[-2], values)
            < gap * (len(groups[-1]) + len(groups[-2])) / 2
        ):
            groups[-2:] = [groups[-2] + groups[-1]]
    placed = list(values)
    for group in groups:
        for place, index in enumerate(group):
            placed[index] = _middle(group, values) + gap * (place - (len(group) - 1) / 2)
    return placed


def _middle(group: Sequence[int], values: Sequence[float]) -> float:
    return sum(values[index] for index in group) / len(group)
