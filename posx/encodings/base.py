"""The contract: what an encoding is, and the one formula that every executor evaluates.

An encoding is a value: a frozen dataclass of hyper-parameters with no arrays inside. Its behaviour is pure functions
of (params, vectors, positions, features). For one layer and one sequence, with i a query and j a key:

    q~_i = query(q_i, pos_i)     k~_j = key(k_j, pos_j)     v~_j = value(v_j, pos_j)
    (a, b, c, e)_r = relative(r),  r = pos_i - pos_j    # vectors, and a number e, that depend only on distance
    s_ij = temperature(pos_i) * (<q~_i, k~_j> + <q_i, a_r> + <k_j, b_r> + e_r) / sqrt(head_dim)
           + bias(pos_i, pos_j) + u_i - u_j,  u = potential(pos)
    s_ij = score(s, tile)_ij         # then what is not visible is masked; softmax -> w_ij
    o_i  = output( sum_j w_ij (v~_j + c_r) + mix(w, pos)_i, pos_i )

What `features` keeps of a token is given to its maps, temperature and potential, and to `score`. Where there are
several maps of queries and keys, `regime` says for each pair which of them meet. The product of channel c may fall with
distance, by `decay` nats a token.

A term free of content stands inside the scale, where every temperature acts on it, or outside. Inside it is e_r if it
depends on distance alone, else a product of extra channels that `query` and `key` append (the scale stays
1/sqrt(head_dim), whatever the width). Outside it is `bias`, or `curve` if it depends on distance alone.

Letters, project-wide: b batch, t token, q query slot, k key slot, h head, g key/value head, d head width,
m model width, v vocabulary. Hooks see no batch axis.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, ClassVar, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np

from posx.encodings.checks import check_class, check_decorated
from posx.errors import ConfigError, UndefinedLength

Params = dict[str, Any]
Features = dict[str, jax.Array]
#: What `query` and `key` give: vectors [t, h, d'], or a tuple of them, one for each regime.
Mapped = jax.Array | tuple[jax.Array, ...]

#: Types of fields that say what they count, which the catalogue prints after the value; a field of another unit says so
#: in its own place, one without a unit has a plain type.
Tokens = Annotated[int, "tokens"]
FloatTokens = Annotated[float, "tokens"]
Channels = Annotated[int, "channels"]
Heads = Annotated[int, "heads"]
TableRows = Annotated[int, "table rows"]
Buckets = Annotated[int, "buckets"]
HiddenUnits = Annotated[int, "hidden units"]

#: The places where an encoding can act, in the order of the formula. `curve` is the short way to write `bias`.
HOOKS = (
    "embed", "features", "query", "key", "regime", "decay", "value", "temperature", "relative", "bias", "curve",
    "potential", "score", "mix", "output",
)  # fmt: skip
#: Those that look at the vectors of every pair: what they add is no bias free of content, and no map of one token.
PAIRWISE = ("regime", "decay", "relative", "score", "mix")
#: What depends on distance alone, and is tabulated where distances are consecutive.
BY_DISTANCE = ("curve", "relative")
#: The two ways to write a bias.
BIASES = ("bias", "curve")
#: What may fall without bound with distance, see `Encoding.fades`.
FALLING = ("curve", "potential")


@dataclasses.dataclass(frozen=True)
class Dims:
    """The sizes an encoding is resolved against; `train_len` in tokens, `num_kv_heads` None for one per query head."""

    model_dim: int
    num_heads: int
    head_dim: int
    num_layers: int
    train_len: int
    num_kv_heads: int | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            size = getattr(self, field.name)
            if size is not None and size < 1:
                raise ConfigError(f"{field.name}={size}: every size must be at least 1")
        if self.num_heads % (self.num_kv_heads or self.num_heads):
            raise ConfigError(f"num_kv_heads={self.num_kv_heads} does not divide num_heads={self.num_heads}")


class Tile(NamedTuple):
    """What `score` may look at: one rectangle of queries against keys. Key vectors come repeated to `h` heads."""

    q: jax.Array  # [q, h, d] as projected
    k: jax.Array  # [k, h, d] as projected
    mapped_q: jax.Array  # [q, h, d'] after `query`; [q, h, n, d'] of n regimes
    mapped_k: jax.Array  # [k, h, d'] after `key`; [k, h, n, d']
    q_features: Features  # {name: [q, ...]}
    k_features: Features  # {name: [k, ...]}
    q_pos: jax.Array  # [q]
    k_pos: jax.Array  # [k]
    temperature: jax.Array  # [h or 1, q or 1, 1], what products are multiplied by; 1 where there is none
    visible: jax.Array  # bool [q, k], before the mask is applied


class Relative(NamedTuple):
    """What depends on distances [n] alone: vectors, each [n, h, d], or [n, 1, d] where heads share them, and a number;
    None for what there is not."""

    query: Any = None  # meets q_i as projected
    key: Any = None  # meets k_j as projected
    value: Any = None  # is added to v~_j
    bias: Any = None  # [n, h] or [n, 1], is added to the products, inside the scale


def as_float(x: Any) -> jax.Array:
    """`x` in float32, or in float64 where 64-bit types are on: the type of all that depends on position."""
    return jnp.asarray(x, jnp.result_type(float))


def wide_dtype(dtype: Any) -> np.dtype:
    """float64 for float64, else float32; by NumPy's rule, as jnp.promote_types refuses under strict promotion."""
    return np.promote_types(dtype, np.float32)


def at_least_float32(x: jax.Array) -> jax.Array:
    return x.astype(wide_dtype(x.dtype))


#: Products in the type of their operands, which accelerators round to fewer bits than float32 has unless told so: for
#: what is made of positions, and few numbers beside the products of attention.
exact_einsum = functools.partial(jnp.einsum, precision="highest")


def distances(q_pos: jax.Array, k_pos: jax.Array) -> jax.Array:
    """Signed distances i - j, [q, k]. Subtracted as given (exact for integers), then made float."""
    return as_float(q_pos[:, None] - k_pos[None, :])


def require_encoding(given: Any, where: str) -> None:
    """Raise ConfigError unless `given` is an encoding's value. A spec needs the model's sizes to become one."""
    if not isinstance(given, Encoding):
        raise ConfigError(f"{where}={given!r} is no encoding's value. Give posx.build({given!r}, dims) instead.")


def check_defined(encoding: Encoding, first: int, last: int) -> None:
    """Raise UndefinedLength unless the encoding is defined for positions from `first` to `last`."""
    if (limit := encoding.max_position) is not None and (first < 0 or last > limit):
        raise UndefinedLength(f"{encoding} is defined for positions 0 to {limit}, but got {first} to {last}")


def acting(encoding: Encoding, hooks: Iterable[str] = HOOKS) -> tuple[str, ...]:
    """Those of `hooks` that it defines."""
    return tuple(hook for hook in hooks if encoding.acts_on(hook))


@dataclasses.dataclass(frozen=True, init=False)
class Encoding:
    """Base of all encodings: every hook is the identity or inactive. Concrete classes are final.

    A class that misspells a hook or a fact, or whose hook has another signature, raises ConfigError when it is made.
    What it was made for is compared with q, k and v wherever it is used: fields named as in `Dims` (`num_heads`,
    `head_dim`, `num_kv_heads`; 0 and None say nothing), the shapes of its parameters against those that `init` gives
    for these heads, and the shapes that hooks give. An axis of 1 in place of h says that all heads share the values: an
    encoding that has some for each head gives h of them, also where h is 1. Widths after `query` and `key` may differ
    from d, but not from each other. Empty slots come to hooks as zeros, at the position of another slot of their row.
    """

    #: Adding one constant to all positions changes nothing.
    shift_invariant: ClassVar[bool] = True
    #: A prefix's logits do not change when the text grows.
    prefix_consistent: ClassVar[bool] = True
    #: "any", or "rows" where one tile must span all keys.
    tiling: ClassVar[str] = "any"
    #: Where "rows": `score` reads the slots next to a key's, so that empty ones between would count as its neighbours.
    reads_neighbours: ClassVar[bool] = False
    #: The cache may store keys and values already mapped; False stores them raw and maps them on every read.
    caches_mapped_keys: ClassVar[bool] = False
    #: `curve` falls without bound with distance, or `potential` from token to token, so that executors may look for far
    #: tiles that weigh nothing.
    fades: ClassVar[bool] = False
    #: Reads a table by position or distance, so float positions are refused.
    integer_positions: ClassVar[bool] = False
    #: How many tokens before each one `features`, `query`, `key` or `value` sees beside it: {"key": 1} gives `key`
    #: vectors [t, 2, h, d], {"features": 3} gives `features` x [t, 4, m]. A token's own come first, then those before
    #: it in arrival order, as they were before any map; zeros where its document has none.
    history: ClassVar[Mapping[str, int]] = types.MappingProxyType({})
    #: Keys after the query are all given the same, near or far, or more the further ahead, or are not among the keys
    #: that the encoding counts, so that `attend` refuses masks that show them. (Where all keys are given the same, as
    #: without positions, nothing is amiss.)
    causal_only: ClassVar[bool] = False
    #: How many times the model's learning rate its parameters are trained with, unless a run says otherwise: as many as
    #: a comparison at the training length chose (experiments/recipe, experiments/leaderboard), or 1.
    lr_multiplier: ClassVar[float] = 1.0
    #: The pairs of channels in which `query` and `key` turn vectors by position, "" where they turn none: maps of a
    #: chain that turn the same pairs may change places.
    planes: ClassVar[str] = ""
    #: For the catalogue: is it defined, and does it hold up, beyond the training length; and where it comes from.
    extrapolates: ClassVar[str] = ""
    paper: ClassVar[str] = ""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        check_class(cls, Encoding)

    def __init__(self, *_: Any, **__: Any) -> None:
        if type(self) is not Encoding:  # a dataclass brings its own __init__
            check_decorated(type(self))

    @property
    def shared(self) -> frozenset[str]:
        """Parameter names that exist once per model; all others exist once per layer."""
        return frozenset()

    @property
    def decayed(self) -> frozenset[str]:
        """Parameter names that weight decay acts on, as it does in the source."""
        return frozenset()

    @property
    def max_position(self) -> int | None:
        """The last position it is defined for (a host fact), None for no limit."""
        return None

    @property
    def reach(self) -> int | None:
        """Distance in tokens, either way, from which on `curve` and `relative` are constant; None if they never are."""
        return None

    def init(self, rng: jax.Array, dims: Dims) -> Params:
        """All arrays that one layer sees, {} where nothing is learned."""
        return {}

    def resolve(self, dims: Dims) -> Self:
        """The value with every open (None) field set. Raises ConfigError where the sizes do not fit the method."""
        return self

    def at_length(self, length: int) -> Self:
        """The value to use for windows of `length` tokens; called on the host, parameters stay the same."""
        return self

    def embed(self, params: Params, x: jax.Array, pos: jax.Array) -> jax.Array:
        return x

    def features(self, params: Params, x: jax.Array, pos: jax.Array, carry: Any) -> tuple[Features, Any]:
        """Per-token values kept beside the keys: x [t, m] is the layer's normalised input, carry None at the start.

        Empty slots of a left-padded batch come first and pass through too: what they leave in the carry must cancel.
        """
        return {}, carry

    def query(self, params: Params, vectors: jax.Array, pos: jax.Array, features: Features) -> Mapped:
        return vectors

    def key(self, params: Params, vectors: jax.Array, pos: jax.Array, features: Features) -> Mapped:
        return vectors

    def value(self, params: Params, vectors: jax.Array, pos: jax.Array, features: Features) -> jax.Array:
        return vectors

    def output(self, params: Params, vectors: jax.Array, pos: jax.Array, features: Features) -> jax.Array:
        return vectors

    def temperature(self, params: Params, pos: jax.Array, features: Features) -> jax.Array | None:
        """[h or 1, q], or [q] for all heads, of queries at pos [q]."""
        return None

    def potential(self, params: Params, pos: jax.Array, features: Features) -> jax.Array | None:
        """[t, h or 1, n] in nats, what it comes to in n parts: pair (i, j) gets u_i - u_j, its path from j to i.

        Differences are taken part by part, so a running sum in a high and a low part keeps them exact.
        """
        return None

    def curve(self, params: Params, distance: jax.Array) -> jax.Array | None:
        """A bias that depends only on distance: signed distances i - j [n], float, to [h or 1, n] in nats, unscaled."""
        return None

    def bias(self, params: Params, q_pos: jax.Array, k_pos: jax.Array) -> jax.Array | None:
        """[h or 1, q, k] in nats, free of content; follows from `curve` where that is given.

        -inf, here or in a curve, hides a pair, unless all that the query sees is at -inf: then all of it is seen alike.
        """
        values = self.curve(params, distances(q_pos, k_pos).ravel())
        return None if values is None else values.reshape(-1, q_pos.shape[0], k_pos.shape[0])

    def regime(self, params: Params, q_pos: jax.Array, k_pos: jax.Array) -> jax.Array | None:
        """Which of several maps meet, whole numbers [q, k]: where this is defined `query` and `key` give tuples of
        vectors [t, h, d'], and pair (i, j) has the product of those at regime_ij."""
        return None

    def decay(self, params: Params) -> jax.Array | None:
        """[h or 1, d'], at least 0, in nats per token, of the channels that `query` and `key` give: their product is
        multiplied by exp(-decay_c (i - j)). Not a map of q and k by their positions, which would overflow far out."""
        return None

    def relative(self, params: Params, distance: jax.Array) -> Relative:
        """Vectors and numbers by distance alone: signed distances i - j [n], of the positions' type, to `Relative`.

        Executors tabulate them where positions are consecutive, so that no [q, k, d] array is needed.
        """
        return Relative()

    def score(self, params: Params, s: jax.Array, tile: Tile) -> jax.Array:
        """Adds content-dependent terms to s [h, q, k]."""
        return s

    def mix(self, params: Params, w: jax.Array, q_pos: jax.Array, k_pos: jax.Array) -> jax.Array | None:
        """[q, h, d], linear in w [h, q, k], so that tiles may be summed unnormalised."""
        return None

    def acts_on(self, hook: str) -> bool:
        """Whether `hook` is defined by this encoding; known before tracing, so an inactive hook costs nothing."""
        return getattr(type(self), hook) is not getattr(Encoding, hook)

    @property
    def sites(self) -> tuple[str, ...]:
        """The places of the formula where this encoding acts; a curve acts as a bias."""
        found = {"bias" if hook == "curve" else hook for hook in acting(self)}
        return tuple(hook for hook in HOOKS if hook in found)

    def fill_open(self, **defaults: Any) -> Self:
        """The value with `defaults` in those of the named fields that are open; itself if none is."""
        opened = {name: value for name, value in defaults.items() if getattr(self, name) is None}
        return dataclasses.replace(self, **opened) if opened else self

    def require_resolved(self) -> None:
        """Raises ConfigError naming the fields that are still open."""
        fields = [f.name for f in dataclasses.fields(self) if getattr(self, f.name) is None]
        if fields:
            name = type(self).__name__
            raise ConfigError(f"{name}.{fields[0]} is not set: call resolve(dims), build(...), or give {fields}")


def parts(encoding: Encoding) -> Iterator[Encoding]:
    """Yield the encoding and the encodings in its fields, at any depth."""
    yield encoding
    for field in dataclasses.fields(encoding):
        inside = jax.tree.leaves(getattr(encoding, field.name), is_leaf=lambda x: isinstance(x, Encoding))
        for part in inside:
            if isinstance(part, Encoding):
                yield from parts(part)


def normal(rng: jax.Array, shape: tuple[int, ...], std: float) -> jax.Array:
    return std * jax.random.normal(rng, shape, jnp.float32)
