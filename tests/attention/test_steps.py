"""Tiles of whole rows: each part of the queries meets the keys up to its own end."""

import functools

import jax
import numpy as np
import pytest
from numpy.testing import assert_allclose

import posx
from posx.attention import blockwise as module
from tests.encodings.cases import DIMS, params_of
from tests.encodings.probes import vectors

B, T = 2, 9


@pytest.mark.parametrize("spec", ["cope", "dape(kernel=3)"])
def test_parts_of_the_queries_give_what_dense_gives(monkeypatch, spec):
    monkeypatch.setattr(module, "STEPS", (2, 2))
    widths, given = [], module.make_plan
    monkeypatch.setattr(module, "make_plan", lambda pairs, *how: widths.append(pairs.sizes) or given(pairs, *how))
    encoding, shape = posx.build(spec, DIMS), (B, T, DIMS.num_heads, DIMS.head_dim)
    params, (q, k, v) = params_of(encoding), (vectors(*shape, seed=n) for n in range(3))

    def outputs(executor, *vectors):
        return (posx.attend(encoding, params, *vectors, np.arange(T, dtype=np.int32), executor=executor) ** 2).sum()

    found, wanted = (
        jax.jit(jax.grad(functools.partial(outputs, name), (0, 1, 2)))(q, k, v) for name in ("blockwise", "dense")
    )
    assert widths == [(4, 4), (5, 9)]
    for one, other in zip(found, wanted, strict=True):
        assert_allclose(one, other, atol=1e-4)
