"""Out of the cache, token by token and in chunks, an encoding gives what it gives for the whole sequence."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from posx.attention import attend, batch_features, seen_by, token_map
from posx.attention.dense import dense
from posx.encodings import values
from posx.testing.findings import Findings
from posx.testing.subject import LENGTH, PREFIX, ROWS, Subject, small_tiles

#: Slots of the cache, some of them never filled, and the chunk that follows what was decoded one by one.
CAPACITY, CHUNK = 20, slice(2, 2 + PREFIX)


def check_decode(subject: Subject, findings: Findings) -> None:
    """Single tokens by the dense executor and a chunk in tiles; keys mapped on reading, or on writing as declared."""
    if not subject.encoding.prefix_consistent:
        return findings.nothing("declares prefix_consistent = False")
    whole, _ = subject.dense(subject.unpacked)
    tokens = _tokens(subject)
    encoding = subject.encoding
    maps = encoding.acts_on("key") or encoding.acts_on("value")
    for mapped in (False, True) if encoding.caches_mapped_keys and maps else (False,):
        name = "keys cached as mapped" if mapped else "keys cached as projected"
        singles = _decoded(subject, tokens, [slice(n, n + 1) for n in range(LENGTH)], dense, mapped)
        findings.equal(f"{name}, token by token", singles, whole, subject.exact)
        chunk = _decoded(subject, tokens, [CHUNK], small_tiles, mapped)
        findings.equal(f"{name}, a chunk", chunk, whole[:, CHUNK], subject.exact)
    findings.holds(
        not (encoding.caches_mapped_keys and _reads_keys_as_projected(subject)),
        "caches_mapped_keys is declared True, but keys are read as projected: a chain's cache may hold mapped ones",
    )


def _reads_keys_as_projected(subject: Subject) -> bool:
    """Whether `score` reads `tile.k`, or `relative` has vectors that meet keys."""
    encoding, called = subject.encoding, values.check_hooks(subject.encoding, subject.dims)
    if "relative" in called and called["relative"][1].key is not None:
        return True
    if "score" not in called:
        return False
    s, tile = called["score"][0]

    def of_keys(k: Any, params: Any, s: Any, rest: Any) -> Any:
        return encoding.score(params, s, rest._replace(k=k))

    params = subject.single(subject.floats.params)
    program = jax.make_jaxpr(of_keys)(tile.k, params, s, tile._replace(k=None)).jaxpr
    return any(program.invars[0] in equation.invars for equation in program.eqns)


def decoded_prefix(subject: Subject) -> np.ndarray:
    """Outputs of the first PREFIX tokens [b, t, h, d] before there are others."""
    return _decoded(subject, _tokens(subject), [slice(0, PREFIX)], small_tiles, mapped=False)


def _tokens(subject: Subject) -> dict[str, Any]:
    """What a cache is given: q, k, v [b, t, ...], k and v as mapped one token at a time, and features by chunks."""
    encoding, floats, pos, idx = subject.encoding, subject.floats, subject.unpacked.pos, subject.unpacked.idx

    def embedded(params: Any, weights: Any, x: Any) -> Any:
        x = jax.vmap(encoding.embed, in_axes=(None, 0, 0))(params, x, pos)
        return x, {n: jnp.einsum("btm,mhd->bthd", x, weights[n]) for n in "qkv"}

    def carried(params: Any, x: Any) -> Any:
        """Features by one token, one token, the chunk, and the rest one by one."""
        spans = [slice(0, 1), slice(1, 2), CHUNK, *(slice(n, n + 1) for n in range(CHUNK.stop, LENGTH))]
        found, carry = [], None
        for span in spans:
            features, carry = batch_features(encoding, params, x[:, span], pos[:, span], carry, idx[:, span])
            found.append(features)
        return jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=1), *found)

    def mapped(params: Any, k: Any, v: Any, features: Any) -> Any:
        one = lambda tree: jax.tree.map(lambda a: a.reshape(-1, 1, *a.shape[2:]), tree)  # noqa: E731
        seen = ((hook, seen_by(encoding, hook, a, idx)[0]) for hook, a in (("key", k), ("value", v)))
        maps = (
            token_map(encoding, hook, params, one(a), jnp.asarray(pos).reshape(-1, 1), one(features))
            for hook, a in seen
        )
        return tuple(a.reshape(ROWS, LENGTH, *a.shape[2:]) for a in maps)

    with jax.enable_x64(True):
        x, vectors = floats.x, {n: getattr(floats, n) for n in "qkv"}
        if encoding.acts_on("embed"):
            x, added = subject.compiled("embedded", embedded)(floats.params, subject.weights, x)
            vectors = {n: vectors[n] + added[n] for n in vectors}
        features = {}
        if encoding.acts_on("features"):
            features = subject.compiled("carried", carried)(floats.params, x)
        k, v = subject.compiled("mapped", mapped)(floats.params, vectors["k"], vectors["v"], features)
        return jax.device_get({**vectors, "mapped_k": k, "mapped_v": v, "features": features})


def _decoded(subject: Subject, tokens: dict[str, Any], spans: list[slice], executor: Any, mapped: bool) -> np.ndarray:
    """Outputs of the tokens in `spans`, all of one length, each out of a cache that is filled so far: [b, t, h, d]."""
    pos, idx = subject.unpacked.pos, subject.unpacked.idx

    def filled(a: np.ndarray, nothing: float = 0) -> np.ndarray:
        """[spans * b, slots, ...]: what the cache holds when the span has been written."""
        slots = np.full((len(spans), ROWS, CAPACITY, *a.shape[2:]), nothing, a.dtype)
        for n, span in enumerate(spans):
            slots[n, :, : span.stop] = a[:, : span.stop]
        return slots.reshape(-1, *slots.shape[2:])

    def asked(a: np.ndarray) -> np.ndarray:
        return np.concatenate([a[:, span] for span in spans])

    def recent(span: slice) -> Any:
        """Queries before the span, where later ones look back at them."""
        return seen_by(subject.encoding, "query", tokens["q"][:, : span.start], idx[:, : span.start])[1]

    def run(params: Any, q: Any, k: Any, v: Any, q_where: Any, k_where: Any, features: Any, q_recent: Any) -> Any:
        (q_pos, q_idx), (k_pos, k_idx) = q_where, k_where
        return attend(
            subject.encoding, params, q, k, v, q_pos=q_pos, k_pos=k_pos, q_idx=q_idx, k_idx=k_idx,
            q_features=features[0], k_features=features[1], q_recent=q_recent, executor=executor, keys_mapped=mapped,
        )  # fmt: skip

    keys = (filled(tokens[f"mapped_{n}" if mapped else n]) for n in "kv")
    with jax.enable_x64(True):
        o = subject.compiled(("decode", executor, mapped), run)(
            subject.floats.params, asked(tokens["q"]), *keys, (asked(pos), asked(idx)), (filled(pos), filled(idx, -1)),
            tuple(jax.tree.map(f, tokens["features"]) for f in (asked, filled)),
            jax.tree.map(lambda *a: np.concatenate(a), *map(recent, spans)),
        )  # fmt: skip
    return np.concatenate(np.split(np.asarray(o), len(spans)), axis=1)
