"""Encodings are values: nothing is remembered between two of them, and equal ones share one trace."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose

import posx
from posx.conformance.subject import add_axes
from tests.encodings.cases import DIMS, SPECS, first, layer, params_of, projections, reference_layer, tokens

#: Two values per encoding whose parameters have the same shapes, so that only hyper-parameters tell them apart.
PAIRS = {
    "sinusoidal": ({"base": 100.0}, {"layout": "concatenated"}),
    "learned": ({"beyond": "interpolate"}, {"beyond": "clamp"}),
    "shaw": ({"max_distance": 4, "values": True}, {"max_distance": 4, "values": False}),
    "transformer_xl": ({"clamp_len": 3}, {"base": 50.0}),
    "t5": ({"num_buckets": 8, "max_distance": 16}, {"num_buckets": 8, "max_distance": 6}),
    "tupe": ({"untied": (1,)}, {"untied": (2,)}),
    "deberta": ({"max_distance": 4}, {"max_distance": 4, "release_index": True}),
    "rope": ({"base": 100.0}, {"layout": "interleaved"}),
    "pope": ({"base": 100.0}, {"base": 50.0}),
    "fope": ({"base": 50.0}, {"base": 50.0, "seed": 1}),
    "darope": ({"base": 100.0}, {"original_len": 5}),
    "selective_rope": ({"base": 100.0}, {"base": 50.0}),
    "accumulated_rope": ({"base": 100.0}, {"base": 50.0}),
    "rotated_values": ({"base": "rope(base=100)"}, {"base": "rope(base=50)"}),
    "self_extend": ({"window": 3}, {"window": 3, "group": 2}),
    "dual_chunk": ({"chunk": 3, "window": 5}, {"chunk": 4, "window": 5}),
    "mrope": ({"base": 100.0}, {"layout": "interleaved"}),
    "axial": ({"inner": "rope(base=100)"}, {"inner": "rope(base=50)"}),
    "key_offset": ({"share": 0.5}, {"share": 1.0}),
    "canon": ({"kernel": 3}, {"kernel": 3}),
    "alibi": ({"scale": "linear"}, {"scale": "log"}),
    "xpos": ({"scale_base": 8.0}, {"scale_base": 20.0}),
    "fox": ({"gate": "forget"}, {"gate": "cable"}),
    "cope": ({"num_positions": 5}, {"num_positions": 5, "scaled": False}),
    "dape": ({"base": "t5(num_buckets=8, max_distance=16)"}, {"base": "t5(num_buckets=8, max_distance=6)"}),
    "inkling": ({"extent": 4}, {"extent": 4}),
    "grape_a": ({"unit": True}, {"unit": False}),
    "gape": ({"original_len": 4}, {"original_len": 9}),
    "path": ({"rank": 3}, {"rank": 3}),
    "kerple": ({"form": "log"}, {"form": "power"}),
    "bam": ({"learned": ("shape",), "initial_scale": 0.1}, {"learned": ("shape",), "initial_scale": 0.5}),
    "sandwich": ({"first": 0}, {"first": 1}),
    "fire": ({"threshold": 4.0}, {"threshold": 2.0}),
    "dynamic_bias": ({"log_distance": True}, {"log_distance": False}),
    "nape": ({"slopes": "linear"}, {"slopes": "exponential"}),
    "log_length": ({"train_len": 3}, {"train_len": 5}),
    "ssmax": ({"initial": 1.0}, {"initial": 2.0}),
    "llama4_temperature": ({"floor_scale": 2}, {"floor_scale": 3}),
    "adaptive_temperature": ({"gamma_range": 1.0}, {"gamma_range": 0.5, "delta": 0.0}),
}
T = 9
IDX = np.arange(T, dtype=np.int32)[None]


def test_every_encoding_with_fields_has_a_pair():
    assert PAIRS.keys() == {name for name, cls in posx.ENCODINGS.items() if dataclasses.fields(cls)}


@pytest.mark.parametrize("name", first(PAIRS, ("shaw", "fox", "cope")))
def test_two_values_in_one_process_do_not_touch_each_other(name):
    pair = [posx.build({"name": name, **fields}, DIMS).at_length(40) for fields in PAIRS[name]]
    weights, x, programs = projections(), tokens(1, T), []
    for encoding in (*pair, *pair):

        def run(params, encoding=encoding):
            return layer.__wrapped__(encoding, params, weights, x, IDX, IDX, 0 * IDX)

        params = params_of(encoding)
        if encoding not in dict(programs):  # what is traced after the other one is the same program as before
            wanted = reference_layer(encoding, params, weights, x, IDX, IDX, 0 * IDX)
            assert_allclose(jax.jit(run)(params), wanted, rtol=0, atol=1e-4)
        programs.append((encoding, jax.jit(run).lower(params).as_text()))
    assert programs[:2] == programs[2:]


@pytest.mark.parametrize("name", first(posx.ENCODINGS, ("shaw", "fox")))
def test_equal_values_share_one_trace(name):
    traces = []

    @functools.partial(jax.jit, static_argnums=0)
    def run(encoding, params, q, pos):
        traces.append(encoding)
        k = q[:, :, : DIMS.num_kv_heads]
        x = jnp.ones((1, T, DIMS.model_dim)) if encoding.acts_on("features") else None
        return posx.attend(encoding, params, q, k, k, pos, x=x)

    for seed, start in ((0, 0), (1, 5)):
        encoding = posx.build(SPECS[name], DIMS)
        q = np.random.default_rng(seed).standard_normal((1, T, DIMS.num_heads, DIMS.head_dim)).astype(np.float32)
        pos = add_axes(encoding, np.arange(start, start + T, dtype=np.int32))
        run(encoding, params_of(encoding, seed=seed), q, pos)
    assert len(traces) == 1
