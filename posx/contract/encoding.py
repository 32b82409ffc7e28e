"""`Encoding`: the base class of every encoding, with the default of each hook and fact."""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import jax

from posx.contract.classes import check_class
from posx.contract.facts import About
from posx.contract.hooks import ByDistance, Features, Params, Tile, acting_hooks
from posx.contract.value import Dims, Value, require, walk_values
from posx.errors import UndefinedLength


@dataclasses.dataclass(frozen=True, init=False)
class Encoding(Value):
    """A position encoding: a frozen dataclass of hyper-parameters, whose hooks are pure functions.

        @dataclasses.dataclass(frozen=True)
        class LogDecay(posx.Encoding):
            shared = frozenset({"a"})  # once per model; all other arrays exist once per layer

            def init(self, rng, dims):
                return {"a": jnp.zeros(dims.num_heads)}

            def by_distance(self, params, distance):
                far = posx.as_float(jnp.abs(distance))[None, :]
                return posx.ByDistance(bias=-jax.nn.softplus(params["a"])[:, None] * jnp.log1p(far))

    A hook is a method at a place of the formula in `posx.contract.hooks`; its default does nothing. A fact says what is
    true of the hooks. It is a class attribute, a property if it depends on fields: `posx.contract.fact` makes one. A
    class that nearly spells a hook or a fact, or gives a hook another signature, raises ConfigError when it is defined.
    Vary a concrete class by a chain or a wrapper, not by a subclass.

    Hooks write out axes and types: `posx check` refuses JAX's silent promotion of ranks and types. Subtract positions
    first, then cast by `as_float`. An axis of 1 in place of h means that all heads share the values. Widths after
    `query` and `key` may differ from d, but not from each other. An empty slot has zeros, and the position of another
    slot of its row. If `axes` is n > 1, every pos [t] is [t, n], and no hook may act by distance alone, as
    `by_distance` and `decay` do: give `bias`.

    A field named as in `Dims` is needed only if a hook reads it. Every use compares such fields, the shapes of the
    parameters, and the shapes that hooks return with the sizes of q, k and v.
    """

    # Facts of the method, which its author states.

    #: The numbers of a position: 1 for a text. n > 1 for an image or a video, where hooks get pos [t, n] in place of
    #: [t]. 0 if no hook reads a position: the encoding then fits any number of axes.
    axes: ClassVar[int] = 1
    #: Adding one constant to all positions, along any axis, changes nothing.
    shift_invariant: ClassVar[bool] = True
    #: The encoding cannot tell later keys apart by distance, or favours distant ones. Masks that show later keys are
    #: refused. Hooks may still be called for later keys, and must return finite numbers.
    causal_only: ClassVar[bool] = False
    #: Reads a table by position or distance, so float positions are refused.
    integer_positions: ClassVar[bool] = False
    #: The last position the encoding is defined for, None for no limit: n - 1 if it is valid to n tokens. `attend` and
    #: the checks stay within it. Hooks return NaN past it, since traced positions are not known.
    max_position: ClassVar[int | None] = None
    #: How many earlier tokens a hook sees beside each one. {"key": 1} gives `key` vectors [t, 2, h, d], {"features": 3}
    #: gives `features` x [t, 4, m]. `query` and `value` may look back too. A token's own vector comes first, then those
    #: of the tokens before it in arrival order. No map has been applied to them. Before the start of its document they
    #: are zeros.
    history: ClassVar[Mapping[str, int]] = types.MappingProxyType({})
    #: The pairs of channels that maps of vectors rotate, "" for none: maps that rotate the same pairs commute.
    planes: ClassVar[str] = ""
    #: Names of parameters that exist once per model; all others exist once per layer.
    shared: ClassVar[frozenset[str]] = frozenset()
    #: Names of parameters that weight decay acts on, as in the method's published code.
    decayed: ClassVar[frozenset[str]] = frozenset()
    about: ClassVar[About] = About()

    # Promises to executors. The defaults suit most classes; `posx check` names each one that a class needs or could
    # make.

    #: `score` reads `tile.k`, or `by_distance` returns vectors for keys. The cache then stores keys as projected, and
    #: they are mapped on every read.
    reads_raw_keys: ClassVar[bool] = False
    #: "any"; "rows" if a tile must span all keys; "neighbours" if `score` also reads the slots next to a key's.
    tiling: ClassVar[str] = "any"
    #: Names of features by which `revise` changes cached keys. The cache keeps the keys as they are for the next token,
    #: without these features.
    revised_by: ClassVar[frozenset[str]] = frozenset()
    #: The distance in tokens, either way, from which on `by_distance` is constant; None if it never is.
    reach: ClassVar[int | None] = None
    #: The bias by distance falls without bound as |distance| grows, or the token bias falls from token to token. Tiles
    #: that provably weigh nothing are then skipped. False is always right; a slow fall skips nothing and gains nothing.
    fades: ClassVar[bool] = False

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        check_class(cls, Encoding)

    def init(self, rng: jax.Array, dims: Dims) -> Params:
        """Return the learned arrays by name, floats, all that one layer sees; {} if nothing is learned.

        Shared arrays are among them: the model keeps one copy.
        """
        return {}

    def tabulated(self, params: Params, length: int) -> tuple[Encoding, Params]:
        """Return a value and parameters that do the same at positions below `length`, for decoding.

        A compiled program belongs to a value. Texts of all lengths share programs if the value depends on `length`
        alone, and numbers that `at_length` set are in the parameters.
        """
        return self, params

    def embed(self, params: Params, x: jax.Array, pos: jax.Array) -> jax.Array:
        """Map token embeddings x [t, m] at pos [t]."""
        return x

    def features(self, params: Params, x: jax.Array, pos: jax.Array, carry: Any) -> tuple[Features, Any]:
        """Return arrays [t, ...] by name that are kept beside the keys, and the carry for the tokens that follow.

        x [t, m] is the layer's input after its norm, which q, k and v are projected from. Queries read the features of
        their own tokens too. carry is None at the start; return it unchanged if nothing is carried. The empty slots of
        a left-padded batch are before its tokens, and must leave nothing in the carry.

        One carry runs through all documents of a row. So outputs may depend on differences of what is carried, such as
        a running sum, and not on its level. For a state of a document alone, read the tokens of `history`.
        """
        return {}, carry

    def query(self, params: Params, vectors: jax.Array, pos: jax.Array, features: Features) -> jax.Array:
        """Map query vectors [t, h, d] to [t, h, d']."""
        return vectors

    def key(self, params: Params, vectors: jax.Array, pos: jax.Array, features: Features) -> jax.Array:
        """Map key vectors [t, g, d] to [t, g, d']."""
        return vectors

    def value(self, params: Params, vectors: jax.Array, pos: jax.Array, features: Features) -> jax.Array:
        """Map value vectors [t, g, d] to [t, g, d]."""
        return vectors

    def revise(self, params: Params, keys: jax.Array, features: Features, later: jax.Array) -> jax.Array:
        """Return cached keys [k, g, d] as the tokens that follow see them, once t tokens with `features` have arrived.

        Tokens are in order of arrival. later [k, t]: token t arrived after key k. `revised_by` names the features that
        are read here; a token with zeros in them changes no key, as an empty slot. Keys are at least float32.
        """
        return keys

    def decay(self, params: Params) -> jax.Array | None:
        """Return rates [h or 1, d'] of at least 0, nats per token, by which products of channels fall with distance.

        A map of q and k by their positions would overflow at far positions.
        """
        return None

    def logit_scale(self, params: Params, pos: jax.Array, features: Features) -> jax.Array | None:
        """Return the factor [h or 1, q] of everything inside the scale, for queries at pos [q]."""
        return None

    def by_distance(self, params: Params, distance: jax.Array) -> ByDistance:
        """Return the terms that depend only on signed distances i - j [n], int32 or float32.

        Later keys have negative distances, under causal masks too: return finite numbers there. At consecutive
        positions the terms are tabulated once.
        """
        return ByDistance()

    def bias(self, params: Params, q_pos: jax.Array, k_pos: jax.Array) -> jax.Array | None:
        """Return a bias [h or 1, q, k] in nats that depends on both positions, more than by their distance.

        -inf, here or in `by_distance`, masks a pair. If every visible pair of a query is -inf, all of them get equal
        weight.
        """
        return None

    def token_bias(self, params: Params, pos: jax.Array, features: Features) -> jax.Array | None:
        """Return u [t, h or 1, n] in nats, as n summands: pair (i, j) gets u_i - u_j.

        The difference is taken summand by summand, so that a running sum in a high and a low part keeps it exact.
        """
        return None

    def score(self, params: Params, s: jax.Array, tile: Tile) -> jax.Array:
        """Return s [h, q, k] plus terms in nats that depend on content; s is scaled, and not masked yet.

        If a cache holds revised keys, `tile.k_features` lacks the features of `revised_by`. The only tokens between a
        key and a query are then the queries' own, whose features are in `tile.q_features`. These lack the features of
        `revised_by` too if the keys are revised up to the query.

        A tile may be any rectangle, so entry (i, j) may depend on query i and key j alone; else declare `tiling`. On a
        GPU a kernel serves a score whose operations on pairs act on each pair alone, see `posx/attention/pointwise.py`.
        """
        return s

    def sink(self, params: Params) -> jax.Array | None:
        """Return the logits [h or 1] in nats of one more entry of each softmax, which takes weight and has no value.

        The weights of the keys then add up to less than 1. -inf takes none. A row that sees nothing still returns 0.
        """
        return None

    def output(self, params: Params, vectors: jax.Array, pos: jax.Array, features: Features) -> jax.Array:
        """Map outputs [t, h, d] of the queries at pos [t], sums of mapped values, to [t, h, d].

        Zeros must stay zeros, because the output of a query that sees nothing is 0.
        """
        return vectors

    def acts_on(self, hook: str) -> bool:
        """Return whether this encoding defines `hook`. It is known before tracing: an inactive hook costs nothing."""
        return getattr(type(self), hook) is not getattr(Encoding, hook)


def abstract_params(encoding: Encoding, dims: Dims) -> Params:
    """Return the shapes and types of the parameters that `init` returns."""
    return jax.eval_shape(lambda: encoding.init(jax.random.key(0), dims))


@functools.lru_cache(maxsize=1024)
def defined_hooks(encoding: Encoding) -> frozenset[str]:
    """Return the names of the hooks that the encoding defines. They are found once for each value."""
    return frozenset(acting_hooks(encoding))


def position_shape(encoding: Encoding) -> tuple[int, ...]:
    """Return the shape of one token's position: () for one axis or none, (n,) for n axes."""
    return (encoding.axes,) if encoding.axes > 1 else ()


def parts(encoding: Encoding) -> Iterator[Encoding]:
    """Yield the encoding and the encodings in its fields, at any depth."""
    return (part for part in walk_values(encoding) if isinstance(part, Encoding))


def require_encoding(given: Any, where: str) -> None:
    """Raise ConfigError unless `given` is an encoding's value. A spec needs the model's sizes to become one."""
    require(Encoding, given, where)


def check_defined(encoding: Encoding, first: int, last: int) -> None:
    """Raise UndefinedLength unless the encoding is defined for positions from `first` to `last`."""
    if (limit := encoding.max_position) is not None and (first < 0 or last > limit):
        raise UndefinedLength(f"{encoding} is defined for positions 0 to {limit}, but got {first} to {last}.")
