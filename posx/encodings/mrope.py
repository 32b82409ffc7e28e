"""Multimodal RoPE: each plane reads one axis of a position."""

import dataclasses
from typing import Annotated, Literal, Self

import jax
import jax.numpy as jnp
import numpy as np

from posx.contract import About, Dims, Encoding, Features, Params, fact
from posx.contract.fields import Base
from posx.encodings.angles import sin_cos
from posx.encodings.frequencies import FrequencyRule, Geometric
from posx.encodings.rope import check_base, rotate_heads
from posx.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Mrope(Encoding):
    """A rotation of plane c at position p by p_a(c) theta_c, theta_c = base^(-2c/d): each plane reads one of n axes.

    All axes share one series of frequencies, so that equal numbers on all axes, as texts have, are plain RoPE. Section
    a of `sections` is the number of planes that read axis a, and d is twice the sum of the sections. The channels from
    d on pass unchanged. The default sections are the published shares of time, height and width, 2 : 3 : 3, of all
    planes of a head. `order` is "contiguous" (Qwen2-VL): the first planes, which are the fastest, read axis 0, the next
    ones axis 1. Or it is "interleaved" (Qwen3-VL): plane c reads axis c mod n as long as that axis has planes left,
    then axis 0. `layout` and `frequencies` are those of `rope`.

    Reference: Wang et al. 2024, Qwen2-VL, arXiv 2409.12191, section 2.1; interleaved: Qwen3-VL in Hugging Face
    transformers.
    Differs: Qwen2-VL has base 1,000,000 and half-split planes. Its positions begin after an image at the largest number
    of all axes plus one. Positions are given here, so that a caller decides.
    """

    sections: Annotated[tuple[int, ...], "planes"] | None = None
    order: Literal["contiguous", "interleaved"] = "contiguous"
    base: Base = 10000.0
    layout: Literal["half_split", "interleaved"] = "half_split"
    frequencies: FrequencyRule = Geometric()  # noqa: RUF009 (a value)

    axes = fact(lambda self: len(self.sections or "thw"))
    planes = fact(lambda self: f"sections {self.sections} of {self.layout}, {self.order}")
    about = About("arXiv 2409.12191", "as RoPE along each axis; rises at 4 L on pictures")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sections is None:
            return
        if len(self.sections) < 2 or min(self.sections) < 1:
            raise ConfigError(f"mrope: sections={self.sections} must be at least 1 plane on each of at least 2 axes")
        counts = tuple(map(len, self._planes_by_axis()))
        if counts != self.sections:
            raise ConfigError(
                f"mrope: sections={self.sections} cannot be interleaved, which gives the axes {counts} planes. Give "
                "nearly equal sections, the largest first, or order=contiguous."
            )

    def resolve(self, dims: Dims) -> Self:
        check_base("mrope", self.frequencies, self.base)
        planes = dims.head_dim // 2
        of_sides = max(3 * planes // 8, 1)
        opened = super().resolve(dims).fill_open(sections=(planes - 2 * of_sides, of_sides, of_sides))
        if 2 * sum(opened.sections) > dims.head_dim:
            raise ConfigError(
                f"mrope: sections={opened.sections} have {sum(opened.sections)} planes, but head_dim={dims.head_dim} "
                f"has {planes}"
            )
        return opened

    def _planes_by_axis(self) -> list[np.ndarray]:
        """Return the numbers of the planes that read each axis."""
        number, n = np.arange(sum(self.sections)), len(self.sections)
        if self.order == "contiguous":
            axis = np.repeat(np.arange(n), self.sections)
        else:
            axis = np.where(number < n * np.array(self.sections)[number % n], number % n, 0)
        return [np.flatnonzero(axis == own) for own in range(n)]

    def query(self, params: Params, vectors: jax.Array, pos: jax.Array, features: Features) -> jax.Array:
        planes = self._planes_by_axis()
        theta = self.frequencies.checked(self.base, 2 * sum(self.sections))
        waves = [sin_cos(pos[:, axis], theta[..., own]) for axis, own in enumerate(planes)]
        in_order = np.argsort(np.concatenate(planes))
        sin, cos = (jnp.concatenate(parts, axis=-1)[..., in_order] for parts in zip(*waves, strict=True))
        return rotate_heads(vectors, sin, cos, self.frequencies.magnitude, self.layout)

    key = query
