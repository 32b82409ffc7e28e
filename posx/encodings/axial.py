"""An encoding of one axis on each axis of an image or a video."""

import dataclasses
import functools
import itertools
import operator
from typing import Annotated, Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from posx.contract import (
    MAPS,
    About,
    Composite,
    Dims,
    Encoding,
    Features,
    Params,
    acting_hooks,
    bias_by_distance,
    distance_terms,
    fact,
    prefix_names,
    select_part,
    walk_values,
)
from posx.contract.fields import at_least, snake_case
from posx.encodings.rope import Rope
from posx.errors import ConfigError

#: The hooks whose vectors are split into a part for each axis, and those whose biases are summed.
SPLIT, SUMMED = ("embed", *MAPS), ("by_distance", "bias")


@dataclasses.dataclass(frozen=True)
class Axial(Composite):
    """x~ = [f_0(x_0, p_0), ..., f_(n-1)(x_(n-1), p_(n-1))]: part a of the channels reads axis a of a position.

    f is a map of `inner`: of embeddings, queries, keys, values or outputs. Each axis has parameters of its own. The
    parts are equal and even, and the channels left over pass unchanged. Biases are those of all axes added: s_ij gets
    sum_a bias_a(p_ia - p_ja), so that axial(inner=alibi) falls with the Manhattan distance. A text of L tokens counts
    as L^(1/n) positions along each axis, rounded up, in fields that depend on lengths.

    axial(inner=rope(base=100)) is the axial RoPE of vision transformers, axial(inner=sinusoidal(layout=concatenated))
    the table of MAE, axial(inner=learned) the two-dimensional table of ViT, appendix D.4.
    axial(inner=t5(bidirectional=True)) adds biases as LayoutLMv3 does.

    Reference: axial RoPE: Heo et al. 2024, arXiv 2403.13298, section 3.2. ViT: Dosovitskiy et al. 2021, arXiv
    2010.11929. MAE: He et al. 2022, arXiv 2111.06377. LayoutLMv3: Huang et al. 2022, arXiv 2204.08387. V-JEPA 2, arXiv
    2506.09985, leaves channels over.
    Differs: released code of vision transformers pairs neighbouring channels: inner=rope(layout=interleaved). MAE's
    first half of channels has the column. CROMA's ALiBi of images has Euclidean distances.
    """

    inner: Encoding = Rope(base=100.0)  # noqa: RUF009 (a value)
    num_axes: Annotated[int, "axes", at_least(2)] = 2

    axes = fact(lambda self: self.num_axes)
    planes = fact(lambda self: f"axial {self.inner.planes}" if self.inner.planes else "")
    reach = None
    fades = False
    about = About("arXiv 2403.13298", "along each axis as far as the encoding on it; RoPE rises at 4 L on pictures")

    def __post_init__(self) -> None:
        super().__post_init__()
        inner, name = self.inner, snake_case(type(self.inner))
        if refused := [hook for hook in acting_hooks(inner) if hook not in (*SPLIT, *SUMMED)]:
            raise ConfigError(
                f"axial: {name} acts on {', '.join(refused)}, which has no form along axes. Give an encoding that acts "
                f"on some of {', '.join((*SPLIT, *SUMMED))} alone."
            )
        if inner.axes != 1:
            reads = f"positions with {inner.axes} axes" if inner.axes else "no position"
            raise ConfigError(f"axial: {name} reads {reads}. Give an encoding of one axis, such as rope.")
        if inner.history:
            raise ConfigError(f"axial: {name} reads the vectors of earlier tokens, which has no form along axes.")
        if inner.causal_only:
            raise ConfigError(
                f"axial: {name} tells no later keys apart, but an earlier token may have the larger number on an "
                "axis. Give an encoding of both sides, such as t5(bidirectional=True)."
            )

    def named_parts(self) -> dict[str, Encoding]:
        return {str(axis): self.inner for axis in range(self.num_axes)}

    def with_parts(self, parts: dict[str, Encoding]) -> Composite:
        return dataclasses.replace(self, inner=parts["0"])

    def acts_on(self, hook: str) -> bool:
        by = SUMMED if hook == "bias" else (hook,) if hook in SPLIT else ()
        return any(self.inner.acts_on(one) for one in by)

    def resolve(self, dims: Dims) -> Self:
        resolved = self.with_inner(lambda inner: inner.resolve(self._part_dims(dims)))
        if sized := [part for part in walk_values(resolved.inner) if getattr(part, "head_dim", None)]:
            raise ConfigError(
                f"axial: {sized[0]} has head_dim, the width of a whole head, so it has no form along axes."
            )
        return resolved

    def at_length(self, length: int) -> Self:
        return self.with_inner(lambda inner: inner.at_length(self._side(length)))

    def init(self, rng: jax.Array, dims: Dims) -> Params:
        rngs, own = jax.random.split(rng, self.num_axes), self._part_dims(dims)
        parts = zip(self.named_parts(), rngs, strict=True)
        return {k: v for name, part in parts for k, v in prefix_names(name, self.inner.init(part, own)).items()}

    def embed(self, params: Params, x: jax.Array, pos: jax.Array) -> jax.Array:
        return self._map("embed", params, x, pos)

    def query(self, params: Params, vectors: jax.Array, pos: jax.Array, features: Features) -> jax.Array:
        return self._map("query", params, vectors, pos, features)

    def key(self, params: Params, vectors: jax.Array, pos: jax.Array, features: Features) -> jax.Array:
        return self._map("key", params, vectors, pos, features)

    def value(self, params: Params, vectors: jax.Array, pos: jax.Array, features: Features) -> jax.Array:
        return self._map("value", params, vectors, pos, features)

    def output(self, params: Params, vectors: jax.Array, pos: jax.Array, features: Features) -> jax.Array:
        return self._map("output", params, vectors, pos, features)

    def bias(self, params: Params, q_pos: jax.Array, k_pos: jax.Array) -> jax.Array:
        biases = []
        for axis, name in enumerate(self.named_parts()):
            own, at = select_part(name, params), (q_pos[:, axis], k_pos[:, axis])
            if vectors := distance_terms(self.inner, own, q_pos.dtype).keys() - {"bias"}:
                raise ConfigError(
                    f"axial: {snake_case(type(self.inner))} returns by_distance.{min(vectors)}, which has no form "
                    "along axes. Give an encoding that returns a bias alone."
                )
            biases += [bias_by_distance(self.inner, own, *at), self.inner.bias(own, *at)]
        return functools.reduce(operator.add, [bias for bias in biases if bias is not None])

    def _map(self, hook: str, params: Params, x: jax.Array, pos: jax.Array, *rest: Any) -> jax.Array:
        """Return x [..., c] with each part mapped by its axis of pos [t, n]."""
        *parts, left = jnp.split(x, self._width(x.shape[-1]) * np.arange(1, self.num_axes + 1), axis=-1)
        function = getattr(self.inner, hook)
        mapped = [function(select_part(str(a), params), part, pos[:, a], *rest) for a, part in enumerate(parts)]
        return jnp.concatenate([*mapped, left], axis=-1)

    def _width(self, channels: int) -> int:
        """Return the channels of a part. Raises ConfigError if there are fewer than two for each axis."""
        width = 2 * (channels // (2 * self.num_axes))
        if not width:
            raise ConfigError(f"axial: {channels} channels are fewer than 2 for each of num_axes={self.num_axes}.")
        return width

    def _part_dims(self, dims: Dims) -> Dims:
        """Return the sizes that the encoding of one axis sees."""
        sizes = {"train_len": self._side(dims.train_len)}
        if self.inner.acts_on("embed"):
            sizes["model_dim"] = self._width(dims.model_dim)
        if acting_hooks(self.inner, MAPS):
            sizes["head_dim"] = self._width(dims.head_dim)
        return dataclasses.replace(dims, **sizes)

    def _side(self, length: int) -> int:
        """Return the least side of a square, cube, ... with `length` places."""
        start = max(int(length ** (1 / self.num_axes)) - 1, 0)
        return next(side for side in itertools.count(start) if side**self.num_axes >= length)
