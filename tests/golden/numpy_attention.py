"""A second implementation of RoPE, M-RoPE, sinusoids, ALiBi and T5 in vectorised NumPy, with faults on request.

It reads the files of `golden` as a user does, and shares no code with the references.
"""

import numpy as np

#: {fault: (family, case) that must fail}.
FAULTS = {
    "the sign of the distance is reversed": ("rope", "whole"),
    "halves are taken for interleaved planes": ("rope_interleaved", "whole"),
    "all channels are rotated": ("rope_partial", "whole"),
    "the base is reset to 10,000": ("rope_base", "whole"),
    "YaRN's attention factor is lost": ("rope_yarn", "whole"),
    "the causal mask is aligned to the first key": ("rope", "step"),
    "the cache is one token short": ("rope", "step"),
    "empty slots leak": ("alibi_8", "left_padding"),
    "padding counts as positions": ("sinusoidal", "left_padding"),
    "a query's slot is taken for its position": ("rope", "padded_step"),
    "documents leak": ("t5", "packed"),
    "the window is one key too wide": ("alibi_4", "window"),
    "the begin token is forgotten": ("rope", "window_sinks"),
    "positions are in bfloat16": ("rope", "offset_4096"),
    "phases are in bfloat16": ("sinusoidal", "offset_4096"),
    "phases are in float32": ("rope_linear", "offset_2_24"),
    "key heads are tiled": ("alibi_4", "grouped"),
    "slopes are those of a power of two": ("alibi_6", "whole"),
    "the bias is divided by the root of d": ("alibi_12", "whole"),
    "edges of logarithmic buckets are rounded down": ("t5_bidirectional", "far"),
    "the sides of the query are exchanged": ("t5_bidirectional", "whole"),
    "all sections read the time": ("mrope", "whole"),
}
NAMES = ("rope", "mrope", "sinusoidal", "alibi", "t5")


def attention(case, fault=""):
    """Return the outputs and weights of a case, for the encodings of NAMES; with a fault, wrong ones."""
    settings = case["settings"]
    if settings["name"] not in NAMES:
        return None
    q_pos, k_pos = read_positions(case, fault)
    if settings["name"] == "sinusoidal":
        return case["x"] + waves(settings, q_pos, case["x"].shape[1], fault)
    q, k, v = (case[part] for part in "qkv")
    group = q.shape[1] // k.shape[1]
    if fault == "key heads are tiled":
        k, v = (np.tile(vectors, (1, group, 1)) for vectors in (k, v))
    k, v = (np.repeat(vectors, q.shape[1] // vectors.shape[1], axis=1) for vectors in (k, v))
    if "rope" in settings["name"]:
        turn = rotary(case, settings, fault)
        q, k = turn(q, q_pos), turn(k, k_pos)
    logits, root = np.einsum("qhd,khd->hqk", q, k), np.sqrt(q.shape[-1])
    r = q_pos[:, None] - k_pos[None] if q_pos.ndim == 1 else None
    bias = {"alibi": alibi_bias, "t5": t5_bias}.get(settings["name"], lambda *_: 0.0)(case, settings, r, fault)
    logits = (logits + bias) / root if fault == "the bias is divided by the root of d" else logits / root + bias
    logits = np.where(mask(case, fault), logits, -1e30)
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return {"outputs": np.einsum("hqk,khd->qhd", weights, v), "weights": weights}


def read_positions(case, fault):
    q_pos, k_pos = np.float64(case["q_pos"]), np.float64(case["k_pos"])
    first = len(k_pos) - len(q_pos)
    if fault == "padding counts as positions":
        return first + np.arange(len(q_pos)), np.arange(len(k_pos))
    if fault == "a query's slot is taken for its position" and first:
        return first + np.arange(len(q_pos)), k_pos
    if fault == "the cache is one token short" and first:
        return q_pos - 1, k_pos
    return (bfloat16(q_pos), bfloat16(k_pos)) if fault == "positions are in bfloat16" else (q_pos, k_pos)


def bfloat16(x):
    """Round to 8 bits."""
    mantissa, exponent = np.frexp(x)
    return np.ldexp(np.round(mantissa * 256) / 256, exponent)


def phases(pos, theta, fault):
    if fault == "phases are in float32":
        return np.float64(np.float32(pos)[:, None] * np.float32(theta))
    product = pos[:, None] * theta
    return bfloat16(product) if fault == "phases are in bfloat16" else product


def waves(settings, pos, width, fault):
    half = width // 2
    power = np.arange(half) / (half if settings["exponent"] == "2c/m" else half - 1)
    angles = phases(pos, settings["base"] ** -power, fault)
    pair = np.sin(angles), np.cos(angles)
    if settings["layout"] == "concatenated":
        return np.concatenate(pair, axis=-1)
    return np.stack(pair, axis=-1).reshape(len(pos), width)


def rotary(case, settings, fault):
    """Return (vectors, positions) -> rotated vectors."""
    width = settings.get("rotary_dim", case["q"].shape[-1])
    if fault == "all channels are rotated":
        width = case["q"].shape[-1]
    base = 10000.0 if fault == "the base is reset to 10,000" else settings["base"]
    theta = base ** (-np.arange(0, width, 2) / width)
    if settings.get("frequencies", {"name": "geometric"})["name"] != "geometric":
        theta = np.array(case["constants"]["theta"])
    factor = case["constants"].get("attention_factor", 1.0)
    factor = 1.0 if fault == "YaRN's attention factor is lost" else factor
    interleaved = settings.get("layout") == "interleaved" and fault != "halves are taken for interleaved planes"

    def turn(vectors, pos):
        if pos.ndim > 1:
            axis = np.repeat(range(3), settings["sections"]) * (fault != "all sections read the time")
            angles = (pos[:, axis] * theta)[:, None]
        else:
            angles = phases(pos, theta.ravel(), fault).reshape(len(pos), -1, width // 2)
        angles = -angles if fault == "the sign of the distance is reversed" else angles
        x = vectors[..., :width]
        planes = x[..., ::2] + 1j * x[..., 1::2] if interleaved else x[..., : width // 2] + 1j * x[..., width // 2 :]
        planes = factor * planes * np.exp(1j * angles)
        joined = np.stack if interleaved else np.concatenate
        rotated = joined([planes.real, planes.imag], axis=-1).reshape(x.shape)
        return np.concatenate([rotated, vectors[..., width:]], axis=-1)

    return turn


def alibi_bias(case, settings, r, fault):
    heads = settings["num_heads"]
    power = heads if fault == "slopes are those of a power of two" else 2 ** (heads.bit_length() - 1)
    exponents = np.arange(1, power + 1) / power, (2 * np.arange(heads - power) + 1) / (2 * power)
    far = np.log1p(np.abs(r)) if settings["scale"] == "log" else np.abs(r)
    return -(2.0 ** (-8 * np.concatenate(exponents)))[:, None, None] * far


def t5_bias(case, settings, r, fault):
    buckets, both = settings["num_buckets"], settings["bidirectional"]
    if fault == "the sides of the query are exchanged":
        r = -r
    first = np.where(r < 0, buckets // 2, 0) if both else 0
    n, count = (np.abs(r), buckets // 2) if both else (np.maximum(r, 0), buckets)
    exact, nudge = count // 2, -1e-6 if fault == "edges of logarithmic buckets are rounded down" else 1e-9
    octaves = np.log(np.maximum(n, 1) / exact) / np.log(settings["max_distance"] / exact)
    far = np.minimum(exact + np.floor(octaves * (count - exact) + nudge), count - 1)
    bucket = first + np.where(n < exact, n, far)
    return np.moveaxis(case["arrays"]["table"][bucket.astype(int)], -1, 0)


def mask(case, fault):
    i, j = case["q_idx"][:, None], case["k_idx"][None]
    seen = np.ones(case["visible"].shape, bool)
    if fault != "empty slots leak":
        seen &= (i >= 0) & (j >= 0)
    if fault != "documents leak":
        seen &= case["q_segment"][:, None] == case["k_segment"][None]
    if case["mask"]["causal"]:
        seen &= np.tri(*seen.shape, dtype=bool) if fault == "the causal mask is aligned to the first key" else j <= i
    if window := case["mask"]["window"] + (fault == "the window is one key too wide"):
        sinks = 0 if fault == "the begin token is forgotten" else case["mask"]["sinks"]
        seen &= (i - j < window) | (j < sinks) if case["mask"]["window"] else True
    return seen
