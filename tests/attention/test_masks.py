"""Masks are about order of arrival, never about position."""

import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_array_equal

import posx
from posx.errors import ConfigError

IDX = np.array([-1, 0, 1, 2, 3, 4])


@pytest.mark.parametrize(
    ("mask", "sees"),
    [
        (posx.causal(), lambda i, j: j <= i),
        (posx.full(), lambda i, j: True),
        (posx.window(2), lambda i, j: i - 2 < j <= i),
        (posx.window(1), lambda i, j: j == i),
        (posx.window(2, sinks=1), lambda i, j: i - 2 < j <= i or (j == 0 and j <= i)),
    ],
)
def test_visible_pairs(mask, sees):
    wanted = [[i >= 0 and j >= 0 and sees(i, j) for j in IDX] for i in IDX]
    assert_array_equal(mask.visible(jnp.asarray(IDX), jnp.asarray(IDX)), wanted)


def test_sinks_are_not_seen_before_they_arrive():
    seen = posx.window(1, sinks=3).visible(jnp.asarray(IDX), jnp.asarray(IDX))
    assert not np.triu(np.asarray(seen), 1).any()


def test_masks_are_values():
    assert posx.window(4) == posx.window(4) != posx.window(5)
    assert hash(posx.causal()) == hash(posx.attention.Mask())


@pytest.mark.parametrize("fields", [{"window": -1}, {"sinks": -1}, {"window": 3.5}, {"window": 4, "causal": False}])
def test_masks_that_cannot_be(fields):
    with pytest.raises(ConfigError, match="^mask: "):
        posx.attention.Mask(**fields)


def test_a_window_of_no_tokens_is_not_taken_for_no_window():
    with pytest.raises(ConfigError, match="size=0 must be at least 1"):
        posx.window(0)


def test_masks_have_no_subclasses():
    """Tile skipping and fused kernels read a mask's fields: another `visible` would give wrong numbers."""
    with pytest.raises(ConfigError, match="cannot be subclassed"):
        type("Blocks", (posx.attention.Mask,), {})


def test_attend_refuses_a_mask_that_is_an_array():
    x = jnp.ones((1, 4, 1, 2))
    with pytest.raises(ConfigError, match=r"mask is ndarray: give posx.causal\(\)"):
        posx.attend(
            posx.build("nope", posx.Dims(2, 1, 2, 1, 4)),
            {},
            x,
            x,
            x,
            np.arange(4, dtype=np.int32),
            mask=np.tri(4, dtype=bool),
        )
