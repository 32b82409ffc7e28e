"""Several maps of queries and keys, and which of them meet by the positions of a pair: all executors, decoding, chains.

The encoding here is ReRoPE (Su 2023): RoPE up to distance w, and from there on as if the distance were w.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose

import posx
from posx.attention import products
from posx.attention.blockwise import Tiling, blockwise
from posx.config.model import ModelConfig
from posx.encodings import Chain, Encoding
from posx.errors import ConfigError
from posx.generate import prefill
from posx.model import Model
from posx.plots import effects, models
from posx.testing import DIMS, check_encoding

ROPE = posx.build("rope", DIMS)


@dataclasses.dataclass(frozen=True)
class ReRope(Encoding):
    window: int = 3

    def query(self, params, vectors, pos, features):
        return ROPE.query({}, vectors, pos, {}), ROPE.query({}, vectors, jnp.full_like(pos, self.window), {})

    def key(self, params, vectors, pos, features):
        return ROPE.key({}, vectors, pos, {}), vectors

    def regime(self, params, q_pos, k_pos):
        return jnp.where(q_pos[:, None] - k_pos[None, :] < self.window, 0, 1)


def by_hand(params, x, project, pos, visible):
    """One pair after the other: q turned by min(r, w)."""
    q, k, v = project(x)
    d, group, o = q.shape[-1], q.shape[1] // k.shape[1], np.zeros((*q.shape[:2], v.shape[-1]))
    theta = 10000.0 ** (-np.arange(0, d, 2) / d)
    for i, h in np.ndindex(q.shape[:2]):
        seen = np.flatnonzero(visible[i])
        if not len(seen):
            continue
        s = []
        for j in seen:
            turn = np.exp(1j * min(pos[i] - pos[j], 3) * theta)
            q_planes, k_planes = (a[: d // 2] + 1j * a[d // 2 :] for a in (q[i, h], k[j, h // group]))
            s.append((q_planes * turn * k_planes.conj()).real.sum() / np.sqrt(d))
        w = np.exp(np.array(s) - max(s))
        o[i, h] = w / w.sum() @ v[seen, h // group]
    return o


def test_the_contract_holds():
    checks = ("reference", "gradients", "packing", "decode")
    report = check_encoding(ReRope(), reference=by_hand, only=checks)
    assert report.ok, str(report)


def test_it_chains_with_biases_and_temperatures():
    report = check_encoding(
        Chain((ReRope(), posx.build("t5(scaled=false)", DIMS))),
        only=["gradients", "decode"],
    )
    assert report.ok, str(report)


def test_a_window_as_long_as_the_text_is_rope():
    rng, pos = np.random.default_rng(0), np.arange(40, dtype=np.int32)
    q, k, v = (rng.standard_normal((2, 40, 4, 6)).astype(np.float32) for _ in "qkv")
    for executor in ("dense", "blockwise"):
        run = jax.jit(functools.partial(posx.attend, q_pos=pos, k_pos=pos, executor=executor), static_argnums=0)
        found, wanted = (run(encoding, {}, q, k, v) for encoding in (ReRope(40), ROPE))
        assert_allclose(found, wanted, atol=1e-6)


def test_a_tile_of_one_regime_costs_one_product(monkeypatch):
    """Four tiles on the diagonal and three beside it hold pairs of both regimes, three far ones of the second alone."""
    ran, plain = [], products.products

    def counted(q, k):
        jax.debug.callback(lambda: ran.append(1))
        return plain(q, k)

    monkeypatch.setattr(products, "products", counted)
    pos, x = np.arange(32, dtype=np.int32), np.ones((1, 32, 4, 6), np.float32)
    executor = functools.partial(blockwise, tiling=Tiling(8, 8))
    jax.block_until_ready(posx.attend(ReRope(), {}, x, x, x, q_pos=pos, k_pos=pos, executor=executor))
    jax.effects_barrier()
    assert len(ran) == 2 * (4 + 3) + 3


def test_a_model_decodes_what_it_gives_for_the_whole():
    config = ModelConfig(num_layers=1, model_dim=24, num_heads=4)
    model = Model(config, (ReRope(),), 11, config.dims(16))
    params = model.init(jax.random.key(0))
    tokens = np.random.default_rng(0).integers(0, 11, (2, 9)).astype(np.int32)
    whole = jax.jit(model)(params, tokens, np.arange(9, dtype=np.int32))
    found, _ = prefill(model, params, tokens, model.empty_cache(2, 12), chunk=3)
    assert_allclose(found, whole[:, -1], atol=1e-5)


def test_pictures_take_the_map_of_each_distance():
    subject = models.Subject("rerope", "a test", ReRope(3), {}, DIMS)
    distances, found = effects.match_by_distance(subject)
    rope = effects.match_by_distance(dataclasses.replace(subject, encoding=ROPE))[1]
    assert_allclose(found[:, distances < 3], rope[:, distances < 3], atol=1e-6)
    assert_allclose(found[:, distances >= 3], np.repeat(rope[:, distances == 3], (distances >= 3).sum(), 1), atol=1e-6)


def test_what_fits_no_regimes_is_refused():
    @dataclasses.dataclass(frozen=True)
    class Cached(ReRope):
        caches_mapped_keys = True

    @dataclasses.dataclass(frozen=True)
    class OneMap(ReRope):
        def query(self, params, vectors, pos, features):
            return vectors

    @dataclasses.dataclass(frozen=True)
    class Half(ReRope):
        def regime(self, params, q_pos, k_pos):
            return (q_pos[:, None] - k_pos[None, :]).astype(jnp.float32)

    with pytest.raises(ConfigError, match="caches_mapped_keys must be False"):
        posx.build(Cached(), DIMS)
    with pytest.raises(ConfigError, match="keys 6 wide in 2 regimes"):
        posx.build(OneMap(), DIMS)
    with pytest.raises(ConfigError, match="whole numbers"):
        posx.build(Half(), DIMS)
    with pytest.raises(ConfigError, match="both have regimes"):
        Chain((ReRope(), ReRope(4)))
    with pytest.raises(ValueError, match="acts on regime"):
        pos, x = np.arange(4, dtype=np.int32), np.zeros((1, 4, 4, 6), np.float32)
        posx.attend(ReRope(), {}, x, x, x, q_pos=pos, k_pos=pos, executor="fused")
