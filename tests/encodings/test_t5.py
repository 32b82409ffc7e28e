"""T5's buckets, checked against the published starts, the published formula and exact integers."""

import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import posx
from golden import reference
from posx.encodings import T5, Alibi, Chain, Nope
from posx.encodings.alibi import alibi_slopes
from posx.errors import ConfigError
from tests.encodings.probes import attention_weights, distance_bias, vectors

SIZES = [(32, 128), (32, 64), (32, 32), (16, 64), (16, 1000), (8, 20), (64, 512), (2, 9), (4, 3), (6, 11)]
DISTANCES = np.arange(-1100, 1101)


def sized(num_buckets, max_distance, **options):
    return T5(num_buckets, max_distance, head_dim=4, **options)


def buckets(encoding, distances=DISTANCES):
    return np.asarray(encoding.bucket(jnp.asarray(distances, jnp.float32)))


def first_distances(encoding):
    found = buckets(encoding, np.arange(1000))
    return np.flatnonzero(np.diff(found, prepend=-1)).tolist()


def test_published_bucket_starts():
    wide = [16, 19, 21, 24, 27, 31, 35, 40, 46, 52, 59, 67, 77, 87, 99, 113]
    assert first_distances(sized(32, 128)) == [*range(16), *wide]
    one_side = [*range(8), 8, 12, 16, 23, 32, 46, 64, 91]
    assert first_distances(sized(32, 128, bidirectional=True)) == one_side


@pytest.mark.parametrize("size", SIZES)
def test_t5_buckets_follow_the_formula_and_grow_with_distance(size):
    causal = sized(*size)
    found = buckets(causal)
    assert_array_equal(found, [reference.t5_bucket(causal, r) for r in DISTANCES.tolist()])
    past = found[DISTANCES >= 0]
    assert (np.diff(past) >= 0).all()
    assert_array_equal(past[: size[0] // 2], np.arange(size[0] // 2))
    assert (found[DISTANCES <= 0] == 0).all()
    assert (past[size[1] :] == size[0] - 1).all()


@pytest.mark.parametrize("size", [s for s in SIZES if s[0] % 4 == 0])
def test_both_sides_mirror_each_other_in_separate_buckets(size):
    encoding = sized(*size, bidirectional=True)
    found = buckets(encoding)
    assert_array_equal(found, [reference.t5_bucket(encoding, r) for r in DISTANCES.tolist()])
    past, future, half = found[DISTANCES > 0], found[DISTANCES < 0][::-1], size[0] // 2
    assert_array_equal(future, past + half)
    # Nothing after the query is at distance 0, so the first bucket of its side is never read.
    assert half not in found
    assert set(found) <= set(range(size[0])) - {half}


def exact_bucket(n, num_buckets, max_distance):
    """e + floor(log(n/e) / log(max/e) * w) without logs: the largest j with n^w e^j >= e^w max^j."""
    e = num_buckets // 2
    w = num_buckets - e
    if n < e:
        return n
    return min(num_buckets - 1, e + max(j for j in range(w + 1) if n**w * e**j >= e**w * max_distance**j))


@pytest.mark.parametrize("size", [(32, 128), (16, 64), (64, 512), (8, 64)])
def test_exact_powers_fall_into_the_upper_bucket(size):
    wanted = [exact_bucket(n, *size) for n in range(1101)]
    assert_array_equal(buckets(sized(*size), np.arange(1101)), wanted)


def test_t5_bias_is_constant_beyond_the_last_start():
    table, pos = {"table": vectors(32, 3)}, np.arange(200, dtype=np.int32)
    bias = np.asarray(distance_bias(sized(32, 128), table, pos[:, None] - pos))
    assert_array_equal(bias[:, 1:, 1:], bias[:, :-1, :-1])
    assert_array_equal(bias[:, 199, : 199 - 112], np.broadcast_to(table["table"][31][:, None], (3, 87)))


def test_tables_that_equal_other_encodings():
    q, k, pos = vectors(16, 4, 4), vectors(16, 4, 4, seed=1), np.arange(16)
    zero = {"table": jnp.zeros((32, 4))}
    plain = attention_weights(Nope(), {}, q, k, pos, mask=posx.causal())
    assert_allclose(attention_weights(sized(32, 128), zero, q, k, pos, mask=posx.causal()), plain, atol=1e-6)
    both = {"table": jnp.asarray(-alibi_slopes(4)[None] * (np.arange(64) % 32)[:, None], jnp.float32)}
    as_alibi = attention_weights(sized(64, 128, bidirectional=True), both, q, k, pos)
    assert_allclose(as_alibi, attention_weights(Alibi(4), {}, q, k, pos), atol=1e-5)


def test_without_scale_logits_are_sqrt_d_times_larger():
    q, k, pos = vectors(9, 2, 4), vectors(9, 2, 4, seed=1), np.arange(9)
    table = {"table": vectors(8, 2, seed=2)}
    unscaled = attention_weights(sized(8, 20, scaled=False), table, q, k, pos, mask=posx.causal())
    scaled = attention_weights(sized(8, 20), table, 2 * q, k, pos, mask=posx.causal())
    assert_allclose(unscaled, scaled, atol=1e-5)


def test_t5_with_one_bucket_for_the_future_needs_a_causal_mask():
    q, pos, table = vectors(9, 2, 4), np.arange(9), {"table": vectors(8, 2, seed=2)}
    for encoding, params in ((sized(8, 20), table), (Chain((Nope(), sized(8, 20))), {"1.table": table["table"]})):
        with pytest.raises(ConfigError, match=r"^T5\(num_buckets=8.* is for causal masks"):
            attention_weights(encoding, params, q, q, pos, mask=posx.full())
    ahead = np.asarray(attention_weights(sized(8, 20, bidirectional=True), table, 0 * q, q, pos, mask=posx.full()))
    assert np.ptp(ahead[0, 0, 1:]) > 0.1


def test_sharing_is_a_field():
    assert sized(32, 128).shared == {"table"}
    assert sized(32, 128, per_layer=True).shared == frozenset()


def test_t5_fractional_distances_have_the_bucket_nearer_to_0():
    """No whole distance reads bucket 4: -0.5 must not either."""
    both, causal = sized(8, 20, bidirectional=True), sized(8, 20)
    between = jnp.asarray([-3.0, -1.5, -1.0, -0.5, 0.0, 0.5, 1.5, 3.9])
    assert_array_equal(both.bucket(between), both.bucket(jnp.trunc(between)))
    assert_array_equal(both.bucket(between), [6, 5, 5, 0, 0, 0, 1, 2])
    assert_array_equal(causal.bucket(between), [0, 0, 0, 0, 0, 0, 1, 3])
