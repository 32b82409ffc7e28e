"""Encodings that the tokens decide on, once more in float64 NumPy loops; as `reference`, it imports nothing from posx.

Each is (encoding, params, x [t, m], project, pos [t], visible [t, t]) -> outputs [t, h, d] of one sequence.
"""

import math

import numpy as np


def attended(q, k, v, visible, logit):
    """Outputs of logits logit(i, j, h, q_i, k_j) over the visible pairs."""
    o, group = np.zeros((*q.shape[:2], v.shape[-1])), q.shape[1] // k.shape[1]
    for i, h in np.ndindex(q.shape[:2]):
        seen = np.flatnonzero(visible[i])
        if len(seen):
            s = np.array([logit(i, j, h, q[i, h], k[j, h // group]) for j in seen])
            w = np.exp(s - s.max())
            o[i, h] = w / w.sum() @ v[seen, h // group]
    return o


def fox(encoding, params, x, project, pos, visible):
    q, k, v = project(x)
    z = params["b"] + (0 if encoding.gate == "constant" else x @ params["w"])
    z = np.broadcast_to(-z if encoding.gate == "cable" else z, (len(x), q.shape[1]))
    log_f = np.log(1 / (1 + np.exp(-z)))

    def logit(i, j, h, q_i, k_j):
        between = [n for n in range(j + 1, i + 1) if visible[i, n]]
        return q_i @ k_j / math.sqrt(len(q_i)) + sum(log_f[n, h] for n in between)

    return attended(q, k, v, visible, logit)


WHOLE = {"fox": fox}
