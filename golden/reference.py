"""Every encoding once more, in float64 NumPy, one (query, key) pair at a time, from the equation in its paper.

Nothing here imports code from posx and nothing is vectorised over positions, so that a slip in one place cannot hide in
the other. `encoding` is only read for its hyper-parameters.
"""

import math

import numpy as np

from golden.reference_planes import dual_chunk, fope, mrope, pope, rope, self_extend, softplus, xpos


def embed(name, encoding, params, x, pos):
    """Return x [t, m] with the position vectors of pos [t] added."""
    parts = split_chain(encoding, params) if "+" in name else [(name, encoding, params)]
    for part_name, part, own in parts:
        if part_name in EMBEDDINGS:
            x = np.stack([row + EMBEDDINGS[part_name](part, own, p, len(row)) for row, p in zip(x, pos, strict=True)])
    return x


def reference(name, encoding, params, q, k, v, q_pos, k_pos, visible):
    """Return attention outputs [q, h, d]; q [q, h, d], k and v [k, g, d], visible [q, k]."""
    num_queries, num_heads, _ = q.shape
    group = num_heads // k.shape[1]
    o = np.zeros((num_queries, num_heads, v.shape[-1]))
    for h in range(num_heads):
        for i in range(num_queries):
            seen = np.flatnonzero(visible[i])
            if not len(seen):
                continue
            pairs = [(q[i, h], k[j, h // group], q_pos[i], k_pos[j], h) for j in seen]
            logits = np.array([LOGITS[name](encoding, params, *pair) for pair in pairs])
            top = logits.max()
            w = np.exp(logits - top)
            w /= w.sum() + sum(math.exp(z - top) for z in SINKS.get(name, no_sinks)(encoding, params, h))
            for weight, j in zip(w, seen, strict=True):
                o[i, h] += weight * (v[j, h // group] + value_term(name, encoding, params, q_pos[i], k_pos[j]))
    return o


def split_chain(encoding, params):
    for n, part in enumerate(encoding.parts):
        own = {key.removeprefix(f"{n}."): value for key, value in params.items() if key.startswith(f"{n}.")}
        yield type(part).__name__.lower(), part, own


# Vectors added to the token embeddings.


def sinusoidal_vector(encoding, params, pos, width):
    vector = np.zeros(width)
    for c in range(width // 2):
        exponent = 2 * c / width if encoding.exponent == "2c/m" else c / (width / 2 - 1)
        angle = pos / encoding.base**exponent
        places = (2 * c, 2 * c + 1) if encoding.layout == "interleaved" else (c, c + width // 2)
        vector[places[0]], vector[places[1]] = math.sin(angle), math.cos(angle)
    return vector


def table_row(encoding, table, pos):
    last = len(table) - 1
    if encoding.beyond == "error":
        return table[pos]
    if encoding.beyond == "clamp":
        return table[min(max(pos, 0), last)]
    if encoding.stretched_to > len(table):
        place = pos * last / (encoding.stretched_to - 1)
        return np.array([np.interp(place, np.arange(len(table)), column) for column in table.T])
    return table[pos]


def learned_vector(encoding, params, pos, width):
    return table_row(encoding, params["table"], pos)


# Logits of one pair, after all scaling.


def plain(encoding, params, q, k, i, j, h):
    return q @ k / math.sqrt(len(q))


def shaw(encoding, params, q, k, i, j, h):
    return q @ (k + params["keys"][shaw_row(encoding, i, j)]) / math.sqrt(len(q))


def shaw_row(encoding, i, j):
    return max(-encoding.max_distance, min(encoding.max_distance, j - i)) + encoding.max_distance


def transformer_xl(encoding, params, q, k, i, j, h):
    r = i - j
    if encoding.clamp_len:
        r = max(-encoding.clamp_len, min(encoding.clamp_len, r))
    width = len(params["w_r"])
    angles = [r / encoding.base ** (2 * c / width) for c in range(width // 2)]
    wave = np.array([math.sin(a) for a in angles] + [math.cos(a) for a in angles])
    projected = wave @ params["w_r"][:, h]
    return ((q + params["u"][h]) @ k + (q + params["v"][h]) @ projected) / math.sqrt(len(q))


def t5_bucket(encoding, r):
    """Return the bucket by Mesh TensorFlow's formula.

    The small number puts exact powers in place, which logarithms of floats round either way.
    """
    n, first, count = max(r, 0), 0, encoding.num_buckets
    if encoding.bidirectional:
        n, count = abs(r), count // 2
        first = count if r < 0 else 0
    exact = count // 2
    if n < exact:
        return first + int(n)
    log = math.log(n / exact) / math.log(encoding.max_distance / exact)
    return first + min(count - 1, exact + math.floor(log * (count - exact) + 1e-9))


def t5(encoding, params, q, k, i, j, h):
    scale = 1 / math.sqrt(len(q)) if encoding.scaled else 1.0
    return q @ k * scale + params["table"][t5_bucket(encoding, i - j), h]


def tupe(encoding, params, q, k, i, j, h):
    return q @ k / math.sqrt(2 * len(q)) + tupe_bias(encoding, params, i, j, h)


def tupe_bias(encoding, params, i, j, h):
    if i in encoding.untied:
        return params["theta"][0, h]
    if j in encoding.untied:
        return params["theta"][1, h]

    def position(p):
        row = table_row(encoding, params["table"], p)
        unit = (row - row.mean()) / math.sqrt(row.var() + 1e-5)
        return unit * params["norm_scale"] + params["norm_bias"]

    group = params["u_q"].shape[1] // params["u_k"].shape[1]
    left, right = position(i) @ params["u_q"][:, h], position(j) @ params["u_k"][:, h // group]
    return left @ right / math.sqrt(2 * len(left))


def tupe_r(encoding, params, q, k, i, j, h):
    (_, tupe_part, tupe_params), (_, t5_part, t5_params) = split_chain(encoding, params)
    bias = t5_params["table"][t5_bucket(t5_part, i - j), h]
    return tupe(tupe_part, tupe_params, q, k, i, j, h) + bias


def deberta_delta(encoding, r):
    half = encoding.max_distance
    if encoding.log_buckets:
        half, mid = encoding.log_buckets, encoding.log_buckets // 2
        if abs(r) > mid:
            far = min(abs(r), encoding.max_distance - 1)
            steps = math.log(far / mid) / math.log((encoding.max_distance - 1) / mid) * (mid - 1)
            r = math.copysign(math.ceil(steps - 1e-9) + mid, r)
    return int(max(0, min(2 * half - 1, r + half)))


def deberta(encoding, params, q, k, i, j, h):
    total = q @ k
    if "c2p" in encoding.terms:
        total += q @ (params["table"][deberta_delta(encoding, i - j)] @ params["w_k"][:, h])
    if "p2c" in encoding.terms:
        r = i - j if encoding.release_index else j - i
        total += k @ (params["table"][deberta_delta(encoding, r)] @ params["w_q"][:, h])
    return total / math.sqrt((1 + len(encoding.terms)) * len(q))


def alibi_slopes(n):
    """Return the slopes by the authors' recursion (fairseq `get_slopes`)."""
    if math.log2(n).is_integer():
        start = 2 ** (-(2 ** -(math.log2(n) - 3)))
        return [start * start**i for i in range(n)]
    closest = 2 ** math.floor(math.log2(n))
    return alibi_slopes(closest) + alibi_slopes(2 * closest)[0::2][: n - closest]


def alibi(encoding, params, q, k, i, j, h):
    distance = math.log(1 + abs(i - j)) if encoding.scale == "log" else abs(i - j)
    return q @ k / math.sqrt(len(q)) - alibi_slopes(encoding.num_heads)[h] * distance


def rope_alibi(encoding, params, q, k, i, j, h):
    return rope(encoding.parts[0], {}, q, k, i, j, h) - alibi_slopes(encoding.parts[1].num_heads)[h] * abs(i - j)


def grape_a(encoding, params, q, k, i, j, h):
    def gate(vector, by):
        length = math.sqrt(by @ by) if encoding.unit else 1.0
        return math.log1p(math.exp(vector @ by / length / math.sqrt(len(q))))

    gates = gate(q, params["v"][h]) if "query" in encoding.gates else 0.0
    gates += gate(k, params["u"][h]) if "key" in encoding.gates else 0.0
    slope = math.log1p(math.exp(params["omega"][h])) * alibi_slopes(encoding.num_heads)[h]
    return plain(encoding, params, q, k, i, j, h) - slope * gates * abs(i - j)


def gape_gates(encoding, params, q, k, h):
    """Return Gamma_h g_i / T and l_j."""
    g = softplus(params["w_g"][h] @ q + params["b_g"][h])
    landmark = 1 / (1 + math.exp(-(params["w_l"][h] @ k + params["b_l"][h])))
    return softplus(params["gamma"][h]) * g / encoding.original_len, landmark


def gape(encoding, params, q, k, i, j, h):
    """Add the paper's bias, with a number of each query that no weight depends on."""
    slope, landmark = gape_gates(encoding, params, q, k, h)
    return plain(encoding, params, q, k, i, j, h) + slope * (j * (1 - landmark) + i * landmark)


def axial_parts(encoding, params, vectors):
    """Yield, for each axis, its parameters and its even part of some vectors, then None and the channels left over."""
    n, inner = encoding.num_axes, type(encoding.inner).__name__.lower()
    width = len(vectors[0]) // n // 2 * 2
    for axis in range(n):
        own = {key.removeprefix(f"{axis}."): value for key, value in params.items() if key.startswith(f"{axis}.")}
        yield inner, own, [vector[axis * width : (axis + 1) * width] for vector in vectors]
    yield None, None, [vector[n * width :] for vector in vectors]


def axial_vector(encoding, params, pos, width):
    """Return the vectors of all axes behind each other."""
    vectors = []
    for axis, (inner, own, (part,)) in enumerate(axial_parts(encoding, params, [np.zeros(width)])):
        vectors.append(EMBEDDINGS[inner](encoding.inner, own, pos[axis], len(part)) if inner in EMBEDDINGS else part)
    return np.concatenate(vectors)


def axial(encoding, params, q, k, i, j, h):
    """Add the products of the parts of all axes, and their biases, which are the logits of zeros."""
    products = biases = 0.0
    for axis, (inner, own, (part_q, part_k)) in enumerate(axial_parts(encoding, params, [q, k])):
        if inner is None:
            products += part_q @ part_k
            continue
        at = int(i[axis]), int(j[axis]), h
        bias = LOGITS[inner](encoding.inner, own, 0 * part_q, 0 * part_k, *at)
        products += (LOGITS[inner](encoding.inner, own, part_q, part_k, *at) - bias) * math.sqrt(len(part_q))
        biases += bias
    return products / math.sqrt(len(q)) + biases


# Biases: numbers added to the logits.


def kerple_bias(encoding, params, i, j, h):
    """Return the bias. Parameters beyond a bound count as their mirror image in that bound."""
    p, a = (0.01 + abs(params[name][h] - 0.01) for name in "pa")
    r = abs(i - j)
    if encoding.form == "log":
        return -p * math.log(1 + a * r)
    return -a * r ** max(2 - abs(2 - p), 0.01)


def bam_bias(encoding, params, i, j, h):
    """Return the bias of the released code: distances are j - i, and the location is taken off them."""
    first, last = encoding.shapes
    shape = params["shape"][h] if "shape" in params else first + (last - first) * h / (encoding.num_heads - 1)
    start = encoding.initial_scale or alibi_slopes(encoding.num_heads)[h]
    scale = params["scale"][h] if "scale" in params else math.log(start)
    loc = params["loc"][h] if "loc" in params else encoding.initial_loc
    return -math.exp(scale) * (abs(j - i - (math.exp(loc) - math.exp(-loc))) + 1e-5) ** shape


def sandwich_bias(encoding, params, i, j, h):
    exponents = [2 * (c + encoding.first) / encoding.width for c in range(encoding.width // 2)]
    waves = sum(math.cos((i - j) / encoding.base**e) for e in exponents)
    return (waves - encoding.width / 2) / (8 * (h + 1) / encoding.num_heads)


def network(params, x, activation):
    hidden, last = np.array([x]), len(params) // 2
    for n in range(last):
        hidden = activation(hidden @ params[f"w{n}"] + params[f"b{n}"])
    return hidden @ params[f"w{last}"]


def fire_bias(encoding, params, i, j, h):
    c = abs(params["c"])
    whole = max(i, abs(params["multiplier"]) * encoding.threshold, 1)
    share = math.log(c * abs(i - j) + 1) / (math.log(c * whole + 1) + 1e-6)
    layers = {name: value for name, value in params.items() if name not in ("c", "multiplier")}
    return network(layers, share, lambda x: np.maximum(x, 0))[h]


def dynamic_bias(encoding, params, i, j, h):
    r = float(i - j)
    x = math.copysign(math.log(abs(r) + 1), r) if encoding.log_distance else r
    return network(params, x, lambda x: x * (1 + np.tanh(x / 2)) / 2)[h]


def nape_bias(encoding, params, i, j, h):
    if h >= encoding.alibi_heads:
        return 0.0
    return -abs(i - j) * (1 / (h + 1) if encoding.slopes == "linear" else 0.5**h)


def with_bias(bias):
    return lambda encoding, params, q, k, i, j, h: (
        plain(encoding, params, q, k, i, j, h) + bias(encoding, params, i, j, h)
    )


# Logit scales: factors of the logits of a query.


def log_length(encoding, params, i, h):
    return max(1, math.log(i + 1) / math.log(encoding.train_len))


def ssmax(encoding, params, i, h):
    return 1 if h < encoding.plain_heads else params["s"][h - encoding.plain_heads] * math.log(i + 1)


def llama4_temperature(encoding, params, i, h):
    return 1 + encoding.attn_scale * math.log(1 + (i + 1) // encoding.floor_scale)


def with_logit_scale(logit_scale):
    return lambda encoding, params, q, k, i, j, h: (
        logit_scale(encoding, params, i, h) * plain(encoding, params, q, k, i, j, h)
    )


def rope_log_length(encoding, params, q, k, i, j, h):
    return log_length(encoding.parts[1], {}, i, h) * rope(encoding.parts[0], {}, q, k, i, j, h)


# Sinks: logits of entries without a key.


def no_sinks(encoding, params, h):
    return []


def learned_sinks(encoding, params, h):
    return [params["z"][h]]


def sinks_of_chain(encoding, params, h):
    return [array[h] for name, array in params.items() if name.endswith(".z")]


def value_term(name, encoding, params, i, j):
    if name == "shaw" and encoding.values:
        return params["values"][shaw_row(encoding, i, j)]
    return 0.0


EMBEDDINGS = {"sinusoidal": sinusoidal_vector, "learned": learned_vector, "axial": axial_vector}
LOGITS = {
    "nope": plain, "sinusoidal": plain, "learned": plain, "shaw": shaw, "transformer_xl": transformer_xl, "t5": t5,
    "tupe": tupe, "deberta": deberta, "rope": rope, "mrope": mrope, "axial": axial, "xpos": xpos,
    "self_extend": self_extend, "dual_chunk": dual_chunk, "pope": pope, "fope": fope,
    "alibi": alibi, "grape_a": grape_a, "gape": gape,
    "tupe+t5": tupe_r,
    "rope+alibi": rope_alibi,
    "kerple": with_bias(kerple_bias),
    "bam": with_bias(bam_bias),
    "sandwich": with_bias(sandwich_bias),
    "fire": with_bias(fire_bias),
    "dynamic_bias": with_bias(dynamic_bias),
    "nape": with_bias(nape_bias),
    "log_length": with_logit_scale(log_length),
    "ssmax": with_logit_scale(ssmax),
    "llama4_temperature": with_logit_scale(llama4_temperature),
    "rope+log_length": rope_log_length,
    "learned_sinks": plain,
    "rope+learned_sinks": lambda encoding, params, *pair: rope(encoding.parts[0], {}, *pair),
    "alibi+learned_sinks": lambda encoding, params, *pair: alibi(encoding.parts[0], {}, *pair),
    "learned_sinks+learned_sinks": plain,
}  # fmt: skip
SINKS = {
    "learned_sinks": learned_sinks,
    "rope+learned_sinks": sinks_of_chain,
    "alibi+learned_sinks": sinks_of_chain,
    "learned_sinks+learned_sinks": sinks_of_chain,
}
