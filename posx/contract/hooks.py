"""The contract as one table: the formula of attention, and each hook by which an encoding acts on it.

To write an encoding, read FORMULA, then override hooks of `posx.contract.encoding.Encoding`, which documents them.

All that depends on the list of hooks is read off `HOOKS`. This is how a chain joins its parts, which methods a class
may define, and which shapes hooks must return. It is also which executors can serve an encoding, and which checks
apply. A new hook needs a row here, its default in `Encoding`, and code in each executor that serves it:
docs/design/contract.md lists the steps.

Letters of axes, project-wide: b batch, t token (q if it asks, k if it is seen), h head, g key/value head. Widths: d of
a head, d' of a head after maps, m of the model, v of the vocabulary, n of distances or summands. A position of several
axes has n numbers too. Hooks see no batch axis. A slot is a place of the batch for a token; it may be empty.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from posx.errors import ConfigError

Params = dict[str, Any]
Features = dict[str, jax.Array]

#: Attention under an encoding, for one layer, sequence and head, with i a query and j a key. Scores are in nats.
FORMULA = """\
q~_i = query(q_i, pos_i)     k~_j = key(k_j, pos_j)     v~_j = value(v_j, pos_j)
t_r  = by_distance(r),  r = pos_i - pos_j
s_ij = logit_scale(pos_i) * (sum_c q~_ic k~_jc exp(-decay_c r) + <q_i, t_r.query> + <k_j, t_r.key> + t_r.scaled)
       / sqrt(d)  +  t_r.bias + bias(pos_i, pos_j) + u_i - u_j,   u = token_bias(pos)
w_ij = exp(s'_ij) / (exp(sink) + sum_j exp(s'_ij)),  s' = score(s, tile), over the keys j that i sees
o_i  = output(sum_j w_ij (v~_j + t_r.value), pos_i)"""


class ByDistance(NamedTuple):
    """The terms that depend only on distance, at n distances. Unused terms are None.

    An axis of 1 in place of h means that all heads share the values. Floats, at least float32.

    Attributes:
      bias: [h or 1, n] nats, outside the scale.
      scaled: [h or 1, n], inside the scale.
      query: [n, h or 1, d], multiplied with q_i as projected.
      key: [n, h or 1, d], multiplied with k_j as projected.
      value: [n, h or 1, d], added to the mapped value of key j.
    """

    bias: Any = None
    scaled: Any = None
    query: Any = None
    key: Any = None
    value: Any = None


class Tile(NamedTuple):
    """One rectangle of q queries against k keys, as `score` sees it beside s [h, q, k].

    No array has a batch axis. h is the number of query heads, and key vectors are repeated to h heads. Vectors have the
    model's type, all else is at least float32.

    Attributes:
      q: [q, h, d], queries as projected.
      k: [k, h, d], keys as projected.
      mapped_q: [q, h, d'], queries after `query`; d' is d unless the maps change it.
      mapped_k: [k, h, d'], keys after `key`.
      q_features: {name: [q, ...]}, the arrays that `features` returned for the queries.
      k_features: {name: [k, ...]}, the same for the keys.
      q_pos: [q], or [q, n] if positions have n axes, in tokens, int32 or float32.
      k_pos: [k] or [k, n], the same of the keys.
      logit_scale: [h or 1, q or 1, 1], the factor that s contains; multiply terms by it that belong inside the scale.
      visible: [q, k], bool, the pairs that the mask will leave; s is not masked yet.
    """

    q: jax.Array
    k: jax.Array
    mapped_q: jax.Array
    mapped_k: jax.Array
    q_features: Features
    k_features: Features
    q_pos: jax.Array
    k_pos: jax.Array
    logit_scale: jax.Array
    visible: jax.Array


class Part(NamedTuple):
    """A part of a composite that acts on a hook.

    Attributes:
      name: its name in the composite, the prefix of its params.
      encoding: the part itself.
      call: the hook of the part, with its own params and features.
    """

    name: str
    encoding: Any
    call: Callable[..., Any]


def _compose(parts: Sequence[Part], x: Any, *rest: Any) -> Any:
    """Apply each part to the result of the one before."""
    for part in parts:
        x = part.call(x, *rest)
    return x


def _compose_back(parts: Sequence[Part], x: Any, *rest: Any) -> Any:
    """Apply each part to the result of the one after."""
    return _compose(parts[::-1], x, *rest)


def _compose_maps(parts: Sequence[Part], vectors: jax.Array, *rest: Any) -> jax.Array:
    """Compose maps of vectors [t, h, d]. Raises ConfigError if one follows a rotary map that changes the width."""
    for part, later in itertools.zip_longest(parts, parts[1:]):
        mapped = part.call(vectors, *rest)
        if later and part.encoding.planes and mapped.shape[-1] != vectors.shape[-1]:
            raise ConfigError(
                f"{later.encoding} maps the channels of a head, but {part.encoding} before it makes other channels. "
                f"Put {later.encoding} first in the chain, or leave one of them out."
            )
        vectors = mapped
    return vectors


def _unite(parts: Sequence[Part], x: jax.Array, pos: jax.Array, carry: Any) -> tuple[Features, Any]:
    """Collect the features of all parts, and one carry for each."""
    united: Features = {}
    backs = [part.encoding.history.get("features", 0) for part in parts]
    carries = []
    for n, (part, back) in enumerate(zip(parts, backs, strict=True)):
        own = x[:, : 1 + back] if back else x[:, 0] if any(backs) else x
        features, last = part.call(own, pos, None if carry is None else carry[n])
        united |= {f"{part.name}.{name}": array for name, array in features.items()}
        carries.append(last)
    return united, tuple(carries)


def _fold(combine: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    return lambda parts, *arguments: functools.reduce(combine, (part.call(*arguments) for part in parts))


def _concatenate(one: jax.Array, other: jax.Array) -> jax.Array:
    """Join per-token biases [t, h or 1, n] along n, so that summands stay separate."""
    heads = max(one.shape[1], other.shape[1])
    return jnp.concatenate([jnp.broadcast_to(x, (x.shape[0], heads, x.shape[2])) for x in (one, other)], axis=-1)


def _add_terms(one: ByDistance, other: ByDistance) -> ByDistance:
    return ByDistance(*(x if y is None else y if x is None else x + y for x, y in zip(one, other, strict=True)))


class Hook(NamedTuple):
    """A place of the formula where an encoding can act."""

    takes: tuple[str, ...]  # arguments after params
    gives: Any  # the shape of the result, or of each term, in letters, "*" for any size; "" if it has its own check
    join: Callable[..., Any]  # (parts that act, *arguments) -> the hook of a chain of them
    #: It depends on a token, a query, a distance, a pair of positions, a channel, the content of a tile, or a head.
    kind: str
    looks_back: bool = False  # it may see earlier tokens beside each one, see `Encoding.history`


_TERMS = ByDistance("h or 1, n", "h or 1, n", "n, h or 1, d", "n, h or 1, d", "n, h or 1, d")

#: Every hook, in the order of the formula.
HOOKS: dict[str, Hook] = {
    "embed": Hook(("x", "pos"), "q, m", _compose, "token"),
    "features": Hook(("x", "pos", "carry"), "", _unite, "token", looks_back=True),
    "query": Hook(("vectors", "pos", "features"), "q, h, *", _compose_maps, "token", looks_back=True),
    "key": Hook(("vectors", "pos", "features"), "k, g, *", _compose_maps, "token", looks_back=True),
    "value": Hook(("vectors", "pos", "features"), "k, g, d", _compose, "token", looks_back=True),
    "revise": Hook(("keys", "features", "later"), "k, g, d", _compose, "token"),
    "decay": Hook((), "h or 1, d'", _fold(operator.add), "channel"),
    "logit_scale": Hook(("pos", "features"), "h or 1, q", _fold(operator.mul), "query"),
    "by_distance": Hook(("distance",), _TERMS, _fold(_add_terms), "distance"),
    "bias": Hook(("q_pos", "k_pos"), "h or 1, q, k", _fold(operator.add), "pair"),
    "token_bias": Hook(("pos", "features"), "q, h or 1, *", _fold(_concatenate), "token"),
    "score": Hook(("s", "tile"), "h, q, k", _compose, "tile"),
    "sink": Hook((), "h or 1", _fold(jnp.logaddexp), "head"),
    "output": Hook(("vectors", "pos", "features"), "q, h, d", _compose_back, "token"),
}
#: The hooks that map vectors of the heads.
MAPS = tuple(name for name, hook in HOOKS.items() if hook.takes[:1] == ("vectors",))


def acting_hooks(encoding: Any, hooks: Iterable[str] = HOOKS) -> tuple[str, ...]:
    """Return those of `hooks` that the encoding defines, in the given order."""
    return tuple(hook for hook in hooks if encoding.acts_on(hook))


def select_hooks(encoding: Any, *kinds: str) -> tuple[str, ...]:
    """Return the hooks of these kinds that the encoding defines, in the order of the formula."""
    return acting_hooks(encoding, (name for name, hook in HOOKS.items() if hook.kind in kinds))


def distance_terms(encoding: Any, params: Params, pos_dtype: Any = jnp.int32) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes of the terms that `by_distance` returns for one distance, by name; {} if it does not act."""
    shapes = tuple((name, jax.ShapeDtypeStruct(x.shape, x.dtype)) for name, x in params.items())
    return _distance_terms(encoding, shapes, pos_dtype) if encoding.acts_on("by_distance") else {}


@functools.lru_cache(maxsize=1024)
def _distance_terms(encoding: Any, shapes: tuple[Any, ...], pos_dtype: Any) -> dict[str, jax.ShapeDtypeStruct]:
    with jax.numpy_dtype_promotion("standard"):  # `init` gives float32 params even if 64-bit types are on
        shapes_by_term = jax.eval_shape(encoding.by_distance, dict(shapes), jax.ShapeDtypeStruct((1,), pos_dtype))
    return {name: term for name, term in shapes_by_term._asdict().items() if term is not None}


def bias_by_distance(encoding: Any, params: Params, q_pos: jax.Array, k_pos: jax.Array) -> jax.Array | None:
    """Return the bias of `by_distance` for all pairs of positions [q] and [k], [h or 1, q, k]; None without one."""
    if "bias" not in distance_terms(encoding, params, q_pos.dtype):
        return None
    bias = encoding.by_distance(params, (q_pos[:, None] - k_pos[None, :]).ravel()).bias
    return bias.reshape(-1, q_pos.shape[0], k_pos.shape[0])
