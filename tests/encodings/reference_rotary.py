"""Rotary encodings whose logits need more than two vectors and their positions, in float64 NumPy, from the definition:
(encoding, params, x [t, m], project, pos [t], visible [t, t]) -> outputs [t, h, d]. Nothing here imports posx."""

import math

import jax
import numpy as np

from golden import reference


def key_offset(encoding, params, x, project, pos, visible):
    return with_offset(encoding, "nope", None, x, project, pos, visible)


def key_offset_rope(encoding, params, x, project, pos, visible):
    return with_offset(encoding.parts[0], "rope", encoding.parts[1], x, project, pos, visible)


def with_offset(encoding, name, other, x, project, pos, visible):
    """What `other` gives for keys whose last channels are those of the token that each one sees before itself."""
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
    """What `other` gives for vectors with those of earlier tokens of the document added, each times its numbers."""
    mixed = [
        np.stack([
            vectors[t] + sum(a * vectors[s] for a, s in zip(params[hook], np.flatnonzero(row[: t + 1])[::-1]))  # noqa: B905
            for t, row in enumerate(visible)
        ])
        for hook, vectors in zip(("query", "key", "value"), projected, strict=True)
    ]  # fmt: skip
    return reference.reference(name, other, {}, *mixed, pos.tolist(), pos.tolist(), visible)


def rotated(turn, q, k, v, visible, values=False):
    """Outputs if plane c of query i is rotated by turn(i, j, h, c) relative to key j, and also to value j.

    Planes as complex numbers, channels c and c + d/2.
    """
    (_, heads, width), group = q.shape, q.shape[1] // k.shape[1]
    o, half = np.zeros((*q.shape[:2], v.shape[-1])), width // 2
    for i, h in np.ndindex(len(q), heads):
        seen = np.flatnonzero(visible[i])
        logits, moved = [], []
        for j in seen:
            turns = np.exp(1j * np.array([turn(i, j, h, c) for c in range(half)]))
            left, right, value = (x[:half] + 1j * x[half:] for x in (q[i, h], k[j, h // group], v[j, h // group]))
            logits.append((left * right.conj() * turns).real.sum() / math.sqrt(width))
            value = value * turns.conj()
            moved.append(np.concatenate([value.real, value.imag]) if values else v[j, h // group])
        w = np.exp(logits)
        for weight, value in zip(w / w.sum(), moved, strict=True):
            o[i, h] += weight * value
    return o


def along(steps, base, q, k, v, visible, values=False):
    """Outputs if plane c of each token makes steps [t, g, c] times base^(-2c/d)."""
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
    return along(steps(encoding, params, x, pos), encoding.base, *project(x), visible, values)


def steps(encoding, params, x, pos):
    """The steps [t, g, c]. The random ones are those that JAX draws for a position."""
    if not encoding.random:
        return np.stack([np.tensordot(token, params["steps"], 1) for token in x])
    shape = encoding.num_kv_heads, encoding.head_dim // 2
    rngs = [jax.random.fold_in(jax.random.key(0), int(p)) for p in pos]
    bits = np.stack([np.asarray(jax.random.bits(rng, shape, np.uint32)) for rng in rngs])
    return np.sqrt(3) * ((bits >> 9) + 0.5 - 2**22) / 2**22


def rotated_values(encoding, params, x, project, pos, visible):
    base = encoding.base
    if type(base).__name__ == "AccumulatedRope":
        own = {name.removeprefix("base."): a for name, a in params.items()}
        return accumulated_rope(base, own, x, project, pos, visible, values=True)

    def turn(i, j, h, c):
        return (pos[i] - pos[j]) * base.base ** (-2 * c / base.rotary_dim)

    return rotated(turn, *project(x), visible, values=True)


def selected(encoding, params, x, row):
    """phi [g, c] of the last token that a row of `visible` shows."""

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
    """Planes as complex numbers: the real part of q e^(i a_i) conj(k e^(i a_j)), a the angle of each token."""
    q, k, v = project(x)
    (_, heads, width), group = q.shape, q.shape[1] // k.shape[1]
    angles = np.array([darope_angles(encoding, params, token, p, width) for token, p in zip(x, pos, strict=True)])
    o = np.zeros((*q.shape[:2], v.shape[-1]))
    for i, h in np.ndindex(len(q), heads):
        seen = np.flatnonzero(visible[i])
        logits = []
        for j in seen:
            turns = np.exp(1j * (angles[i, h // group] - angles[j, h // group]))
            left = q[i, h, : width // 2] + 1j * q[i, h, width // 2 :]
            right = k[j, h // group, : width // 2] + 1j * k[j, h // group, width // 2 :]
            logits.append((left * turns * right.conj()).real.sum() / math.sqrt(width))
        w = np.exp(logits)
        for weight, j in zip(w / w.sum(), seen, strict=True):
            o[i, h] += weight * v[j, h // group]
    return o


def darope_angles(encoding, params, token, pos, width):
    """Angles [g, c] of a token, by the paper's pseudocode."""
    length, eps = encoding.original_len, 1e-6
    place = min(max(pos + 0.5, eps * length), (1 - eps) * length)
    beta = math.log(place / length / (1 - place / length))
    c = length / (1 + np.exp(-(token @ params["w"] + params["alpha"] * beta)))
    thetas = [encoding.base ** (-2 * j / width) for j in range(width // 2)]
    return np.stack([pos * t + 0 * c if t >= 2 * math.pi / length else c * t for t in thetas], axis=-1)


OUTPUTS = {
    "darope": darope,
    "key_offset": key_offset, "key_offset+rope": key_offset_rope, "selective_rope": selective_rope,
    "accumulated_rope": accumulated_rope, "rotated_values": rotated_values,
    "canon": canon, "canon+rope": canon_rope,
}  # fmt: skip
