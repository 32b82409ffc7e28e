"""Rotary encodings and the rules of RoPE's frequencies, in float64 NumPy; see `reference`."""

import math

import numpy as np

#: Query heads of the layers that the tests run, for encodings that only know their key heads.
NUM_HEADS = 4


def rope(encoding, params, q, k, i, j, h):
    """Sum over planes, as complex numbers, the real part of q conj(k) e^(i (i-j) theta)."""
    width = encoding.rotary_dim
    total = 0.0
    for c in range(width // 2):
        a, b = (2 * c, 2 * c + 1) if encoding.layout == "interleaved" else (c, c + width // 2)
        angle = (i - j) * theta(encoding.frequencies, encoding.base, width, c, h)
        total += (complex(q[a], q[b]) * complex(k[a], -k[b]) * complex(math.cos(angle), math.sin(angle))).real
    return (magnitude(encoding.frequencies) ** 2 * total + q[width:] @ k[width:]) / math.sqrt(len(q))


def mrope(encoding, params, q, k, i, j, h):
    """Rotate as rope by positions such as (time, height, width). Sections count the planes of each."""
    n, planes = len(encoding.sections), sum(encoding.sections)
    axes = np.repeat(range(n), encoding.sections)
    if encoding.order == "interleaved":  # the first axis, then every n-th plane for each other one
        axes = np.zeros(planes, int)
        for axis in range(1, n):
            axes[axis : n * encoding.sections[axis] : n] = axis
    total = q[2 * planes :] @ k[2 * planes :]
    for c, axis in enumerate(axes):
        a, b = (2 * c, 2 * c + 1) if encoding.layout == "interleaved" else (c, c + planes)
        angle = (i[axis] - j[axis]) / encoding.base ** (c / planes)
        left, right = complex(q[a], q[b]), complex(k[a], -k[b])
        total += (left * right * complex(math.cos(angle), math.sin(angle))).real
    return total / math.sqrt(len(q))


def theta(rule, base, width, c, h=0):
    """Return the radians per token of plane c among width / 2, as papers and released code of the rules have them.

    The key head h counts for one rule alone, `mobius`.
    """
    name, own = type(rule).__name__.lower(), base ** (-2 * c / width)
    if name not in RULES:
        raise ValueError(f"the reference has no rule {name!r}")
    return RULES[name](rule, base, width, c, own, h)


def ntk(base, width, c, factor):
    return (base * factor ** (width / (width - 2))) ** (-2 * c / width)


def dynamic_ntk(rule, base, width, c, own, h):
    beyond = max(rule.length - rule.original_len, 0)
    return ntk(base, width, c, 1 + rule.factor * beyond / rule.original_len)


def by_parts(rule, slow, fast, own):
    """Return the frequency by the turns in the original length: divided below `slow`, kept above `fast`."""
    turns = rule.original_len * own / (2 * math.pi)
    smooth = min(max((turns - slow) / (fast - slow), 0), 1)
    return (1 - smooth) * own / rule.factor + smooth * own


def yarn(rule, base, width, c, own, h):
    """Return a frequency between those of the planes with so many turns, which are found as in the released code."""
    fast, slow = (
        width * math.log(rule.original_len / (2 * math.pi * turns)) / (2 * math.log(base))
        for turns in (rule.fast, rule.slow)
    )
    fast, slow = max(math.floor(fast), 0), min(math.ceil(slow), width - 1)
    share = min(max((c - fast) / (slow - fast), 0), 1)
    return own / rule.factor * share + own * (1 - share)


def longrope(rule, base, width, c, own, h):
    return own / (rule.long_factors if rule.length > rule.original_len else rule.short_factors)[c]


def clip(rule, base, width, c, own, h):
    n = c - (width // 2 - rule.planes)
    if n < 0:
        return own
    return 0.0 if rule.hard else own * (1 + math.cos(math.pi * n / max(rule.planes - 1, 1))) / 2


def resonance(rule, base, width, c, own, h):
    wavelength = 2 * math.pi / theta(rule.of, base, width, c, h)
    return 2 * math.pi / round(wavelength)


def mobius(rule, base, width, c, own, h):
    return math.pi * (2 * c + 1) / rule.original_len if h < round(rule.share * rule.num_kv_heads) else own


#: Functions of a rule, the base, the width, the plane, its frequency in RoPE, and the key head.
RULES = {
    "geometric": lambda rule, base, width, c, own, h: own,
    "linear": lambda rule, base, width, c, own, h: own / rule.factor,
    "ntk": lambda rule, base, width, c, own, h: ntk(base, width, c, rule.factor),
    "dynamicntk": dynamic_ntk,
    "ntkbyparts": lambda rule, base, width, c, own, h: by_parts(rule, rule.slow, rule.fast, own),
    "llama3": lambda rule, base, width, c, own, h: by_parts(rule, rule.low_freq_factor, rule.high_freq_factor, own),
    "yarn": yarn,
    "longrope": longrope,
    "proportional": lambda rule, base, width, c, own, h: own / rule.factor if c < int(rule.share * width / 2) else 0.0,
    "wholeturns": lambda rule, base, width, c, own, h: own if own * rule.original_len >= 2 * math.pi else 0.0,
    "clip": clip,
    "resonance": resonance,
    "mobius": mobius,
    "periodic": lambda rule, base, width, c, own, h: 2 * math.pi / rule.periods[c % len(rule.periods)],
}


def magnitude(rule):
    """Return the factor of cosines and sines, which acts on queries and on keys."""
    name = type(rule).__name__.lower()
    if name == "yarn":
        return 0.1 * math.log(rule.factor) + 1
    if name == "longrope":
        return math.sqrt(1 + math.log(rule.factor) / math.log(rule.original_len))
    return magnitude(rule.of) if name == "resonance" else 1.0


def self_extend(encoding, params, q, k, i, j, h):
    """Rotate, beyond the window, by positions of groups, or by the distance of the window."""
    w, group = encoding.window, encoding.group
    if i - j < w:
        return rope(encoding.rope, {}, q, k, i, j, h)
    r = math.floor(i / group) - math.floor(j / group) + w - math.floor(w / group) if group else w
    return rope(encoding.rope, {}, q, k, r, 0, h)


def dual_chunk(encoding, params, q, k, i, j, h):
    """Rotate by the query's position, which depends on the chunks of both, and by the key's place in its chunk."""
    size, window = encoding.chunk, encoding.window
    apart = math.floor(i / size) - math.floor(j / size)
    if apart < 0:
        return rope(encoding.rope, {}, q, k, i, j, h)
    place = [i % size, min(i % size + size, window - 1), window - 1][min(apart, 2)]
    return rope(encoding.rope, {}, q, k, place, j % size, h)


def xpos(encoding, params, q, k, i, j, h):
    """Rotate as rope, and multiply plane c by zeta_c to the power of the distance over the scale base."""
    width, layout = encoding.rope.rotary_dim, encoding.rope.layout
    total = q[width:] @ k[width:]
    for c in range(width // 2):
        a, b = (2 * c, 2 * c + 1) if layout == "interleaved" else (c, c + width // 2)
        angle = (i - j) / encoding.rope.base ** (2 * c / width)
        zeta = (2 * c / width + 0.4) / 1.4
        turned = (complex(q[a], q[b]) * complex(k[a], -k[b]) * complex(math.cos(angle), math.sin(angle))).real
        total += turned * zeta ** ((i - j) / encoding.scale_base)
    return total / math.sqrt(len(q))


def softplus(x):
    return math.log(1 + math.exp(x))


def pope(encoding, params, q, k, i, j, h):
    total = 0.0
    for c, (a, b) in enumerate(zip(q, k, strict=True)):
        delta = max(-2 * math.pi, min(0.0, params["delta"][h, c]))
        total += softplus(a) * softplus(b) * math.cos((j - i) / encoding.base ** (c / len(q)) + delta)
    return total / math.sqrt(len(q))


def fope(encoding, params, q, k, i, j, h):
    """Sum over planes the real part of q w_i conj(k w_j), w_p the mixed waves at position p."""
    half, heads = len(q) // 2, encoding.num_kv_heads
    thetas = [encoding.base ** (-c / half) for c in range(half)]
    kept = [theta for theta in thetas if theta >= 2 * math.pi / encoding.original_len]
    n = len(kept)
    if encoding.learned:
        sines, cosines = params["sin"], params["cos"]
    else:
        noise = np.random.default_rng(encoding.seed).standard_normal((2, heads, n, n))
        sines, cosines = np.eye(n) + encoding.gain * math.sqrt(2 / (n * n + heads * n)) * noise
    group = h // (NUM_HEADS // heads)

    def wave(p, f):
        if f >= n:
            return 1 + 1j if encoding.dropped == "doubled" else 1.0
        sine = sum(math.sin(p * theta) * sines[group, c, f] for c, theta in enumerate(kept))
        return complex(sum(math.cos(p * theta) * cosines[group, c, f] for c, theta in enumerate(kept)), sine)

    total = 0.0
    for f in range(half):
        left, right = complex(q[f], q[f + half]) * wave(i, f), complex(k[f], k[f + half]) * wave(j, f)
        total += (left * right.conjugate()).real
    return total / math.sqrt(len(q))
