"""Encodings whose logits need a whole row of keys, or the tokens, in float64 NumPy loops; see `reference`."""

import math

import numpy as np

from golden import reference


def outputs(logits_of_row):
    """Return a function (encoding, params, x, project, pos, visible) -> [t, h, d] from one for the logits of a query.

    The given function returns {j: [h]} for the keys j in `seen` of the i-th query. Its arguments are encoding, params,
    x [t, m], q_i [h, d], k [t, h, d], pos [t], i and seen.
    """

    def attention(encoding, params, x, project, pos, visible):
        q, k, v = project(x)
        num_tokens, num_heads, _ = q.shape
        k, v = (np.repeat(a, num_heads // a.shape[1], axis=1) for a in (k, v))
        o = np.zeros((num_tokens, num_heads, v.shape[-1]))
        for i in range(num_tokens):
            seen = np.flatnonzero(visible[i]).tolist()
            if not seen:
                continue
            logits = logits_of_row(encoding, params, x, q[i], k, pos, i, seen)
            for h in range(num_heads):
                row = np.array([logits[j][h] for j in seen])
                w = np.exp(row - row.max())
                o[i, h] = sum(weight * v[j, h] for weight, j in zip(w / w.sum(), seen, strict=True))
        return o

    return attention


@outputs
def cope(encoding, params, x, q, k, pos, i, seen):
    """Sum gates from the last visible key back to the first. A key's position is the sum so far."""
    num_heads, d = q.shape
    logits, e = {j: np.zeros(num_heads) for j in seen}, params["table"]
    for h in range(num_heads):
        met = 0.0
        for j in reversed(seen):
            product = q[h] @ k[j, h] / math.sqrt(d)
            met += 1 / (1 + math.exp(-product))
            place = min(met, len(e) - 1)
            first = min(int(place), len(e) - 2)
            vector = e[first] + (place - first) * (e[first + 1] - e[first])
            logits[j][h] = product + q[h] @ vector / (math.sqrt(d) if encoding.scaled else 1.0)
    return logits


@outputs
def inkling(encoding, params, x, q, k, pos, i, seen):
    logits = {}
    for j in seen:
        plain = np.array([reference.plain(None, None, q[h], k[j, h], 0, 0, h) for h in range(len(q))])
        r = pos[i] - pos[j]
        near = 0 <= r < encoding.extent
        logits[j] = plain + [x[i] @ params["w"][:, h] @ params["bank"][:, r] if near else 0.0 for h in range(len(q))]
    return logits


def alibi_bias(base, params, i, j, h):
    return -reference.alibi_slopes(base.num_heads)[h] * abs(i - j)


def t5_bias(base, params, i, j, h):
    return params["table"][reference.t5_bucket(base, i - j), h]


@outputs
def dape(encoding, params, x, q, k, pos, i, seen):
    """Apply both layers to visible keys. A key that is not seen is 0 to its neighbours in either layer."""
    base, heads = encoding.base, range(len(q))
    kind = type(base).__name__.lower()
    product = reference.rope if kind == "rope" else reference.plain
    bias = {
        "alibi": alibi_bias, "t5": t5_bias, "kerple": reference.kerple_bias, "fire": reference.fire_bias, "rope": None,
    }[kind]  # fmt: skip
    own = {name.removeprefix("base."): array for name, array in params.items() if name.startswith("base.")}
    a = {j: np.array([product(base, {}, q[h], k[j, h], pos[i], pos[j], h) for h in heads]) for j in seen}
    b = {j: np.array([bias(base, own, pos[i], pos[j], h) if bias else 0.0 for h in heads]) for j in seen}
    inputs = {j: np.concatenate([a[j], b[j]]) if bias else a[j] for j in seen}

    def layer(w, given, j):
        taps = range(-(len(w) // 2), len(w) // 2 + 1)
        return sum(given[j + tap] @ w[n] for n, tap in enumerate(taps) if j + tap in given)

    before = {j: layer(params["w_1"], inputs, j) + params["b_1"] for j in seen}
    hidden = {j: np.where(u > 0, u, 0.01 * u) for j, u in before.items()}
    return {j: a[j] + b[j] + layer(params["w_2"], hidden, j) for j in seen}


@outputs
def fox(encoding, params, x, q, k, pos, i, seen):
    """Add to every key the logs of the gates of all tokens after it, up to the query's own."""
    z = params["b"] + (0 if encoding.gate == "constant" else x @ params["w"])
    log_f = np.log(1 / (1 + np.exp(z if encoding.gate == "cable" else -z))) + np.zeros((len(x), len(q)))
    log_f = encoding.gate_scale * log_f
    plain = {j: np.array([q[h] @ k[j, h] / math.sqrt(q.shape[1]) for h in range(len(q))]) for j in seen}
    return {j: plain[j] + sum(log_f[n] for n in seen if j < n <= i) for j in seen}


def path(encoding, params, x, project, pos, visible):
    """Walk from the query's own token back. Each token multiplies the query by its matrix, for the keys before it.

    Rows of `visible` say for every token which ones came before it.
    """
    matrices = [householder(params, x, np.flatnonzero(row)[::-1]) for row in visible]

    @outputs
    def walk(encoding, params, x, q, k, pos, i, seen):
        (num_heads, d), logits = q.shape, {}
        passing = q.copy()
        for j in reversed(seen):
            logits[j] = np.array([passing[h] @ k[j, h] / math.sqrt(d) for h in range(num_heads)])
            group = num_heads // len(matrices[j])
            passing = np.array([passing[h] @ matrices[j][h // group] for h in range(num_heads)])
        return logits

    return walk(encoding, params, x, project, pos, visible)


def householder(params, x, before):
    """Return I - beta w w^T of the token that `before` names first, [g, d, d]."""
    if not len(before):
        return np.zeros((params["up"].shape[1], 0, 0))
    down, up, kernel = params["down"], params["up"], params["kernel"]
    mixed = sum(row * np.tensordot(x[t] @ down, up, 1) for row, t in zip(kernel, before, strict=False))
    w = mixed / (1 + np.exp(-mixed))
    beta = 2 / (1 + np.exp(-(x[before[0]] @ params["u"] + params["b"])))
    return np.array([np.eye(len(v)) - b * np.outer(v, v) / (v @ v) for v, b in zip(w, beta, strict=True)])


def adaptive_temperature(encoding, params, x, project, pos, visible):
    """Return plain attention of each query times its logit scale."""
    q, k, v = project(x)
    scaled = q.copy()
    for i, p in enumerate(pos.tolist()):
        for n in range(q.shape[1] - encoding.plain_heads):
            h = n + encoding.plain_heads
            beta = math.log(1 + math.exp(x[i] @ params["w_beta"][:, n]))
            gamma = encoding.gamma_range * math.tanh(x[i] @ params["w_gamma"][:, n])
            scaled[i, h] *= encoding.delta + beta * math.log(p + 2) ** gamma
    return reference.reference("nope", encoding, {}, scaled, k, v, pos.tolist(), pos.tolist(), np.asarray(visible))


WHOLE = {
    "cope": cope, "inkling": inkling, "dape": dape, "fox": fox, "path": path,
    "adaptive_temperature": adaptive_temperature,
}  # fmt: skip
