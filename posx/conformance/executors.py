"""The numbers of attention against the dense executor in float64: all executors, float32, bfloat16, and decoding."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from posx.attention import Slots, attend, batch_features, causal, full, refusal, token_map, window, with_previous_tokens
from posx.attention.dense import dense
from posx.attention.fused import fused
from posx.conformance.findings import Findings, leaves
from posx.conformance.subject import (
    EMPTY,
    LENGTH,
    ORDER,
    PADDED,
    PREFIX,
    ROWS,
    CheckSubject,
    Floats,
    LayerResult,
    add_axes,
    even_tiles,
    run_in_float64,
    single,
    small_tiles,
    where_tokens,
    with_window,
)
from posx.contract import acting_hooks, shapes

#: The fused kernel for 5 queries at a time if there is a bias. The 13 queries take three calls, the last one padded.
small_slabs = functools.partial(fused, slab_pairs=5 * LENGTH)

#: Rows of three and of two documents.
PACKED = Slots(
    np.array([[*range(3), *range(4), *range(6)]] + [[*range(8), *range(5)]] * (ROWS - 1), np.int32), ORDER,
    np.array([[0] * 3 + [1] * 4 + [2] * 6] + [[0] * 8 + [1] * 5] * (ROWS - 1), np.int32),
)  # fmt: skip

#: The slots of the cache, some of them never filled, and the chunk that follows two single tokens.
CAPACITY, CHUNK = 20, slice(2, 2 + PREFIX)
SINGLES = [slice(n, n + 1) for n in range(LENGTH)]


def _compare(subject: CheckSubject, findings: Findings, name: str, result: LayerResult, wanted: LayerResult) -> None:
    """Compare outputs and gradients in float64."""
    findings.equal(f"{name}: outputs", result.outputs, wanted.outputs, subject.exact)
    findings.equal(f"{name}: gradients of", result.gradients, wanted.gradients, subject.exact, subject.exact)


def check_tiles(subject: CheckSubject, findings: Findings) -> None:
    """Compare small tiles at any positions, orders and documents, under a causal mask and under a window."""
    for name, slots in (("causal mask", subject.slots), ("window", with_window(subject.slots))):
        _compare(subject, findings, name, subject.tiles(slots), subject.run(slots))


def check_strips(subject: CheckSubject, findings: Findings) -> None:
    """Compare tiles at consecutive positions, whose distances are tabulated and read as strips."""
    if acting_hooks(subject.encoding) == ("embed",):
        return findings.nothing("the encoding only embeds")
    masks = ("causal mask", causal(), ORDER), ("no mask", full(), 0 * ORDER)
    for name, mask, idx in masks[:1] if subject.encoding.causal_only else masks:
        wanted = subject.run(subject.one_document(idx=idx), weights=subject.no_weights)
        run = functools.partial(subject.run, None, weights=subject.no_weights, executor=even_tiles, mask=mask)
        result = run()
        _compare(subject, findings, name, result, wanted)
        _check_slopes(run, subject, result.gradients, findings, name, leaf="params")


def check_gradients(subject: CheckSubject, findings: Findings) -> None:
    """Compare gradients with finite differences. Outputs have none for later tokens, nor for empty slots."""
    slots = with_window(subject.slots)
    early = subject.cotangent * (ORDER < PREFIX)[..., None, None]
    cancels = subject.exact if subject.encoding.acts_on("features") else 0
    for name, method in (("dense", subject.run), ("tiles", subject.tiles)):
        run = functools.partial(method, slots)
        grads = run().gradients
        _check_slopes(run, subject, grads, findings, name)
        for path, grad in leaves(grads.params):
            findings.holds(grad.any(), f"{name}: no output depends on params.{path}, its gradient is 0")
        back, of = run(cotangent=early).gradients, f"{name}: the gradient of"
        for leaf in ("x", "q", "k", "v"):
            grad = getattr(back, leaf)
            if grad is None:
                continue
            findings.holds(not grad[:, PREFIX:].any(), f"{of} earlier outputs with respect to later {leaf} is not 0")
            acts = grad[:, :PREFIX].any() or not _changes(subject, run, leaf)
            findings.holds(acts, f"{of} outputs with respect to {leaf} is 0")
            empty = getattr(grads, leaf)[PADDED, EMPTY]
            findings.holds((np.abs(empty) <= cancels).all(), f"{of} outputs with respect to empty {leaf} is not 0")


def _changes(subject: CheckSubject, run: Any, leaf: str) -> bool:
    """Return whether the outputs of `run` change with the arrays `leaf` of the floats."""
    moved = subject.floats._replace(**{leaf: 2 * getattr(subject.floats, leaf)})
    return bool((run(moved).outputs != run().outputs).any())


def _check_slopes(run: Any, subject: CheckSubject, grads: Any, findings: Findings, name: str, leaf: str = "") -> None:
    """Compare gradients along a random direction in each array with central differences of the outputs of `run`."""
    rng = np.random.default_rng(5)
    step, tolerance = (1e-6, 1e-6) if subject.wide else (1e-3, 1e-2)
    values, structure = jax.tree.flatten(subject.floats)
    for n, (path, value, grad) in enumerate(leaves(subject.floats, grads)):
        if leaf not in path:
            continue
        direction = rng.standard_normal(value.shape)
        up, down = (
            np.sum(run(jax.tree.unflatten(structure, moved)).outputs * subject.cotangent)
            for moved in ([a + s * direction if m == n else a for m, a in enumerate(values)] for s in (step, -step))
        )
        slope, wanted = np.sum(grad * direction), (up - down) / (2 * step)
        findings.equal(f"{name}: slope along a direction in {path}", slope, wanted, tolerance, tolerance)


def check_fused(subject: CheckSubject, findings: Findings) -> None:
    """Compare the vendor's kernel, whole and in blocks, in float32: its softmax is in float32 for any type."""
    if why := refusal(subject.encoding, subject.floats.params, causal(), in_order=True, segments=False):
        return findings.nothing(why)
    pos = subject.slots.pos % 32
    one = Slots(pos, ORDER, 0 * ORDER)
    wanted = subject.run(with_window(one))
    weights, floats, cotangent = single((subject.weights, subject.floats, subject.cotangent))
    has_bias = subject.encoding.acts_on("bias") or subject.encoding.acts_on("by_distance")
    for name, executor in (("one call", fused), *([("in blocks", small_slabs)] if has_bias else [])):
        result = subject.program(executor, window(5))(weights, floats, Slots(pos), cotangent)
        for path, a, b in leaves(result, wanted):
            findings.equal(f"{name}: {path}", a, b, subject.rough * max(np.abs(b).max(), 1e-3))


def check_padding(subject: CheckSubject, findings: Findings) -> None:
    """Check that empty slots return 0, and that their contents, positions and places change no token.

    Empty slots between tokens may change outputs if the encoding declares that it reads neighbours.
    """
    slots, order, padding = subject.slots, ORDER[0], EMPTY.sum()
    wanted = subject.outputs(slots)[PADDED]
    for name, outputs in (("dense", wanted), ("tiles", subject.outputs(slots, executor=small_tiles)[PADDED])):
        findings.holds(not outputs[EMPTY].any(), f"{name}: outputs of empty slots are not 0")
    elsewhere = slots._replace(pos=where_tokens(EMPTY, slots.pos[:, ::-1], slots.pos))
    result = subject.outputs(elsewhere, subject.floats.change_tokens(EMPTY))[PADDED]
    findings.equal("with other empty slots: outputs", result, wanted, subject.exact)
    places = {"at the end": np.roll(order, -padding)}
    if not subject.encoding.acts_on("features"):  # they are computed from slot to slot
        places["between tokens"] = np.r_[order[padding:PREFIX], order[:padding], order[PREFIX:]]
    for place, order in places.items():
        result = subject.outputs(*subject.reorder(order))[PADDED][~EMPTY[order]]
        if place == "between tokens" and subject.encoding.tiling == "neighbours":
            problem = "tiling = 'neighbours', but empty slots between tokens change nothing"
            findings.differ(problem, result, wanted[~EMPTY])
        else:
            findings.equal(f"with empty slots {place}: outputs", result, wanted[~EMPTY], subject.exact)


def check_packing(subject: CheckSubject, findings: Findings) -> None:
    """Compare rows of documents with every document alone, under a window."""
    packed = with_window(PACKED._replace(pos=add_axes(subject.encoding, PACKED.pos)))
    alone = (packed._replace(idx=np.where(packed.segment == n, packed.idx, -1)) for n in range(3))
    # Outputs and gradients of empty slots are 0, so those of documents add up to those of the row.
    wanted = jax.tree.map(lambda *a: sum(a), *map(subject.run, alone))
    for name, run in (("dense", subject.run), ("tiles", subject.tiles)):
        _compare(subject, findings, name, run(packed), wanted)
    if findings.problems and subject.encoding.acts_on("features"):
        hint = (
            "the carry of `features` runs through all documents of a row: let outputs depend on its differences alone"
        )
        findings.problems.insert(1, hint)


def check_reference(subject: CheckSubject, findings: Findings) -> None:
    """Compare the dense executor in float64 with the reference that the caller gives, sequence by sequence.

    If the encoding is defined for keys after the query, one sequence is compared without a mask too.
    """
    if subject.reference is None:
        return findings.nothing("no reference is given")
    floats = subject.floats

    def compare(name: str, slots: Slots, rows: range) -> None:
        outputs = subject.outputs(slots)
        for row in rows:
            pos, idx, segment = (a[row] for a in slots)
            i, j = idx[:, None], idx[None, :]
            visible = (i >= 0) & (j >= 0) & (j <= i) & (segment[:, None] == segment[None, :])
            given = tuple(a[row] for a in floats[2:])

            def project(x: np.ndarray, given: tuple[np.ndarray, ...] = given) -> tuple[np.ndarray, ...]:
                weights = (subject.weights[n] for n in "qkv")
                return tuple(a + np.einsum("tm,mhd->thd", x, w) for w, a in zip(weights, given, strict=True))

            x = np.zeros((LENGTH, subject.dims.model_dim)) if floats.x is None else floats.x[row]
            wanted = subject.reference(floats.params, x, project, pos, visible)
            findings.equal(f"{name}row {row}: outputs", outputs[row], wanted, subject.exact)

    compare("", subject.slots, range(ROWS))
    if not subject.encoding.causal_only:
        compare("no mask: ", subject.one_document(idx=0 * ORDER), range(1))


def check_decode(subject: CheckSubject, findings: Findings) -> None:
    """Compare single tokens by the dense executor, and a chunk in tiles, with vectors as projected and as cached."""
    whole, encoding = subject.outputs(subject.unpacked), subject.encoding
    for cached in (False, True) if acting_hooks(encoding, ("key", "value")) else (False,):
        name = "vectors as cached" if cached else "vectors as projected"
        singles = decode_spans(subject, SINGLES, dense, cached)
        findings.equal(f"{name}, token by token: outputs", singles, whole, subject.exact)
        chunk = decode_spans(subject, [CHUNK], cached=cached)
        findings.equal(f"{name}, a chunk: outputs", chunk, whole[:, CHUNK], subject.exact)
    if encoding.revised_by:
        for name, spans, tokens in (("token by token", SINGLES, slice(None)), ("a chunk", [CHUNK], CHUNK)):
            outputs = decode_spans(subject, spans, dense, cached=True, revised=True)
            findings.equal(f"keys as revised, {name}: outputs", outputs, whole[:, tokens], subject.exact)
    findings.holds(
        encoding.reads_raw_keys or not _reads_raw_keys(subject),
        "reads_raw_keys = False, but `score` or `by_distance` reads keys as projected, and a chain's cache may hold "
        "mapped keys. Declare reads_raw_keys = True.",
    )


def _reads_raw_keys(subject: CheckSubject) -> bool:
    """Return whether `score` reads `tile.k`, or `by_distance` has vectors for keys."""
    encoding, called = subject.encoding, shapes.hook_shapes(subject.encoding, subject.dims)
    if "by_distance" in called and called["by_distance"][1].key is not None:
        return True
    if "score" not in called:
        return False
    s, tile = called["score"][0]
    of_keys = lambda k, params, s, rest: encoding.score(params, s, rest._replace(k=k))  # noqa: E731
    program = jax.make_jaxpr(of_keys)(tile.k, single(subject.floats.params), s, tile._replace(k=None)).jaxpr
    return any(program.invars[0] in equation.invars for equation in program.eqns)


def _tokens(subject: CheckSubject) -> dict[str, Any]:
    """Return q as `attend` takes it, k and v [b, t, ...], both mapped one token at a time, and features by chunks."""
    encoding, (pos, idx, _) = subject.encoding, subject.unpacked

    def contents(weights: Any, floats: Floats) -> dict[str, Any]:
        params, x, q, k, v = subject.embed_tokens(weights, floats, pos)
        parts, carry = [], None
        if encoding.acts_on("features"):  # two single tokens, the chunk, and the rest one by one
            for span in (*SINGLES[: CHUNK.start], CHUNK, *SINGLES[CHUNK.stop :]):
                features, carry = batch_features(encoding, params, x[:, span], Slots(pos[:, span], idx[:, span]), carry)
                parts.append(features)
        features = jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=1), *parts or [{}])

        def map_tokens(hook: str, x: jax.Array) -> jax.Array:
            given = with_previous_tokens(encoding, hook, x, idx)[0], jnp.asarray(pos), features
            each = jax.tree.map(lambda a: a.reshape(-1, 1, *a.shape[2:]), given)
            mapped_tokens = token_map(encoding, hook, params, *each)
            return mapped_tokens.reshape(ROWS, LENGTH, *mapped_tokens.shape[2:])

        q, of_keys, of_values = (
            with_previous_tokens(encoding, "query", q, idx)[0],
            map_tokens("key", k),
            map_tokens("value", v),
        )
        return {"q": q, "k": k, "v": v, "mapped_k": of_keys, "mapped_v": of_values, "features": features}

    return run_in_float64(subject.compile("contents", contents), subject.weights, subject.floats)


def _revise_keys(subject: CheckSubject, tokens: dict[str, Any], span: slice) -> dict[str, Any]:
    """Return the contents of a cache, with keys as the tokens in `span` read them. A single token revises them."""
    encoding, idx, features = subject.encoding, subject.unpacked.idx, tokens["features"]
    arrived = np.arange(LENGTH) < (span.stop if span.stop - span.start == 1 else span.start)
    only = {n: np.where(arrived.reshape(1, -1, *[1] * (x.ndim - 2)), x, 0) for n, x in features.items()}
    revise = subject.compile("revise", jax.vmap(encoding.revise, in_axes=(None, 0, 0, 0)))
    later = idx[:, None, :] > idx[:, :, None]
    return tokens | {"k": run_in_float64(revise, subject.floats.params, tokens["k"], only, later)}


def decode_spans(
    subject: CheckSubject,
    spans: list[slice],
    executor: Any = small_tiles,
    cached: bool = False,
    revised: bool = False,
) -> np.ndarray:
    """Return outputs [b, t, h, d] of the tokens in `spans`, all of one length, each from a cache filled so far."""
    tokens, (pos, idx, _) = _tokens(subject), subject.unpacked

    def fill_slots(a: np.ndarray, stop: int, empty: float = 0) -> np.ndarray:
        """Return [b, slots, ...]: the contents of the cache after the tokens up to `stop` have been written."""
        free = [(0, 0), (0, CAPACITY - stop), *[(0, 0)] * (a.ndim - 2)]
        return np.pad(a[:, :stop], free, constant_values=empty)

    def run(params: Any, q: Any, k: Any, v: Any, q_slots: Slots, k_slots: Slots, features: Any) -> Any:
        options = {"features": features, "executor": executor, "cached": cached}
        return attend(subject.encoding, params, q, k, v, q_slots, k_slots, **options)

    k = "mapped_k" if cached and not subject.encoding.reads_raw_keys else "k"
    v = "mapped_v" if cached else "v"
    outputs = []
    for span in spans:
        queries = jax.tree.map(lambda a, span=span: a[:, span], tokens)
        seen = tokens
        if revised:
            seen, names = _revise_keys(subject, tokens, span), subject.encoding.revised_by
            seen["features"] = {n: x for n, x in tokens["features"].items() if n not in names}
            if span.stop - span.start == 1:
                queries["features"] = {n: x for n, x in queries["features"].items() if n not in names}
        keys = jax.tree.map(lambda a, span=span: fill_slots(a, span.stop), seen)
        outputs.append(run_in_float64(
            subject.compile(("decode", executor, cached, revised), run),
            subject.floats.params, queries["q"], keys[k], keys[v], Slots(pos[:, span], idx[:, span]),
            Slots(fill_slots(pos, span.stop), fill_slots(idx, span.stop, -1)), (queries["features"], keys["features"]),
        ))  # fmt: skip
    return np.concatenate(outputs, axis=1)
