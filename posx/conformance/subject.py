"""The encoding under test: its sizes, random parameters, positions, and the compiled programs that checks share.

Compile time is nearly all that a check costs. There is one program for each executor and mask. Its inputs are
positions, arrival orders, documents and vectors. The mask is a window of 50 places in the arrival order. It hides
nothing if orders count up by 1. If they count up by STEP, it is a window of five tokens. If they are all 0, every token
sees all tokens.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from posx.attention import Slots, attend, batch_features, window
from posx.attention.blockwise import Tiling, blockwise
from posx.attention.dense import dense
from posx.attention.masks import Mask
from posx.contract import Dims, Encoding, Params, abstract_params, position_shape
from posx.contract.shapes import hook_shapes
from posx.errors import ConfigError
from posx.machine.platforms import is_on_cpu

#: Every size differs from every other size, so that no two axes can be mistaken for each other.
DIMS = Dims(model_dim=12, num_heads=4, head_dim=6, num_layers=2, train_len=32, num_kv_heads=2)
LENGTH = 13
#: The last position of the batch for encodings without a limit, the farthest distance for any, and the least limit that
#: the checks need.
LARGEST, LEAST = 3000, 29
#: Tokens that do not depend on later ones.
PREFIX = 8
#: The number of families of positions, the row of the left-padded one, and its empty slots.
ROWS, PADDED, EMPTY = 8, 6, np.arange(LENGTH) < 4
#: Arrival orders of rows in order, and positions that count up by one, known on the host.
ORDER = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), (ROWS, LENGTH))
KNOWN = np.arange(6, 6 + LENGTH, dtype=np.int32)

STEP = 10
WINDOW = window(5 * STEP)

#: Tiles that divide neither number of tokens: four query blocks, three key blocks.
small_tiles = functools.partial(blockwise, tiling=Tiling(4, 5))
#: Key blocks that are whole query blocks, as by default: tiles off the diagonal need no mask.
even_tiles = functools.partial(blockwise, tiling=Tiling(2, 4))


@contextlib.contextmanager
def promotion(strict: bool) -> Iterator[None]:
    """Set whether JAX refuses implicit promotion of ranks and types inside the block; by default it allows both."""
    rank, dtype = ("raise", "strict") if strict else ("allow", "standard")
    with jax.numpy_rank_promotion(rank), jax.numpy_dtype_promotion(dtype):
        yield


def hook_types(encoding: Encoding, dims: Dims, vectors: str) -> dict[str, set[str]] | ConfigError:
    """Return the types of the floats that each hook returns under strict promotion, or why a hook fails.

    vectors: the type of token vectors; float64 turns 64-bit types on.
    """
    try:
        with jax.enable_x64(vectors == "float64"), promotion(strict=True):
            called = hook_shapes(encoding, dims, jnp.dtype(vectors))
    except ConfigError as error:
        return error
    return {
        hook: {a.dtype.name for a in jax.tree.leaves(result) if jnp.issubdtype(a.dtype, jnp.floating)}
        for hook, (_, result) in called.items()
    }


def run_in_float64(function: Callable[..., Any], *given: Any) -> Any:
    """Call the function with 64-bit types on, and return its result on the host."""
    with jax.enable_x64(True):
        return jax.device_get(function(*given))


def random(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape)


def single(tree: Any) -> Any:
    """Return the arrays of a tree as float32."""
    return jax.tree.map(lambda a: np.asarray(a, np.float32), tree)


class Floats(NamedTuple):
    """The arrays that gradients are taken of. x is None if no hook reads it.

    If the encoding embeds, projections of x are added to q, k and v.
    """

    params: Params
    x: Any  # [b, t, m]
    q: Any  # [b, t, h, d]
    k: Any  # [b, t, g, d]
    v: Any  # [b, t, g, d]

    def map(self, function: Callable[[Any], Any]) -> Floats:
        """Apply `function` to x, q, k and v."""
        return Floats(self.params, *(None if a is None else function(a) for a in self[1:]))

    def change_tokens(self, tokens: np.ndarray) -> Floats:
        """Return floats with other vectors for some tokens, bool [t]."""
        return self.map(lambda a: a + 100 * tokens.reshape(1, -1, *[1] * (a.ndim - 2)))


class LayerResult(NamedTuple):
    """The outputs of one attention layer, and the gradients of its floats under a given cotangent."""

    outputs: Any  # [b, t, h, d]
    gradients: Floats


def add_axes(encoding: Encoding, pos: Any) -> Any:
    """Return positions [..., t] with as many axes as the encoding reads. All but the first one rise and fall."""
    further = [(2 * axis + 1) * pos % (10 + axis) for axis in range(1, encoding.axes)]
    xp: Any = np if isinstance(pos, np.ndarray) else jnp
    return xp.stack([pos, *further], axis=-1) if further else pos


def where_tokens(tokens: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return a [b, t, ...] for `tokens`, bool [t] or [b, t], and b elsewhere."""
    return np.where(np.broadcast_to(tokens, ORDER.shape).reshape(*ORDER.shape, *[1] * (a.ndim - 2)), a, b)


def with_window(slots: Slots) -> Slots:
    """Return the slots with arrival orders under which WINDOW is a window of five tokens."""
    return slots._replace(idx=np.where(slots.idx < 0, -1, slots.idx * np.int32(STEP)))


def families(limit: int) -> Slots:
    """Return one sequence of LENGTH tokens for each family of positions, none of them above `limit`."""
    order, padding = ORDER[0], EMPTY.sum()
    rows = [
        Slots(order),
        Slots(limit - LENGTH + 1 + order),  # up to the limit
        Slots(order + 3 * (order > 4) + 11 * (order > 8)),  # with gaps
        Slots(np.sort(np.random.default_rng(1).choice(min(limit, LARGEST) + 1, LENGTH, replace=False))),
        Slots(order // 3),  # repeated
        Slots(order[::-1] + 2),  # reversed
        Slots(np.maximum(order - padding, 0), np.where(EMPTY, -1, order - padding)),  # left-padded
        Slots(np.where(order < 6, order, order - 6), None, order >= 6),  # two documents
    ]
    columns = zip(zip(*rows, strict=True), (order, order, 0 * order), strict=True)
    return Slots(*(np.array([given if a is None else a for a in rows], np.int32) for rows, given in columns))


def variant(encoding: Encoding, **members: Any) -> Encoding:
    """Return the encoding with other facts or hooks."""
    cls: Any = dataclasses.dataclass(frozen=True)(type(type(encoding).__name__, (type(encoding),), members))
    fields = {field.name: getattr(encoding, field.name) for field in dataclasses.fields(encoding)}
    made = cls(**{field.name: fields[field.name] for field in dataclasses.fields(encoding) if field.init})
    for name, value in fields.items():  # those that `at_length` sets too
        object.__setattr__(made, name, value)
    return made


def check_scale(scale: str) -> None:
    """Raise ConfigError unless `scale` names random parameters, "large" or "init"."""
    if scale not in ("large", "init"):
        raise ConfigError(f"params={scale} is unknown; allowed: large, init.")


def drawn_params(encoding: Encoding, dims: Dims, scale: str) -> Params:
    """Return random arrays in float64 in the shapes of `init`, each of which changes the outputs above rounding.

    Args:
      encoding: the encoding.
      dims: the sizes that it was built for.
      scale: "large" for numbers from N(0, 0.5), whatever `init` returns. "init" for the arrays of `init`, each moved by
        noise. The noise is N(0, a tenth of the array's root mean square), or N(0, 0.1) if that is 0.

    Raises:
      ConfigError: another word.
    """
    check_scale(scale)
    rng = np.random.default_rng(0)
    if scale == "large":
        return {name: 0.5 * rng.standard_normal(a.shape) for name, a in abstract_params(encoding, dims).items()}
    start = {name: np.asarray(a, np.float64) for name, a in encoding.init(jax.random.key(0), dims).items()}
    size = {name: np.sqrt(np.mean(a**2)) or 1.0 for name, a in start.items()}
    return {name: a + 0.1 * size[name] * rng.standard_normal(a.shape) for name, a in start.items()}


class CheckSubject:
    """One encoding, built for `dims`, with parameters and random vectors in float64.

    params: "large" or "init", see `drawn_params`, or arrays by name.
    """

    def __init__(
        self,
        encoding: Encoding,
        dims: Dims,
        reference: Any = None,
        params: str | Params = "large",
    ):
        self.encoding, self.dims, self.reference = encoding, dims, reference
        last = encoding.max_position
        if last is not None and last < LEAST:
            raise ConfigError(
                f"train_len={dims.train_len}: {encoding} is defined for positions 0 to {last}, but the checks need "
                f"positions up to {LEAST}. Give it more positions, or a train_len of at least {LEAST + 1}."
            )
        self.slots = self._families(LARGEST if last is None else last)
        #: The same at positions that leave room for shifts.
        self.near = self.slots if last is None else self._families(max(LEAST, min(last // 2, LARGEST)))
        self.unpacked = self.slots._replace(segment=0 * ORDER)
        d, m = dims.head_dim, dims.model_dim
        heads = {"q": dims.num_heads, "k": dims.kv_heads, "v": dims.kv_heads}
        drawn = {name: random(n, ROWS, LENGTH, size, d) for n, (name, size) in enumerate(heads.items())}
        reads_x = encoding.acts_on("embed") or encoding.acts_on("features")
        params = drawn_params(encoding, dims, params) if isinstance(params, str) else jax.tree.map(np.float64, params)
        self.floats = Floats(params, random(3, ROWS, LENGTH, m) if reads_x else None, **drawn)
        projections = {name: 0.3 * random(4, m, size, d) for name, size in heads.items()}
        #: Projections that add nothing, so that q, k and v are the given vectors.
        self.no_weights = jax.tree.map(np.zeros_like, projections)
        self.weights = projections if encoding.acts_on("embed") else self.no_weights
        self.cotangent = random(5, ROWS, LENGTH, dims.num_heads, d)
        self._programs: dict[Any, Any] = {}
        #: The types that hooks return, or an error, by the type of token vectors.
        self.types = {vectors: hook_types(encoding, dims, vectors) for vectors in ("float32", "float64", "bfloat16")}
        #: Whether the hooks run without implicit promotion of ranks and types.
        self.strict = not any(isinstance(types, ConfigError) for types in self.types.values())
        types = self.types["float64"]
        #: Whether float64 surely stays float64 in every hook. Mixed types may round it on the way.
        self.wide = not isinstance(types, ConfigError) and all(kinds <= {"float64"} for kinds in types.values())
        #: The tolerances of float64 and float32. Accelerators round the operands of float32 products too, unless
        #: they are asked not to.
        precision = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
        is_precise = is_on_cpu() or precision in ("highest", "float32")
        self.exact, self.rough = 1e-10 if self.wide else 1e-5, 1e-5 if is_precise else 1e-2

    def _families(self, limit: int) -> Slots:
        slots = families(limit)
        return slots._replace(pos=add_axes(self.encoding, slots.pos))

    def one_document(self, pos: np.ndarray = KNOWN, idx: np.ndarray = ORDER) -> Slots:
        """Return slots as one document, at positions [t] or [b, t] on the first axis. By default they are in order."""
        pos = add_axes(self.encoding, pos)
        return Slots(np.broadcast_to(pos, (*ORDER.shape, *position_shape(self.encoding))), idx, 0 * ORDER)

    def embed_tokens(self, weights: Any, floats: Floats, pos: Any) -> Floats:
        """Embed x at positions, if the encoding embeds, and add its projections to the vectors."""
        if not self.encoding.acts_on("embed"):
            return floats
        params, x, *vectors = floats
        by_row = 0 if pos.ndim == 2 + len(position_shape(self.encoding)) else None
        x = jax.vmap(self.encoding.embed, in_axes=(None, 0, by_row))(params, x, pos)
        added = (jnp.einsum("btm,mhd->bthd", x, weights[n]) for n in "qkv")
        return Floats(params, x, *(a + b for a, b in zip(vectors, added, strict=True)))

    def layer(self, weights: Any, floats: Floats, slots: Slots, executor: Any, mask: Mask = WINDOW) -> jax.Array:
        """Return outputs [b, t, h, d] of one attention layer."""
        params, x, q, k, v = self.embed_tokens(weights, floats, slots.pos)
        return attend(self.encoding, params, q, k, v, slots, x=x, executor=executor, mask=mask)

    def _with_gradients(self, executor: Any, mask: Mask, weights: Any, floats: Floats, slots: Any, cotangent: Any):
        slots = Slots(add_axes(self.encoding, KNOWN)) if slots is None else slots

        def loss(floats: Floats) -> tuple[jax.Array, jax.Array]:
            o = self.layer(weights, floats, slots, executor, mask)
            return jnp.sum(o.astype(cotangent.dtype) * cotangent), o

        grads, o = jax.grad(loss, has_aux=True)(floats)
        return LayerResult(o, grads)

    def reorder(self, order: np.ndarray) -> tuple[Slots, Floats]:
        """Return slots and floats with the slots of every row in another order [t]."""
        return Slots(*(a[:, order] for a in self.slots)), self.floats.map(lambda a: a[:, order])

    def shift_slots(self, shifts: Iterable[int], slots: Slots | None = None) -> Iterator[tuple[int, Slots]]:
        """Yield each shift, and slots with it added to all positions along an axis, as far as they are defined."""
        slots, axes = slots or self.near, np.eye(max(self.encoding.axes, 1), dtype=np.int32)
        for n, shift in enumerate(shifts):
            if slots.pos.max() + shift <= (self.encoding.max_position or 2**31):
                along = axes[n % len(axes)] if len(axes) > 1 else np.int32(1)
                yield shift, slots._replace(pos=slots.pos + np.int32(shift) * along)

    def defined_distances(self, distances: np.ndarray) -> np.ndarray:
        """Return those of the distances [n], which grow, that the encoding has positions for."""
        last = self.encoding.max_position
        return distances if last is None else distances[distances <= last]

    def compile(self, name: Any, function: Any) -> Any:
        """Return `function` under jit, one for each name."""
        return self._programs.setdefault(name, jax.jit(function))

    def program(self, executor: Any = dense, mask: Mask = WINDOW) -> Any:
        """Return the compiled function (weights, floats, slots, cotangent) -> LayerResult.

        slots None stands for KNOWN: positions known to count up, for which tables of distances are read as strips.
        """
        return self.compile((executor, mask), functools.partial(self._with_gradients, executor, mask))

    def run(self, slots: Any, floats: Any = None, cotangent: Any = None, weights: Any = None, **how: Any) -> Any:
        """Return the LayerResult in float64 of a `program`: by default of the dense executor, the oracle."""
        floats, cotangent = floats or self.floats, self.cotangent if cotangent is None else cotangent
        weights = self.weights if weights is None else weights
        return run_in_float64(self.program(**how), weights, floats, slots, cotangent)

    def outputs(self, slots: Slots, floats: Any = None, executor: Any = dense) -> np.ndarray:
        """Return outputs [b, t, h, d] in float64, from the program of `run` if there is one."""
        if (executor, WINDOW) in self._programs:
            return self.run(slots, floats, executor=executor).outputs
        return run_in_float64(self.layer_program(executor), self.weights, floats or self.floats, slots)

    def layer_program(self, executor: Any = dense) -> Any:
        """Return the compiled function (weights, floats, slots) -> outputs."""
        return self.compile(("layer", executor), functools.partial(self.layer, executor=executor))

    def tiles(self, slots: Slots, floats: Any = None, cotangent: Any = None) -> LayerResult:
        """Return the result in float64 of small tiles."""
        return self.run(slots, floats, cotangent, executor=small_tiles)

    def run_per_token(self, hook: str, pos: np.ndarray) -> Any:
        """Return the hook `logit_scale` or `token_bias` of each sequence at pos [b, t], in float64."""

        def run(floats: Floats, pos: Any) -> Any:
            reads = self.encoding.acts_on("features")
            features = batch_features(self.encoding, floats.params, floats.x, pos)[0] if reads else {}
            return jax.vmap(getattr(self.encoding, hook), in_axes=(None, 0, 0))(floats.params, pos, features)

        return run_in_float64(self.compile(hook, run), self.floats, pos)
