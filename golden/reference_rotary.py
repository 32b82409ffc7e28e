"""Encodings that change vectors by their tokens or by other vectors, in float64 NumPy loops; see `reference`.

A reference is a function (encoding, params, x [t, m], project, pos [t], visible [t, t]) -> outputs [t, h, d].
"""

import math

import numpy as np

from golden import reference


def key_offset(encoding, params, x, project, pos, visible):
    return with_offset(encoding, "nope", None, x, project, pos, visible)


def key_offset_rope(encoding, params, x, project, pos, visible):
    return with_offset(encoding.parts[0], "rope", encoding.parts[1], x, project, pos, visible)


def with_offset(encoding, name, other, x, project, pos, visible):
    """Return the outputs of `other` for keys with last channels of the token that each key sees before itself."""
    q, k, v = project(x)
    moved = k.copy()
    for t, row in enumerate(visible):
        before = np.flatnonzero(row[:t])
        for c in range(k.shape[-1]):
            if c >= k.shape[-1] * (1 - encoding.share):
                moved[t, :, c] = k[before[-1], :, c] if len(before) else 0.0
    return reference.reference(name, other, {}, q, moved, v, pos.tolist(), pos.tolist(), visible)


def canon(encoding, params, x, project, pos, visible):
    return with_canon(params, "nope", None, project(x), pos, visible)


def canon_rope(encoding, params, x, project, pos, visible):
    own = {name.removeprefix("0."): a for name, a in params.items()}
    return with_canon(own, "rope", encoding.parts[1], project(x), pos, visible)


def with_canon(params, name, other, projected, pos, visible):
    """Return the outputs of `other` for vectors plus those of earlier tokens of the document, times their numbers."""
    mixed = [
        np.stack([
            vectors[t] + sum(a * vectors[s] for a, s in zip(params[hook], np.flatnonzero(row[: t + 1])[::-1]))  # noqa: B905
            for t, row in enumerate(visible)
        ])
        for hook, vectors in zip(("query", "key", "value"), projected, strict=True)
    ]  # fmt: skip
    return reference.reference(name, other, {}, *mixed, pos.tolist(), pos.tolist(), visible)


def rotated(turn, q, k, v, visible, values=False):
    """Return outputs if plane c of query i is rotated by turn(i, j, h, c) relative to key j, and to value j too.

    Planes are complex numbers of channels c and c + d/2.
    """
    (_, heads, width), group = q.shape, q.shape[1] // k.shape[1]
    o, half = np.zeros((*q.shape[:2], v.shape[-1])), width // 2
    for i, h in np.ndindex(len(q), heads):
        seen = np.flatnonzero(visible[i])
        logits, moved = [], []
        for j in seen:
            turns = np.exp(1j * np.array([turn(i, j, h, c) for c in range(half)]))
            left, right = (x[:half] + 1j * x[half:] for x in (q[i, h], k[j, h // group]))
            logits.append((left * right.conj() * turns).real.sum() / math.sqrt(width))
            value = v[j, h // group]
            if values:
                plane = (value[:half] + 1j * value[half:]) * turns.conj()
                value = np.concatenate([plane.real, plane.imag])
            moved.append(value)
        w = np.exp(logits)
        for weight, value in zip(w / w.sum(), moved, strict=True):
            o[i, h] += weight * value
    return o


def along(steps, base, q, k, v, visible, values=False):
    """Return outputs if plane c of each token makes steps [t, g, c] times base^(-2c/d)."""
    group, width = q.shape[1] // k.shape[1], q.shape[-1]

    def turn(i, j, h, c):
        between = [t for t in np.flatnonzero(visible[i]) if min(i, j) < t <= max(i, j)]
        way = sum(steps[t, h // group, c] for t in between) * base ** (-2 * c / width)
        return way if j < i else -way

    return rotated(turn, q, k, v, visible, values)


def selective_rope(encoding, params, x, project, pos, visible):
    phi = np.array([selected(encoding, params, x, row[: t + 1]) for t, row in enumerate(visible)])
    return along(phi, encoding.base, *project(x), visible)


def accumulated_rope(encoding, params, x, project, pos, visible, values=False):
    return along(steps(params, x), encoding.base, *project(x), visible, values)


def steps(params, x):
    """Return the steps [t, g, c]."""
    return np.stack([np.tensordot(token, params["steps"], 1) for token in x])


def rotated_values(encoding, params, x, project, pos, visible):
    base = encoding.base
    if type(base).__name__ == "AccumulatedRope":
        own = {name.removeprefix("base."): a for name, a in params.items()}
        return accumulated_rope(base, own, x, project, pos, visible, values=True)

    def turn(i, j, h, c):
        return (pos[i] - pos[j]) * base.base ** (-2 * c / base.rotary_dim)

    return rotated(turn, *project(x), visible, values=True)


def selected(encoding, params, x, row):
    """Return phi [g, c] of the last token that a row of `visible` shows."""

    def unit(token):
        slices = token.reshape(encoding.num_heads, -1)
        return np.concatenate([s / math.sqrt(s @ s + 1e-6) for s in slices])

    seen = np.flatnonzero(row)[::-1]
    phi = 0 * params["kernel"][0]
    for n, t in enumerate(seen[: encoding.kernel]):
        phi = phi + params["kernel"][n] * np.tensordot(unit(x[t]) @ params["down"], params["up"], 1)
    if encoding.drift:
        phi = phi + np.exp(params["drift"])
    if encoding.gated and len(seen):
        phi = phi / (1 + np.exp(-(unit(x[seen[0]]) @ params["gate"] + params["gate_bias"])))[:, None]
    return phi


def darope(encoding, params, x, project, pos, visible):
    q, k, v = project(x)
    group, width = q.shape[1] // k.shape[1], q.shape[-1]
    angles = np.array([darope_angles(encoding, params, token, p, width) for token, p in zip(x, pos, strict=True)])

    def turn(i, j, h, c):
        return angles[i, h // group, c] - angles[j, h // group, c]

    return rotated(turn, q, k, v, visible)


def darope_angles(encoding, params, token, pos, width):
    """Return the angles [g, c] of a token, by the paper's pseudocode."""
    length, eps = encoding.original_len, 1e-6
    place = min(max(pos + 0.5, eps * length), (1 - eps) * length)
    beta = math.log(place / length / (1 - place / length))
    c = length / (1 + np.exp(-(token @ params["w"] + params["alpha"] * beta)))
    thetas = [encoding.base ** (-2 * j / width) for j in range(width // 2)]
    return np.stack([pos * t + 0 * c if t >= 2 * math.pi / length else c * t for t in thetas], axis=-1)


WHOLE = {
    "darope": darope,
    "key_offset": key_offset, "key_offset+rope": key_offset_rope, "selective_rope": selective_rope,
    "accumulated_rope": accumulated_rope, "rotated_values": rotated_values,
    "canon": canon, "canon+rope": canon_rope,
}  # fmt: skip
