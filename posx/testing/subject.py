"""The encoding under test: sizes, random parameters, a batch of position families, and the compiled programs that the
checks share.

Compile time is nearly all that a check costs, so there is one program for each way through the formula, and positions,
arrival orders, documents and vectors are its inputs. The mask is a window of WINDOW places in the arrival order: where
orders count up by 1 it hides nothing, by STEP it is one of five tokens, and where all are 0 every token sees all.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from posx.attention import attend, batch_features, window
from posx.attention.blockwise import Tiling, blockwise
from posx.attention.dense import dense
from posx.attention.fused import fused
from posx.attention.masks import Mask
from posx.encodings import Dims, Encoding, Params
from posx.errors import ConfigError
from posx.testing.dtypes import types_found

#: Every size differs from every other, so that no two axes can be mistaken for each other.
DIMS = Dims(model_dim=12, num_heads=4, head_dim=6, num_layers=2, train_len=32, num_kv_heads=2)
LENGTH = 13
#: The last position of the batch, for encodings that have no limit of their own, and the last that they must have.
LARGEST, LEAST = 3000, 29
PADDING, PREFIX = 4, 8
FAMILIES = ("sequential", "offset", "gappy", "random", "repeated", "reversed", "left padded", "two documents")
ROWS = len(FAMILIES)

STEP = 10
WINDOW = window(5 * STEP)

#: Tiles that divide neither number of tokens: four query blocks, three key blocks.
small_tiles = functools.partial(blockwise, tiling=Tiling(4, 5))
#: Key blocks of whole query blocks, as the default has them: tiles off the diagonal need no mask.
even_tiles = functools.partial(blockwise, tiling=Tiling(2, 4))
#: The fused kernel for 5 queries at a time where there is a bias; 13 take three calls, and fill the last one up.
small_slabs = functools.partial(fused, slab_pairs=5 * LENGTH)


class Floats(NamedTuple):
    """What gradients are taken of. x is None where no hook reads it, and else adds its projections to q, k and v."""

    params: Params
    x: Any  # [b, t, m]
    q: Any  # [b, t, h, d]
    k: Any  # [b, t, g, d]
    v: Any  # [b, t, g, d]

    def changed(self, tokens: np.ndarray) -> Floats:
        """With other vectors for some tokens, bool [t]."""
        x, *vectors = (None if a is None else a + 100 * tokens.reshape(1, -1, *[1] * (a.ndim - 2)) for a in self[1:])
        return Floats(self.params, x, *vectors)


class Where(NamedTuple):
    """Positions, arrival orders and document numbers, int32, each [b, t]; None where `attend` is given none."""

    pos: Any
    idx: Any = None
    segment: Any = None


def families(limit: int) -> Where:
    """One sequence per family of positions up to `limit`, all of LENGTH tokens."""
    rng, order = np.random.default_rng(1), np.arange(LENGTH)
    pos = {
        "sequential": order,
        "offset": limit - LENGTH + 1 + order,
        "gappy": order + 3 * (order > 4) + 11 * (order > 8),
        "random": np.sort(rng.choice(limit + 1, LENGTH, replace=False)),
        "repeated": order // 3,
        "reversed": order[::-1] + 2,
        "left padded": np.maximum(order - PADDING, 0),
        "two documents": np.where(order < 6, order, order - 6),
    }
    idx = {"left padded": np.where(order < PADDING, -1, order - PADDING)}
    segment = {"two documents": (order >= 6).astype(int)}
    rows = ([given.get(family, default) for family in FAMILIES] for given, default in (
        (pos, None), (idx, order), (segment, 0 * order),
    ))  # fmt: skip
    return Where(*(np.array(row, np.int32) for row in rows))


class Subject:
    """One encoding, built for `dims`, with everything random in float64."""

    def __init__(self, encoding: Encoding, dims: Dims, reference: Any = None, bidirectional: bool = False):
        self.encoding, self.dims = encoding, dims
        self.reference, self.bidirectional = reference, bidirectional
        last = encoding.max_position
        if last is not None and last < LEAST:
            raise ConfigError(
                f"{encoding} is defined for positions 0 to {last}, but the checks need those to {LEAST}: give it more, "
                f"or a train_len of at least {LEAST + 1}"
            )
        self.limit = LARGEST if last is None else last
        self.where = families(self.limit)
        self.unpacked = self.where._replace(segment=0 * self.where.segment)
        #: Positions that count up by one, known on the host.
        self.known = np.arange(6, 6 + LENGTH, dtype=np.int32)
        self.in_order = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), (ROWS, LENGTH))
        h, g, d, m = dims.num_heads, dims.num_kv_heads or dims.num_heads, dims.head_dim, dims.model_dim
        self.reads_x = encoding.acts_on("embed") or encoding.acts_on("features")
        heads = {"q": h, "k": g, "v": g}
        drawn = {name: self.random(n, ROWS, LENGTH, size, d) for n, (name, size) in enumerate(heads.items())}
        x = self.random(3, ROWS, LENGTH, m) if self.reads_x else None
        self.floats = Floats(self.params(), x, **drawn)
        projections = {name: 0.3 * self.random(4, m, size, d) for name, size in heads.items()}
        self.weights = projections if encoding.acts_on("embed") else None
        self.cotangent = self.random(5, ROWS, LENGTH, h, d)
        self._programs: dict[Any, Any] = {}

    @functools.cached_property
    def strict(self) -> bool:
        """Whether the hooks run without silent broadcasting between ranks and silent mixing of types."""
        try:
            for vectors in ("float32", "float64", "bfloat16"):
                types_found(self.encoding, self.dims, vectors)
        except ConfigError:
            return False
        return True

    @functools.cached_property
    def wide(self) -> bool:
        """Whether float64 surely stays float64 in every hook; where types mix, it may have been rounded on the way."""
        try:
            found = types_found(self.encoding, self.dims, "float64")
        except ConfigError:
            return False
        return all(kinds <= {"float64"} for kinds in found.values())

    @property
    def exact(self) -> float:
        """What float64 may be off by; more, where a hook may make float32 of it."""
        return 1e-10 if self.wide else 1e-5

    @property
    def rough(self) -> float:
        """What float32 may be off by; accelerators round the operands of its products too."""
        return 1e-5 if jax.default_backend() == "cpu" else 1e-2

    @property
    def no_weights(self) -> Any:
        """Projections that add nothing, so that vectors are what is given."""
        return jax.tree.map(np.zeros_like, self.weights)

    def single(self, tree: Any) -> Any:
        return jax.tree.map(lambda a: np.asarray(a, np.float32), tree)

    def random(self, seed: int, *shape: int) -> np.ndarray:
        return np.random.default_rng(seed).standard_normal(shape)

    def params(self, seed: int = 0) -> Params:
        """Large random arrays in the shapes of `init`, so that each one changes the outputs well above rounding."""
        shapes = jax.eval_shape(lambda: self.encoding.init(jax.random.key(0), self.dims))
        rng = np.random.default_rng(seed)
        return {name: 0.5 * rng.standard_normal(a.shape) for name, a in shapes.items()}

    def layer(self, weights: Any, floats: Floats, where: Where, executor: Any, mask: Mask = WINDOW) -> jax.Array:
        """One attention layer [b, t, h, d]: tokens are embedded and projected, and added to the vectors given."""
        params, x, *vectors = floats
        if weights is not None:
            by_row = 0 if where.pos.ndim == 2 else None
            x = jax.vmap(self.encoding.embed, in_axes=(None, 0, by_row))(params, x, where.pos)
            vectors = [a + jnp.einsum("btm,mhd->bthd", x, weights[n]) for n, a in zip("qkv", vectors, strict=True)]
        return attend(
            self.encoding, params, *vectors, q_pos=where.pos, k_pos=where.pos, q_idx=where.idx, k_idx=where.idx,
            q_segment=where.segment, k_segment=where.segment, x=x, executor=executor, mask=mask,
        )  # fmt: skip

    def with_gradients(self, weights: Any, floats: Floats, where: Where, cotangent: Any, executor: Any, mask: Mask):
        """Outputs of the layer, and gradients of `floats` for what comes back."""

        def loss(floats: Floats):
            o = self.layer(weights, floats, where, executor, mask)
            return jnp.sum(o.astype(cotangent.dtype) * cotangent), o

        grads, o = jax.grad(loss, has_aux=True)(floats)
        return o, grads

    def dense(
        self, where: Where, floats: Floats | None = None, cotangent: Any = None, weights: Any = None
    ) -> tuple[np.ndarray, Floats]:
        """The oracle, dense in float64: outputs [b, t, h, d] and gradients."""
        given = self.floats if floats is None else floats, where, self.cotangent if cotangent is None else cotangent
        run = self.compiled("dense", functools.partial(self.with_gradients, executor=dense, mask=WINDOW))
        with jax.enable_x64(True):
            return jax.device_get(run(self.weights if weights is None else weights, *given))

    def of_tokens(self, hook: str, pos: np.ndarray) -> Any:
        """What the hook `temperature` or `potential` gives for each sequence at pos [b, t], in float64."""

        def run(floats: Floats, pos: Any) -> Any:
            reads = self.encoding.acts_on("features")
            features = batch_features(self.encoding, floats.params, floats.x, pos)[0] if reads else {}
            return jax.vmap(getattr(self.encoding, hook), in_axes=(None, 0, 0))(floats.params, pos, features)

        with jax.enable_x64(True):
            return jax.device_get(self.compiled(hook, run)(self.floats, pos))

    def tiles(
        self, where: Where, floats: Floats | None = None, cotangent: Any = None, params: Any = None
    ) -> tuple[np.ndarray, Floats]:
        """The same in small tiles, by `vmap` over sequences: gradients of params have a row each.

        params: for each row; those of `floats` for all if left out.
        """
        floats = self.floats if floats is None else floats
        by_row = jax.tree.map(lambda a: np.broadcast_to(a, (ROWS, *a.shape)), floats.params)
        floats = floats._replace(params=by_row if params is None else params)
        with jax.enable_x64(True):
            run = self.compiled("tiles", jax.vmap(self._row_in_tiles, in_axes=(None, 0, 0, 0)))
            return jax.device_get(run(self.weights, floats, where, self.cotangent if cotangent is None else cotangent))

    def _row_in_tiles(self, weights: Any, floats: Floats, where: Where, cotangent: Any) -> tuple[Any, Floats]:
        """A batch of one sequence; params have no batch axis."""
        vectors, where, cotangent = jax.tree.map(lambda a: a[None], (floats._replace(params={}), where, cotangent))
        vectors = vectors._replace(params=floats.params)
        o, grads = self.with_gradients(weights, vectors, where, cotangent, executor=small_tiles, mask=WINDOW)
        own = jax.tree.map(lambda a: a[0], grads._replace(params={}))
        return o[0], own._replace(params=grads.params)

    def at_known_positions(self, executor: Any, mask: Mask) -> Any:
        """The same where positions are known to count up, so that tables of distances are read as strips: (weights,
        floats, cotangent)."""

        def run(weights: Any, floats: Floats, cotangent: Any) -> Any:
            return self.with_gradients(weights, floats, Where(self.known), cotangent, executor=executor, mask=mask)

        return self.compiled(("known", executor, mask), run)

    def compiled(self, name: Any, function: Any) -> Any:
        """`function` under jit, one for each name."""
        return self._programs.setdefault(name, jax.jit(function))
