"""Attention in float64 around a rotation or a bias of another library, and the forms of these functions."""

import types

import numpy as np
import torch

ALIBI = ("alibi_4", "alibi_6", "alibi_8", "alibi_12")
#: The type of the vectors that a library rotates: audit.py runs both.
given = types.SimpleNamespace(dtype="float32")
#: The longest text for functions that build a table of all positions or all pairs.
LONGEST = 5000


def attend(case, q=None, k=None, bias=0.0):
    """Return softmax(q k / sqrt(d) + bias) v for the keys that each query sees."""
    q, k = (case[name] if x is None else np.asarray(x, np.float64) for name, x in (("q", q), ("k", k)))
    k, v = (np.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, case["v"]))
    logits = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(q.shape[-1]) + np.asarray(bias, np.float64)
    logits = np.where(case["visible"], logits, -1e300)
    with np.errstate(invalid="ignore"):  # a library may overflow
        weights = np.exp(logits - logits.max(-1, keepdims=True))
    return np.einsum("hqk,khd->qhd", weights / weights.sum(-1, keepdims=True), v)


def rotary(rotate):
    """Return an adapter from rotate(case, x [t, h, d], pos [t]) -> [t, h, d], None if it has no such positions."""

    def outputs(case):
        parts = [rotate(case, case[name], case[f"{name}_pos"]) for name in "qk"]
        return None if any(part is None for part in parts) else attend(case, *parts)

    return outputs


def additive(bias):
    """Return an adapter from bias(case) -> [h, q, k], None if it has no such positions."""

    def outputs(case):
        found = bias(case)
        return None if found is None else attend(case, bias=found)

    return outputs


def by_slot(case, bias):
    """Return [h, q, k] from bias(i, j) -> [h, i, j], which has no positions: the last i of j tokens in a row."""
    first, length = case["q_pos"].min(), case["k_pos"].max() + 1
    if length > LONGEST:
        return None
    rows = np.asarray(bias(int(length - first), int(length)))
    return rows[:, case["q_pos"] - first][:, :, case["k_pos"]]


def row(case):
    """Return whether slots are positions: one text from 0 on without padding, its last tokens as queries."""
    n = len(case["k"])
    return case["k_pos"].tolist() == list(range(n)) and case["q_pos"].tolist() == list(range(n))[-len(case["q"]) :]


def interleaved(x, width):
    """Move channels (c, c + width/2) to (2c, 2c + 1). Logits do not notice if queries and keys move alike."""
    moved = np.stack(np.split(x[..., :width], 2, axis=-1), axis=-1).reshape(*x.shape[:-1], width)
    return np.concatenate([moved, x[..., width:]], axis=-1)


def rule(case):
    """Return the settings of RoPE and of its rule of frequencies."""
    return case["settings"], case["settings"]["frequencies"]


def factors(case):
    """Return the factors of the linear rule and of the NTK rule."""
    scaled = case["settings"].get("frequencies", {"name": "geometric"})
    return tuple(scaled["factor"] if scaled["name"] == name else 1.0 for name in ("linear", "ntk"))


def each(families, adapter):
    """Return the same adapter for several families."""
    return dict.fromkeys(families, adapter)


def tensor(x):
    """Return an array as a tensor, of the type that is audited if it has fractions."""
    kind = getattr(torch, given.dtype) if x.dtype == np.float64 else torch.int64
    return torch.from_numpy(np.ascontiguousarray(x)).to(kind)


def heads_first(x):
    """Return x [t, h, d] as a tensor [1, h, t, d]."""
    return tensor(x).transpose(0, 1)[None]


def rotated(case, x):
    """Return x as a tensor [1, h, t, d] with the planes of a case interleaved, for libraries that know this layout."""
    settings = case["settings"].get("rope", case["settings"])
    return heads_first(interleaved(x, settings["rotary_dim"]) if settings["layout"] == "half_split" else x)


def tokens_first(x):
    """Return a tensor [1, h, t, d] as an array [t, h, d]."""
    return x[0].transpose(0, 1).float().numpy()
