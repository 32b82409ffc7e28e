"""All executors evaluate one formula: values and gradients against the dense one in float64, at any positions."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np

from posx.attention import causal, full, refusal, window
from posx.testing.findings import SEEN, Findings
from posx.testing.subject import (
    FAMILIES,
    LENGTH,
    PADDING,
    PREFIX,
    ROWS,
    STEP,
    Floats,
    Subject,
    Where,
    even_tiles,
    fused,
    small_slabs,
)  # fmt: skip


def summed(grads: Floats) -> Floats:
    """Gradients of `Subject.tiles`, those of params summed over rows as a batch has them."""
    return grads._replace(params=jax.tree.map(lambda a: a.sum(axis=0), grads.params))


def with_window(where: Where) -> Where:
    """The same for a window of five tokens."""
    return where._replace(idx=np.where(where.idx < 0, -1, where.idx * np.int32(STEP)))


def check_tiles(subject: Subject, findings: Findings) -> None:
    """Small tiles at any positions, orders and documents, under a causal mask and under a window."""
    for name, where in (("causal", subject.where), ("window", with_window(subject.where))):
        (o, grads), found = subject.dense(where), subject.tiles(where)
        findings.equal(f"{name}: outputs", found[0], o, subject.exact)
        findings.equal(f"{name}: gradients", summed(found[1]), grads, subject.exact, subject.exact)


def check_strips(subject: Subject, findings: Findings) -> None:
    """Tiles at consecutive positions, whose distances are tabulated and read as strips."""
    if subject.encoding.sites == ("embed",):
        return findings.nothing("only embeds")
    pos = np.broadcast_to(subject.known, (ROWS, LENGTH))
    for name, mask, idx in (("causal", causal(), subject.in_order), ("full", full(), 0 * subject.in_order)):
        if name == "full" and not subject.bidirectional:
            continue
        o, grads = subject.dense(Where(pos, idx, 0 * pos), weights=subject.no_weights)
        program = subject.at_known_positions(even_tiles, mask)

        def run(floats: Floats, cotangent: np.ndarray, program: Any = program) -> Any:
            with jax.enable_x64(True):
                return jax.device_get(program(subject.no_weights, floats, cotangent))

        found = run(subject.floats, subject.cotangent)
        findings.equal(f"{name}: outputs", found[0], o, subject.exact)
        findings.equal(f"{name}: gradients", found[1], grads, subject.exact, subject.exact)
        check_slopes(run, subject, found[1], findings, leaves="params")


def check_gradients(subject: Subject, findings: Findings) -> None:
    """Against finite differences; nothing comes back to later tokens from earlier ones, or to empty slots."""
    where = with_window(subject.where)

    def in_tiles(floats: Floats, cotangent: np.ndarray) -> tuple[np.ndarray, Floats]:
        o, grads = subject.tiles(where, floats, cotangent)
        return o, summed(grads)

    early = subject.cotangent * (np.arange(LENGTH) < PREFIX)[:, None, None]
    padded = FAMILIES.index("left padded")
    for name, run in (("dense", functools.partial(subject.dense, where)), ("tiles", in_tiles)):
        grads = run(subject.floats, subject.cotangent)[1]
        check_slopes(run, subject, grads, findings, name)
        back = run(subject.floats, early)[1]
        for leaf in ("x", "q", "k", "v"):
            grad = getattr(back, leaf)
            if grad is None:
                continue
            findings.holds(not grad[:, PREFIX:].any(), f"{name}: {leaf} of later tokens gets a gradient from earlier")
            findings.holds(grad[:, :PREFIX].any(), f"{name}: {leaf} gets no gradient")
            empty = getattr(grads, leaf)[padded, :PADDING]
            cancels = subject.exact if subject.encoding.acts_on("features") else 0
            findings.holds((np.abs(empty) <= cancels).all(), f"{name}: {leaf} of empty slots gets a gradient")


def check_slopes(run, subject: Subject, grads: Floats, findings: Findings, name: str = "", leaves: str = "") -> None:
    """Gradients along a random direction in each array by central differences of the outputs of `run`."""
    rng = np.random.default_rng(5)
    step, tolerance = (1e-6, 1e-6) if subject.wide else (1e-3, 1e-2)
    flat, structure = jax.tree_util.tree_flatten_with_path(subject.floats)
    build = functools.partial(jax.tree.unflatten, structure)
    values = [np.asarray(value) for _, value in flat]
    for n, ((path, value), grad) in enumerate(zip(flat, jax.tree.leaves(grads), strict=True)):
        if leaves not in jax.tree_util.keystr(path):
            continue
        direction = rng.standard_normal(value.shape)
        up, down = (
            np.sum(np.asarray(run(build(moved), subject.cotangent)[0]) * subject.cotangent)
            for moved in ([a + s * direction if m == n else a for m, a in enumerate(values)] for s in (step, -step))
        )
        findings.equal(
            f"{name} slope along a direction in {jax.tree_util.keystr(path).lstrip('.')}".strip(),
            np.sum(np.asarray(grad) * direction), (up - down) / (2 * step), tolerance, tolerance,
        )  # fmt: skip


def check_fused(subject: Subject, findings: Findings) -> None:
    """The vendor's kernel and blocks of it, in float32: it takes the softmax so whatever it is given."""
    if why := refusal(subject.encoding, causal(), in_order=True, segments=False):
        return findings.nothing(why)
    pos = subject.where.pos % 32
    where = Where(pos, subject.in_order, 0 * pos)
    o, grads = subject.dense(with_window(where))
    wanted = o, grads
    floats, weights, cotangent = subject.single((subject.floats, subject.weights, subject.cotangent))
    sites = subject.encoding.sites
    for name, executor in (("one call", fused), *([("in blocks", small_slabs)] if "bias" in sites else [])):
        run = subject.compiled(name, functools.partial(subject.with_gradients, executor=executor, mask=window(5)))
        found = run(weights, floats, Where(pos), cotangent)
        for path, a in jax.tree_util.tree_leaves_with_path(found):
            b = dict(jax.tree_util.tree_leaves_with_path(wanted))[path]
            findings.equal(f"{name}: {jax.tree_util.keystr(path)}", a, b, subject.rough * max(np.abs(b).max(), 1e-3))


def check_padding(subject: Subject, findings: Findings) -> None:
    """A row's empty slots give 0 and take nothing in: neither what they hold nor where they stand changes a token, in
    front, behind or between; but between where neighbours are read, if so declared."""
    padded, empty = FAMILIES.index("left padded"), np.arange(LENGTH) < PADDING
    wanted, _ = subject.dense(subject.where)
    for name, outputs in (("dense", wanted), ("tiles", subject.tiles(subject.where)[0])):
        findings.holds(not outputs[padded, :PADDING].any(), f"{name}: outputs of empty slots are not 0")
    pos = np.where(empty, subject.where.pos[:, ::-1], subject.where.pos)
    found, _ = subject.dense(subject.where._replace(pos=pos), subject.floats.changed(empty))
    findings.equal("with other empty slots: outputs", found[padded], wanted[padded], subject.exact)
    kept = wanted[padded, PADDING:]
    alone = subject.encoding.reads_neighbours and subject.encoding.tiling == "any"
    findings.holds(not alone, "reads_neighbours is declared True, but tiling is 'any'")
    slots = np.arange(LENGTH)
    places = {"behind": np.roll(slots, -PADDING)}
    if not subject.encoding.acts_on("features"):  # which are made from slot to slot
        places["between"] = np.concatenate([slots[PADDING:PREFIX], slots[:PADDING], slots[PREFIX:]])
    for place, order in places.items():
        params, vectors = subject.floats.params, tuple(subject.floats[1:])
        where, vectors = jax.tree.map(lambda a, order=order: a[:, order], (subject.where, vectors))
        found = subject.dense(where, Floats(params, *vectors))[0][padded][~empty[order]]
        if place == "between" and subject.encoding.reads_neighbours:
            findings.differ("reads_neighbours is declared True, but with empty slots between", found, kept, SEEN)
        else:
            findings.equal(f"with empty slots {place}: outputs", found, kept, subject.exact)
