"""Chains in float64 NumPy: what each part adds at its own place of the formula, taken from the part's own reference.

Nothing here imports posx. `encoding` is only read for its hyper-parameters. A part is (name, encoding, params).
"""

import math

import numpy as np

from golden import reference, reference_content, reference_rotary


def outputs(parts, x, project, pos):
    """Outputs [t, h, d] of one causal document of tokens x [t, m] at whole-number positions pos [t]."""
    for name, encoding, params in parts:
        if name in reference.EMBEDDINGS:
            rows = [reference.EMBEDDINGS[name](encoding, params, p, x.shape[1]) for p in pos]
            x = x + np.stack(rows)
    q, k, v = project(x)
    k, v = (np.repeat(vectors, q.shape[1] // k.shape[1], axis=1) for vectors in (k, v))
    tokens = Tokens(x, q, k, pos)
    for name, encoding, params in parts:
        if name in VALUES:
            v = VALUES[name](encoding, params, tokens, v)
    tau = logit_scale(parts, tokens)
    s = tau * inside(parts, tokens) / math.sqrt(q.shape[-1])
    for name, encoding, params in parts:
        if name in OUTSIDE:
            s = s + OUTSIDE[name](encoding, params, tokens)
    for name, encoding, params in parts:
        if name in SCORES:
            s = SCORES[name](encoding, params, tokens, tau, s)
    s = np.where(np.tri(len(x), dtype=bool), s, -np.inf)
    top = s.max(axis=-1, keepdims=True)
    sinks = [np.exp(SINKS[name](params)[:, None, None] - top) for name, _, params in parts if name in SINKS]
    w = np.exp(s - top)
    w = w / (w.sum(axis=-1, keepdims=True) + sum(sinks))
    o = np.einsum("hij,jhd->ihd", w, v)
    for name, encoding, params in parts:
        if name == "shaw":
            rows = [[params["values"][reference.shaw_row(encoding, i, j)] for j in pos] for i in pos]
            o = o + np.einsum("hij,ijd->ihd", w, rows)
    for name, encoding, params in reversed(parts):
        if name in OUTPUTS:
            o = OUTPUTS[name](encoding, params, tokens, o)
    return o


class Tokens:
    """Tokens x [t, m] as embedded, q and k [t, h, d] as projected, positions.

    `inside` sets `last` to the q and k that the last map was given.
    """

    def __init__(self, x, q, k, pos):
        self.x, self.q, self.k, self.pos = x, q, k, pos

    def pairs(self, of):
        """of(t, u, h), query t and key u, as [h, t, u]; 0 for keys after the query."""
        (t, h, _), found = self.q.shape, np.zeros((self.q.shape[1], len(self.q), len(self.q)))
        for head in range(h):
            for i in range(t):
                for j in range(i + 1):
                    found[head, i, j] = of(i, j, head)
        return found

    def alone(self, logits, encoding, params):
        """What a reference gives for pairs as they were projected, [h, t, t]."""
        return self.pairs(lambda i, j, h: logits(encoding, params, self.q[i, h], self.k[j, h], *self.at(i, j), h))

    def at(self, i, j):
        return self.pos[i].tolist(), self.pos[j].tolist()


def inside(parts, tokens):
    """All that is divided by the root and multiplied by logit scales, [h, t, t]."""
    q, k = tokens.q, tokens.k
    for name, encoding, params in parts:
        if name in MAPS:
            tokens.last = q, k
            q, k = MAPS[name](encoding, params, tokens, q, k)
    found = np.einsum("ihc,jhc->hijc", q, k)
    for name, encoding, _ in parts:
        if name == "xpos":
            found = found * falls(encoding, tokens.pos)
    found = found.sum(axis=-1)
    for name, encoding, params in parts:
        if name in INSIDE:
            found = found + INSIDE[name](encoding, params, tokens)
    return found


def logit_scale(parts, tokens):
    """[h, t, 1]"""
    heads, found = tokens.q.shape[1], 1.0
    for name, encoding, params in parts:
        if name in LOGIT_SCALES:
            of = LOGIT_SCALES[name]
            found = found * np.array(
                [[[of(encoding, params, tokens, t, h)] for t in range(len(tokens.x))] for h in range(heads)]
            )
    return found


# Maps of queries and keys: planes as complex numbers.


def turned(vectors, waves, layout):
    """Plane c of vectors [t, h, d] times waves [t, 1 or h, c]; the channels behind stay."""
    n = 2 * waves.shape[-1]
    places = [(2 * c, 2 * c + 1) if layout == "interleaved" else (c, c + n // 2) for c in range(n // 2)]
    found = vectors.copy()
    for c, (a, b) in enumerate(places):
        plane = (vectors[..., a] + 1j * vectors[..., b]) * waves[..., c]
        found[..., a], found[..., b] = plane.real, plane.imag
    return found


def rope(encoding, params, tokens, q, k):
    width = encoding.rotary_dim
    waves = np.exp(1j * tokens.pos[:, None, None] / encoding.base ** (np.arange(0, width, 2) / width))
    return tuple(turned(vectors, waves, encoding.layout) for vectors in (q, k))


def mrope(encoding, params, tokens, q, k):
    planes = np.arange(sum(encoding.sections))
    axes = np.repeat(range(len(encoding.sections)), encoding.sections)
    waves = np.exp(1j * tokens.pos[:, None, axes] / encoding.base ** (planes / len(planes)))
    return tuple(turned(vectors, waves, encoding.layout) for vectors in (q, k))


def axial(encoding, params, tokens, q, k):
    """Each axis rotates a part of the channels by RoPE, and the last channels stay."""
    width, found = encoding.inner.rotary_dim, (q.copy(), k.copy())
    for axis in range(encoding.num_axes):
        part, along = np.s_[..., axis * width : (axis + 1) * width], Tokens(tokens.x, q, k, tokens.pos[:, axis])
        for vectors, mapped in zip(found, rope(encoding.inner, params, along, q[part], k[part]), strict=True):
            vectors[part] = mapped
    return found


def xpos(encoding, params, tokens, q, k):
    return rope(encoding.rope, params, tokens, q, k)


def falls(encoding, pos):
    """zeta^((i - j) / B) of every channel, [1, t, t, d]."""
    width = encoding.rope.rotary_dim
    zeta = (np.arange(0, width, 2) / width + 0.4) / 1.4
    order = np.tile if encoding.rope.layout == "half_split" else np.repeat
    return (order(zeta, 2) ** ((pos[:, None, None] - pos[None, :, None]) / encoding.scale_base))[None]


def pope(encoding, params, tokens, q, k):
    d, delta = q.shape[-1], np.clip(params["delta"], -2 * math.pi, 0)
    phase = tokens.pos[:, None, None] / encoding.base ** (np.arange(d) / d)

    def both(vectors, phase):
        magnitude = np.log1p(np.exp(vectors))
        return np.concatenate([magnitude * np.cos(phase), magnitude * np.sin(phase)], axis=-1)

    return both(q, phase - delta), both(k, phase + 0 * delta)


def fope(encoding, params, tokens, q, k):
    half, heads, groups = q.shape[-1] // 2, q.shape[1], encoding.num_kv_heads
    thetas = encoding.base ** (-np.arange(half) / half)
    thetas = thetas[thetas >= 2 * math.pi / encoding.original_len]
    n = len(thetas)
    noise = np.random.default_rng(encoding.seed).standard_normal((2, groups, n, n))
    sines, cosines = np.eye(n) + encoding.gain * math.sqrt(2 / (n * n + groups * n)) * noise
    angles = tokens.pos[:, None] * thetas
    waves = np.full((len(angles), groups, half), 1 + 1j if encoding.dropped == "doubled" else 1.0 + 0j)
    waves[..., :n] = np.einsum("tn,gnf->tgf", np.cos(angles), cosines) + 1j * np.einsum(
        "tn,gnf->tgf", np.sin(angles), sines
    )
    waves = np.repeat(waves, heads // groups, axis=1)
    return tuple(turned(vectors, waves, "half_split") for vectors in (q, k))


def selective_rope(encoding, params, tokens, q, k):
    heads, d = q.shape[1:]
    rows = np.tri(len(q))
    phi = np.array([reference_rotary.selected(encoding, params, tokens.x, row) for row in rows])
    angles = np.cumsum(phi, axis=0) * encoding.base ** (-np.arange(0, d, 2) / d)
    waves = np.repeat(np.exp(1j * angles), heads // phi.shape[1], axis=1)
    return tuple(turned(vectors, waves, "half_split") for vectors in (q, k))


def darope(encoding, params, tokens, q, k):
    heads, d = q.shape[1:]
    of_tokens = zip(tokens.x, tokens.pos.tolist(), strict=True)
    angles = np.array([reference_rotary.darope_angles(encoding, params, token, p, d) for token, p in of_tokens])
    waves = np.repeat(np.exp(1j * angles), heads // angles.shape[1], axis=1)
    return tuple(turned(vectors, waves, "half_split") for vectors in (q, k))


def accumulated_rope(encoding, params, tokens, q, k):
    steps = reference_rotary.steps(params, tokens.x)
    angles = np.cumsum(steps, axis=0) * encoding.base ** (-np.arange(0, q.shape[-1], 2) / q.shape[-1])
    waves = np.repeat(np.exp(1j * angles), q.shape[1] // steps.shape[1], axis=1)
    return tuple(turned(vectors, waves, "half_split") for vectors in (q, k))


def rotated_values(encoding, params, tokens, q, k):
    return rope(encoding.base, params, tokens, q, k)


def rotated(encoding, params, tokens, v):
    return rope(encoding.base, params, tokens, v, v)[0]


def rotated_back(encoding, params, tokens, o):
    backwards = Tokens(tokens.x, tokens.q, tokens.k, -tokens.pos)
    return rope(encoding.base, params, backwards, o, o)[0]


def key_offset(encoding, params, tokens, q, k):
    before = np.concatenate([0 * k[:1], k[:-1]])
    return q, np.where(np.arange(k.shape[-1]) >= k.shape[-1] * (1 - encoding.share), before, k)


def canon(encoding, params, tokens, q, k):
    return convolved(params["query"], q), convolved(params["key"], k)


def canon_values(encoding, params, tokens, v):
    return convolved(params["value"], v)


def convolved(kernel, x):
    kernel, found = np.repeat(kernel, x.shape[1] // kernel.shape[1], axis=1), x.copy()
    for n, row in enumerate(kernel):
        found[n:] += row * x[: len(x) - n]
    return found


def transformer_xl_map(encoding, params, tokens, q, k):
    return q + params["u"], k


# Terms under the root, beside the products of mapped vectors: [h, t, t].


def products(tokens):
    return np.einsum("ihd,jhd->hij", tokens.q, tokens.k) * np.tri(len(tokens.q))


def of_vectors(logits, divisor):
    """What stands beside q . k in a reference that divides everything by sqrt(divisor * d)."""

    def found(encoding, params, tokens):
        root = math.sqrt(divisor(encoding) * tokens.q.shape[-1])
        return root * tokens.alone(logits, encoding, params) - products(tokens)

    return found


def transformer_xl(encoding, params, tokens):
    of_u = np.einsum("hd,jhd->hj", params["u"], tokens.k)[:, None] * np.tri(len(tokens.q))
    return of_vectors(reference.transformer_xl, lambda _: 1)(encoding, params, tokens) - of_u


MAPS = {
    "rope": rope, "mrope": mrope, "axial": axial, "xpos": xpos, "self_extend": xpos, "dual_chunk": xpos,
    "pope": pope, "fope": fope, "selective_rope": selective_rope, "darope": darope, "key_offset": key_offset,
    "accumulated_rope": accumulated_rope, "rotated_values": rotated_values,
    "canon": canon, "transformer_xl": transformer_xl_map,
}  # fmt: skip
VALUES = {"rotated_values": rotated, "canon": canon_values}
OUTPUTS = {"rotated_values": rotated_back}
INSIDE = {
    "shaw": of_vectors(reference.shaw, lambda _: 1),
    "transformer_xl": transformer_xl,
    "deberta": of_vectors(reference.deberta, lambda encoding: 1 + len(encoding.terms)),
    "tupe": of_vectors(reference.tupe, lambda _: 2),
}


def adaptive_temperature(encoding, params, tokens, t, h):
    beta, gamma = (tokens.x[t] @ params[name][:, h] for name in ("w_beta", "w_gamma"))
    exponent = encoding.gamma_range * math.tanh(gamma)
    return encoding.delta + math.log1p(math.exp(beta)) * math.log(tokens.pos[t] + 2) ** exponent


def of_position(logit_scale):
    return lambda encoding, params, tokens, t, h: logit_scale(encoding, params, int(tokens.pos[t]), h)


LOGIT_SCALES = {
    "t5": lambda encoding, params, tokens, t, h: 1.0 if encoding.scaled else math.sqrt(tokens.q.shape[-1]),
    "tupe": lambda *_: math.sqrt(0.5),
    "deberta": lambda encoding, *_: 1 / math.sqrt(1 + len(encoding.terms)),
    "log_length": of_position(reference.log_length),
    "ssmax": of_position(reference.ssmax),
    "llama4_temperature": of_position(reference.llama4_temperature),
    "adaptive_temperature": adaptive_temperature,
}


# Biases, and sums of gates: [h, t, t].


def of_distance(bias):
    return lambda encoding, params, tokens: tokens.pairs(lambda i, j, h: bias(encoding, params, *tokens.at(i, j), h))


def fox(encoding, params, tokens):
    log_f = -encoding.gate_scale * np.log1p(np.exp(-(tokens.x @ params["w"] + params["b"])))
    return tokens.pairs(lambda i, j, h: log_f[j + 1 : i + 1, h].sum())


OUTSIDE = {
    "t5": of_distance(reference_content.t5_bias),
    "alibi": of_distance(reference_content.alibi_bias),
    "kerple": of_distance(reference.kerple_bias),
    "bam": of_distance(reference.bam_bias),
    "sandwich": of_distance(reference.sandwich_bias),
    "fire": of_distance(reference.fire_bias),
    "dynamic_bias": of_distance(reference.dynamic_bias),
    "nape": of_distance(reference.nape_bias),
    "fox": fox,
}


# Scores: what a part makes of the scores s before it, [h, t, t].


def cope(encoding, params, tokens, logit_scale, s):
    d, e, plain = tokens.q.shape[-1], params["table"], products(tokens)
    gates = np.tril(1 / (1 + np.exp(-plain / math.sqrt(d))))
    met = np.minimum(np.cumsum(gates[..., ::-1], axis=-1)[..., ::-1], len(e) - 1)
    vectors = np.stack([np.interp(met, np.arange(len(e)), column) for column in e.T], axis=-1)
    return s + logit_scale * np.einsum("ihd,hijd->hij", tokens.q, vectors) / math.sqrt(d)


def grape_a(encoding, params, tokens, logit_scale, s):
    alone = tokens.alone(reference.grape_a, encoding, params)
    return s + alone - products(tokens) / math.sqrt(tokens.q.shape[-1])


def gape(encoding, params, tokens, logit_scale, s):
    def bias(i, j, h):
        slope, landmark = reference.gape_gates(encoding, params, tokens.q[i, h], tokens.k[j, h], h)
        return -slope * (1 - landmark) * int(tokens.pos[i] - tokens.pos[j])

    return s + tokens.pairs(bias)


def inkling(encoding, params, tokens, logit_scale, s):
    def bias(i, j, h):
        r = int(tokens.pos[i] - tokens.pos[j])
        return tokens.x[i] @ params["w"][:, h] @ params["bank"][:, r] if 0 <= r < encoding.extent else 0.0

    return s + tokens.pairs(bias)


def path(encoding, params, tokens, logit_scale, s):
    of_groups = [reference_content.householder(params, tokens.x, range(t, -1, -1)) for t in range(len(tokens.x))]
    heads, d = tokens.q.shape[1:]

    def turned(i, j, h):
        passing = tokens.q[i, h]
        for t in range(i, j, -1):
            passing = passing @ of_groups[t][h // (heads // len(of_groups[t]))]
        return passing @ tokens.k[j, h]

    return s + logit_scale * (tokens.pairs(turned) - products(tokens)) / math.sqrt(d)


def dape(encoding, params, tokens, logit_scale, s):
    """Over T5's bias, with a network that sees one pair."""
    own = {name.removeprefix("base."): array for name, array in params.items() if name.startswith("base.")}
    b = tokens.pairs(lambda i, j, h: reference_content.t5_bias(encoding.base, own, *tokens.at(i, j), h))
    hidden = np.einsum("cij,co->oij", np.concatenate([s, b]), params["w_1"][0]) + params["b_1"][:, None, None]
    return s + b + np.einsum("cij,co->oij", np.where(hidden > 0, hidden, 0.01 * hidden), params["w_2"][0])


def moved(logits):
    """Return the terms that a remap of RoPE's distances adds to RoPE, for vectors that other maps were given first."""

    def found(encoding, params, tokens, logit_scale, s):
        (q, k), own = tokens.last, math.sqrt(tokens.last[0].shape[-1] / tokens.q.shape[-1])

        def gain(i, j, h):
            pair = params, q[i, h], k[j, h], *tokens.at(i, j), h
            return own * (logits(encoding, *pair) - reference.rope(encoding.rope, *pair))

        return s + logit_scale * tokens.pairs(gain)

    return found


SCORES = {
    "cope": cope, "grape_a": grape_a, "gape": gape, "inkling": inkling, "path": path, "dape": dape,
    "self_extend": moved(reference.self_extend), "dual_chunk": moved(reference.dual_chunk),
}  # fmt: skip


# Logits [h] of entries without a key.

SINKS = {"learned_sinks": lambda params: params["z"]}
