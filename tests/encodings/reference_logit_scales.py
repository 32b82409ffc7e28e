"""Logit scales that depend on the layer input, in float64 NumPy, written from their papers as in `reference`."""

import math

import numpy as np

from golden import reference


def adaptive_temperature(encoding, params, x, project, pos, visible):
    """Outputs [t, h, d]: plain attention, each query times its logit scale."""
    q, k, v = project(x)
    scaled = q.copy()
    for i, p in enumerate(pos.tolist()):
        for n in range(q.shape[1] - encoding.plain_heads):
            h = n + encoding.plain_heads
            beta = math.log(1 + math.exp(x[i] @ params["w_beta"][:, n]))
            gamma = encoding.gamma_range * math.tanh(x[i] @ params["w_gamma"][:, n])
            scaled[i, h] *= encoding.delta + beta * math.log(p + 2) ** gamma
    return reference.reference("nope", encoding, {}, scaled, k, v, pos.tolist(), pos.tolist(), np.asarray(visible))


WHOLE = {"adaptive_temperature": adaptive_temperature}
