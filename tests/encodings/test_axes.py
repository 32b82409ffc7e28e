"""Positions with several axes: what `axial` and `mrope` compute, what may be joined, and which shapes are accepted."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import posx
from posx.encodings import Mrope, Rope
from posx.encodings.alibi import alibi_slopes
from posx.errors import ConfigError, UndefinedLength
from tests.encodings.probes import vectors

DIMS = posx.Dims(model_dim=16, num_heads=2, head_dim=8, num_layers=1, train_len=16)
#: The rows and columns of a picture of 3 x 4 patches, in raster order.
GRID = np.stack(np.divmod(np.arange(12, dtype=np.int32), 4), axis=-1)
Q, K, V = (vectors(2, 12, 2, 8, seed=seed) for seed in range(3))


def built(spec):
    encoding = posx.build(spec, DIMS)
    return encoding, encoding.init(np.array([0, 1], np.uint32), DIMS)


def attend(spec, pos=GRID, **options):
    encoding, params = built(spec)
    return np.asarray(posx.attend(encoding, params, Q, K, V, pos, mask=posx.full(), **options))


@pytest.mark.parametrize("fields", [{}, {"layout": "interleaved"}, {"sections": (2, 1, 1), "order": "interleaved"}])
def test_mrope_at_equal_numbers_on_all_axes_is_rope(fields):
    mrope = Mrope(base=50.0, **fields).resolve(DIMS)
    rope = Rope(base=50.0, layout=mrope.layout, rotary_dim=2 * sum(mrope.sections))
    pos = np.array([0, 1, 2, 5, 17, 400])
    x = vectors(len(pos), 2, 8)
    assert_array_equal(mrope.query({}, x, np.stack([pos] * 3, axis=-1), {}), rope.query({}, x, jnp.asarray(pos), {}))


def test_sections_of_mrope_are_the_published_ones():
    """By default those of Qwen2-VL. Interleaved, 24, 20 and 20 of Qwen3-VL read THW, THW, ..., then TTTT."""
    assert Mrope().resolve(dataclasses.replace(DIMS, head_dim=128)).sections == (16, 24, 24)
    ones, axis_of_plane = np.ones((1, 1, 128), np.float32), np.array([0, 1, 2] * 20 + [0] * 4)
    for axis, at in enumerate(1000 * np.eye(3, dtype=np.int32)):
        mapped = Mrope((24, 20, 20), "interleaved").query({}, ones, at[None], {})[0, 0, :64]
        assert_array_equal(np.abs(mapped - 1) > 1e-6, axis_of_plane == axis)


def test_axial_sinusoidal_is_the_table_of_mae():
    encoding, params = built("axial(inner=sinusoidal(layout=concatenated))")
    omega = 10000.0 ** (-np.arange(4) / 4)
    halves = [wave(GRID[:, [axis]] * omega) for axis in range(2) for wave in (np.sin, np.cos)]
    assert_allclose(encoding.embed(params, np.zeros((12, 16), np.float32), GRID), np.hstack(halves), atol=1e-6)


def test_axial_alibi_falls_with_the_manhattan_distance():
    encoding, params = built("axial(inner=alibi)")
    far = np.abs(GRID[:, None] - GRID[None]).sum(axis=-1)
    assert_allclose(encoding.bias(params, GRID, GRID), -alibi_slopes(2)[:, None, None] * far, rtol=1e-6)
    assert not encoding.acts_on("by_distance") and not encoding.fades


def test_axial_splits_even_parts_and_passes_the_rest():
    """Three axes share 8 channels: 2 each, and 2 pass, as in V-JEPA 2."""
    encoding = posx.build("axial(inner=rope(base=100), num_axes=3)", DIMS)
    pos = np.arange(36, dtype=np.int32).reshape(12, 3)
    parts = [Rope(base=100.0, rotary_dim=2).query({}, part, jnp.asarray(pos[:, n]), {})
             for n, part in enumerate(np.split(Q[0][..., :6], 3, axis=-1))]  # fmt: skip
    assert_allclose(encoding.query({}, Q[0], pos, {}), np.concatenate([*parts, Q[0][..., 6:]], axis=-1), atol=1e-6)


def test_each_axis_has_its_own_arrays_and_the_side_as_length():
    encoding, params = built("axial(inner=learned(beyond=interpolate))")
    assert {name: array.shape for name, array in params.items()} == {"0.table": (4, 8), "1.table": (4, 8)}
    assert encoding.shared == encoding.decayed == set(params) and encoding.max_position == 3
    assert [encoding.at_length(length).max_position for length in (16, 17, 64)] == [3, 4, 7]
    with pytest.raises(UndefinedLength, match="positions 0 to 3, but got 1 to 4"):
        attend("axial(inner=learned)", GRID + 1)


@pytest.mark.parametrize("spec", ["axial", "mrope(sections=(2, 2))", "axial(inner=kerple)", "nope+axial"])
def test_executors_agree_on_positions_with_axes(spec):
    wanted = attend(spec, executor="dense")
    kernels = ["fused"] + (["kernel"] if "kerple" not in spec else [])
    for executor in ("blockwise", *kernels):
        assert_allclose(attend(spec, executor=executor), wanted, atol=2e-6, err_msg=executor)
    rows = np.stack([GRID, GRID[:, ::-1]])
    assert_allclose(attend(spec, rows)[0], wanted[0], atol=1e-6)
    assert np.abs(attend(spec, rows)[1] - wanted[1]).max() > 1e-3
    if "kerple" in spec:
        with pytest.raises(ValueError, match="acts on bias, which the kernel does not support"):
            attend(spec, executor="kernel")


def test_positions_of_another_number_of_axes_are_refused():
    one, three = (GRID[:, 0], r"write np\.stack\(\[q_pos\] \* 2, axis=-1\)"), (GRID[:, [0, 1, 1]], r"give \[t, 2\]")
    for pos, remedy in (one, three):
        with pytest.raises(ValueError, match=rf"the encoding reads positions with 2 axes: .*{remedy}"):
            attend("axial", pos)
    with pytest.raises(ValueError, match=r"q_pos has shape \(12, 2\), but .*: give \[t\] or \[b, t\]\.$"):
        attend("rope", GRID)
    with pytest.raises(ValueError, match="q_pos is nan in the slot of a token"):
        attend("axial", np.where(GRID == 2, np.nan, GRID).astype(np.float32))


@pytest.mark.parametrize("pos", [GRID, np.stack([GRID, GRID]), GRID[:, 0]])
def test_an_encoding_that_reads_no_position_takes_any_axes(pos):
    wanted = attend("nope+learned_sinks", np.arange(12, dtype=np.int32))
    assert_array_equal(attend("nope+learned_sinks", pos, executor="blockwise"), attend("nope+learned_sinks"))
    assert_allclose(attend("nope+learned_sinks", pos), wanted, atol=1e-6)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("axial+rope", r"Rope\(.*\) reads positions with 1 axis, but Axial\(.*\) reads 2\. .*num_axes=2\)"),
        ("axial+mrope", r"Axial\(.*\) reads positions with 2 axes, but Mrope\(.*\) reads 3"),
        ("axial(inner=nope)", "axial: nope reads no position"),
        ("axial(inner=mrope)", "axial: mrope reads positions with 3 axes"),
        ("axial(inner=t5)", r"axial: t5 tells no later keys apart.* such as t5\(bidirectional=True\)"),
        ("axial(inner=key_offset+rope)", "axial: chain reads the vectors of earlier tokens"),
        ("axial(inner=fox)", "axial: fox acts on features, token_bias, which has no form along axes"),
        ("axial(inner=grape_a)", "axial: grape_a acts on score"),
        ("axial(inner=xpos)", "axial: xpos acts on decay"),
        ("axial(inner=t5(bidirectional=True, scaled=False))", "axial: t5 acts on logit_scale"),
        ("axial(inner=shaw)", r"axial: shaw returns by_distance\.query"),
        ("axial(inner=fope)", r"axial: Fope\(.*\) has head_dim"),
        ("axial(num_axes=1)", "axial: num_axes=1 must be at least 2"),
        ("axial(num_axes=5)", "axial: 8 channels are fewer than 2 for each of num_axes=5"),
        ("mrope(sections=(2,))", r"mrope: sections=\(2,\) must be at least 1 plane on each of at least 2 axes"),
        ("mrope(sections=(3, 3))", r"mrope: sections=\(3, 3\) have 6 planes, but head_dim=8 has 4"),
        ("mrope(sections=(1, 3), order=interleaved)", r"cannot be interleaved, which gives the axes \(2, 2\) planes"),
        ("mrope(base=50, frequencies=periodic(periods=(2,)))", r"mrope: base=50\.0 has no effect on periodic"),
    ],
)
def test_encodings_without_a_form_along_axes_are_refused(spec, message):
    with pytest.raises(ConfigError, match=message) as caught:
        posx.build(spec, DIMS)
    assert "\n" not in str(caught.value)


@dataclasses.dataclass(frozen=True)
class FarOnAPlane(posx.Encoding):
    """A user's own encoding of two axes, with Euclidean distances."""

    axes = 2

    def bias(self, params, q_pos, k_pos):
        far = posx.as_float(q_pos[:, None] - k_pos[None, :])
        return -jnp.sqrt((far**2).sum(axis=-1))[None]


@dataclasses.dataclass(frozen=True)
class Straight(posx.Encoding):
    axes = 2

    def by_distance(self, params, distance):
        return posx.ByDistance(bias=-posx.as_float(distance)[None])


def test_a_class_of_ones_own_may_read_axes_but_not_by_distance():
    name = f"{__name__}:FarOnAPlane"
    encoding, _ = built(name)
    assert_allclose(encoding.bias({}, GRID[:1], GRID[-1:])[0, 0, 0], -np.hypot(2, 3), rtol=1e-6)
    assert_allclose(attend(name), attend(name, executor="dense"), atol=1e-6)
    with pytest.raises(ConfigError, match=r"Straight\(\)\.axes = 2, but by_distance acts by one distance. Define bias"):
        built(f"{__name__}:Straight")
