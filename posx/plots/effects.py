"""What an encoding does to a pair of positions, read off its hooks: all that a picture of it can show without a text.

Positions and distances in tokens, logits as they enter the softmax. Whatever the text is, a logit is
content-free part + what the content gives; the first is the logit of vectors that are zero.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from posx.attention import attend
from posx.encodings import Encoding, Features
from posx.encodings.base import acting
from posx.encodings.chain import Chain
from posx.encodings.nope import Nope
from posx.encodings.rotary.rope import Rope
from posx.plots.models import Subject

MOST_POSITIONS = 256  # of a matrix
_SAME = 1e-4  # below this, a curve over distance says nothing


def num_positions(subject: Subject) -> int:
    """How far a picture goes: twice the training length, and no further than the encoding is defined."""
    longest, last = 2 * subject.dims.train_len, at_length(subject, 2 * subject.dims.train_len).max_position
    return longest if last is None else min(longest, last + 1)


def at_length(subject: Subject, length: int) -> Encoding:
    return subject.encoding.at_length(length)


def added_to_embeddings(subject: Subject) -> np.ndarray | None:
    """[position, channel]: what tokens get from their position alone; None where nothing is added."""
    n = min(num_positions(subject), MOST_POSITIONS)
    encoding = at_length(subject, n)
    if not encoding.acts_on("embed"):
        return None
    nothing = jnp.zeros((n, subject.dims.model_dim), jnp.float32)
    return np.asarray(encoding.embed(subject.params, nothing, jnp.arange(n, dtype=jnp.int32)))


def content_free(subject: Subject, length: int, queries: slice = slice(None)) -> np.ndarray | None:
    """[head, query, key]: the logits of zero vectors at positions 0 to `length` - 1; None where all of them are 0."""
    encoding, dims, params = at_length(subject, length), subject.dims, subject.params
    k_pos = jnp.arange(length, dtype=jnp.int32)
    q_pos = k_pos[queries]
    s = np.zeros((dims.num_heads, len(q_pos), length))
    features = _features(subject, encoding, length)
    if encoding.acts_on("query") or encoding.acts_on("key"):
        q_zeros, k_zeros = _zeros(encoding, "query", subject, len(q_pos)), _zeros(encoding, "key", subject, length)
        q = encoding.query(params, q_zeros, q_pos, _of(features, queries))
        k = encoding.key(params, k_zeros, k_pos, features)
        falls = _decay(subject, encoding, q_pos[:, None] - k_pos[None, :])
        maps: Any = zip(q, k, strict=True) if isinstance(q, tuple) else [(q, k)]
        of_maps = [_products(of_q, of_k, falls) for of_q, of_k in maps]
        regime = encoding.regime(params, q_pos, k_pos)
        s = s + (of_maps[0] if regime is None else np.choose(np.asarray(regime), of_maps))
    inside = encoding.relative(params, (q_pos[:, None] - k_pos[None, :]).ravel()).bias
    if inside is not None:
        s = s + np.asarray(inside, np.float64).T.reshape(-1, len(q_pos), length)
    temperature = encoding.temperature(params, q_pos, _of(features, queries))
    if temperature is not None:
        s = s * np.atleast_2d(np.asarray(temperature, np.float64))[:, :, None]
    s = s / math.sqrt(dims.head_dim)
    bias = encoding.bias(params, q_pos, k_pos)
    s = s if bias is None else s + np.asarray(bias, np.float64)
    if encoding.acts_on("potential"):
        u = np.asarray(encoding.potential(params, k_pos, features), np.float64).sum(axis=-1).T
        s = s + u[:, queries, None] - u[:, None, :]
    return s if np.any(s) else None


def content_free_by_distance(subject: Subject, whole: np.ndarray) -> np.ndarray:
    """[head, distance], distances from 0, of what `content_free` gives for the first positions, `whole`.

    Of one query where only distances count, else the mean over all pairs.
    """
    n = num_positions(subject)
    if not subject.encoding.shift_invariant:
        diagonals = [np.diagonal(whole, -distance, axis1=1, axis2=2) for distance in range(whole.shape[1])]
        return np.stack([diagonal.mean(axis=1) for diagonal in diagonals], axis=1)
    last = whole[:, -1:] if whole.shape[1] == n else content_free(subject, n, slice(n - 1, n))
    return np.zeros((len(whole), n)) if last is None else last[:, 0, ::-1]


def temperatures(subject: Subject) -> np.ndarray | None:
    """[head or 1, position]: what products are multiplied by at each query, of a layer input of zeros; None where that
    is the same everywhere."""
    n = num_positions(subject)
    encoding = at_length(subject, n)
    pos = jnp.arange(n, dtype=jnp.int32)
    found = encoding.temperature(subject.params, pos, _features(subject, encoding, n))
    values = None if found is None else np.atleast_2d(np.asarray(found, np.float64))
    return None if values is None or np.ptp(values) < _SAME else values


def match_by_distance(subject: Subject) -> tuple[np.ndarray, np.ndarray] | None:
    """(distances [n], [head, n]): the mean product of a unit vector as a query and the same one as a key further back.

    1 where position changes nothing. Over all directions, so it is a trace: exact for maps that are affine. None where
    distance does not count, or where the maps read the text or look back.
    """
    dims, n = subject.dims, num_positions(subject)
    encoding = at_length(subject, n)
    if encoding.history or encoding.acts_on("features") or not acting(encoding, ("query", "key")):
        return None
    distances = np.unique(np.linspace(0, n - 1, min(n, MOST_POSITIONS // 2)).astype(np.int32))
    q = _turned(encoding.query, subject, dims.num_heads, np.array([n - 1]))
    k = _turned(encoding.key, subject, _kv_heads(subject), n - 1 - distances)
    k = np.repeat(k, q.shape[3] // k.shape[3], axis=3)
    k = k * _decay(subject, encoding, distances)[None, :, None]
    of_maps = np.einsum("anchd,archd->ahr", q, k) / dims.head_dim
    q_pos, k_pos = (jnp.asarray(pos, jnp.int32) for pos in ([n - 1], n - 1 - distances))
    regime = encoding.regime(subject.params, q_pos, k_pos)
    found = of_maps[0] if regime is None else np.choose(np.asarray(regime), of_maps)
    return (distances, found) if np.ptp(found) > _SAME else None


def _turned(hook, subject: Subject, heads: int, positions: np.ndarray) -> np.ndarray:
    """[map, position, channel, head, d']: what token maps, one for each regime, make of each basis vector, less what
    they make of zero."""
    d, n = subject.dims.head_dim, len(positions)
    basis = np.broadcast_to(np.eye(d, dtype=np.float32)[None, :, None, :], (n, d, heads, d)).reshape(n * d, heads, d)
    pos = jnp.asarray(np.repeat(positions, d), jnp.int32)

    def mapped(vectors: np.ndarray) -> np.ndarray:
        found = hook(subject.params, jnp.asarray(vectors), pos, {})
        return np.array(found if isinstance(found, tuple) else [found], np.float64)

    turned = mapped(basis) - mapped(np.zeros_like(basis))
    return turned.reshape(len(turned), n, d, heads, -1)


def on_random_tokens(subject: Subject) -> np.ndarray | None:
    """[head, query, key]: how logits of random tokens change, against each query's own key; None where nothing does.

    For what depends on the text and shows nowhere else. Read off the weights, so that everything that acts is in it.
    """
    dims, n = subject.dims, min(num_positions(subject), MOST_POSITIONS // 2)
    encoding, rng = at_length(subject, n), np.random.default_rng(0)
    if not encoding.sites or acting(encoding, ("embed", "relative", "value", "mix", "output")):
        return None
    shapes = (dims.num_heads, dims.head_dim), (_kv_heads(subject), dims.head_dim), (dims.model_dim,)
    q, k, x = (jnp.asarray(rng.standard_normal((1, n, *shape)), jnp.float32) for shape in shapes)
    v = jnp.broadcast_to(jnp.eye(n, dtype=jnp.float32)[None, :, None], (1, n, _kv_heads(subject), n))

    @functools.partial(jax.jit, static_argnums=0)
    def log_weights(encoding: Encoding, params: Any) -> jax.Array:
        pos, kept = np.arange(n, dtype=np.int32), x if encoding.acts_on("features") else None
        o = attend(encoding, params, q, k, v, q_pos=pos, k_pos=pos, x=kept, executor="dense")
        return jnp.log(o[0].swapaxes(0, 1))

    changed = np.asarray(log_weights(encoding, subject.params) - log_weights(Nope(), {}), np.float64)
    changed = changed - np.diagonal(changed, axis1=1, axis2=2)[:, :, None]
    return np.where(np.tri(n, dtype=bool), changed, np.nan)


def with_random_arrays(subject: Subject) -> Subject:
    """Return the subject with random arrays, if it is not trained: those that start at zero show nothing."""
    if subject.trained:
        return subject
    rng, scale = np.random.default_rng(0), 1 / math.sqrt(subject.dims.head_dim)
    params = {name: scale * rng.standard_normal(array.shape) for name, array in subject.params.items()}
    return dataclasses.replace(
        subject, params={name: jnp.asarray(value, jnp.float32) for name, value in params.items()}
    )


def relative_lengths(subject: Subject) -> dict[str, np.ndarray]:
    """Return {what the vectors are for: [distance]}: their lengths, mean over heads."""
    n = num_positions(subject)
    found = at_length(subject, n).relative(subject.params, jnp.arange(n, dtype=jnp.int32))
    vectors = {"for queries": found.query, "for keys": found.key, "added to values": found.value}
    return {
        name: np.linalg.norm(np.asarray(values), axis=-1).mean(axis=1)
        for name, values in vectors.items()
        if values is not None
    }


def rotations(encoding: Encoding) -> list[Rope]:
    """The rotary parts of an encoding."""
    parts = encoding.parts if isinstance(encoding, Chain) else (encoding,)
    return [part for part in parts if isinstance(part, Rope)]


def rope_bound(head_dim: int, distances: np.ndarray, base: float = 10000.0) -> np.ndarray:
    """RoFormer's bound on RoPE's decay with distance r: (2/d) sum_{c=1}^{d/2} |S_c|, S_c = sum_{i<c} exp(i r theta_i).

    Su et al. 2021 (arXiv 2104.09864), section 3.4.3; at r = 0 it is (d/2 + 1) / 2.
    """
    theta = base ** (-2.0 * np.arange(head_dim // 2) / head_dim)
    partial = np.cumsum(np.exp(1j * np.asarray(distances, np.float64)[:, None] * theta), axis=1)
    return np.asarray(np.abs(partial).mean(axis=1))


def _products(q: jax.Array, k: jax.Array, falls: np.ndarray) -> np.ndarray:
    """[h, q, k] of q [q, h, d] and k [k, g, d], channels multiplied by falls [q, k, h or 1, d], or [1, 1, 1] for 1."""
    queries, keys = np.asarray(q, np.float64), np.repeat(np.asarray(k, np.float64), q.shape[1] // k.shape[1], axis=1)
    if falls.size == 1:
        return np.einsum("qhd,khd->hqk", queries, keys)
    rows = [np.einsum("hd,khd->hk", row, keys * fall) for row, fall in zip(queries, falls, strict=True)]
    return np.stack(rows, axis=1)


def _decay(subject: Subject, encoding: Encoding, distances: Any) -> np.ndarray:
    """What products fall to: [*distances, h or 1, d'], or [1, 1, 1] where they do not."""
    rate = encoding.decay(subject.params)
    if rate is None:
        return np.ones((1, 1, 1))
    return np.exp(-np.asarray(rate, np.float64) * np.asarray(distances)[..., None, None])


def _zeros(encoding: Encoding, hook: str, subject: Subject, count: int) -> jax.Array:
    """What `hook`, query or key, is given where all vectors are zero."""
    heads, back = subject.dims.num_heads if hook == "query" else _kv_heads(subject), encoding.history.get(hook, 0)
    return jnp.zeros((count, *([1 + back] if back else []), heads, subject.dims.head_dim), jnp.float32)


def _of(features: Features, tokens: slice) -> Features:
    return {name: values[tokens] for name, values in features.items()}


def _kv_heads(subject: Subject) -> int:
    return subject.dims.num_kv_heads or subject.dims.num_heads


def _features(subject: Subject, encoding: Encoding, length: int) -> Features:
    """What tokens keep beside their keys where the layer's input is zero."""
    if not encoding.acts_on("features"):
        return {}
    back = encoding.history.get("features", 0)
    nothing = jnp.zeros((length, *([1 + back] if back else []), subject.dims.model_dim), jnp.float32)
    return encoding.features(subject.params, nothing, jnp.arange(length, dtype=jnp.int32), None)[0]
