"""What float32 and bfloat16 lose: rounding, and nothing by position."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from posx.attention import causal, refusal
from posx.attention.dense import dense
from posx.attention.fused import fused
from posx.testing.findings import Findings
from posx.testing.subject import LENGTH, ROWS, Floats, Subject, Where, even_tiles

#: Tokens that all positions are moved by where float32 is compared with float64.
FAR = (0, 1, 17, 1000, 32_768, 1_000_000, 2**24 + 1)
#: One part in 256: the rounding of 8 bits.
UNIT = 2.0**-8


def single_outputs(subject: Subject, where: Where) -> np.ndarray:
    """Outputs of the dense executor in float32."""
    run = subject.compiled("single", functools.partial(subject.layer, executor=dense))
    return np.asarray(run(*subject.single((subject.weights, subject.floats)), where))


def check_float32(subject: Subject, findings: Findings) -> None:
    """The dense executor in float32 against float64, near and far."""
    for far in FAR:
        where = subject.where._replace(pos=subject.where.pos + np.int32(far))
        if where.pos.max() <= (subject.encoding.max_position or 2**31):
            found, wanted = single_outputs(subject, where), subject.dense(where)[0]
            bound = subject.rough * _sharpest(subject, where)
            findings.equal(f"positions moved by {far}: outputs", found, wanted, bound)


def _sharpest(subject: Subject, where: Where) -> float:
    """How many times larger than the products given here scores are: the largest temperature, 1 at least. So is what
    float32 rounds off them."""
    if not subject.encoding.acts_on("temperature"):
        return 1.0
    found = subject.of_tokens("temperature", where.pos)
    return 1.0 if found is None else max(1.0, float(np.abs(found).max()))


def check_reference(subject: Subject, findings: Findings) -> None:
    """The dense executor in float64 against the reference that the caller gives, one sequence at a time."""
    if subject.reference is None:
        return findings.nothing("no reference is given")
    where, floats = subject.where, subject.floats
    outputs, _ = subject.dense(where)
    for row in range(ROWS):
        pos, idx, segment = (a[row] for a in where)
        i, j = idx[:, None], idx[None, :]
        visible = (i >= 0) & (j >= 0) & (j <= i) & (segment[:, None] == segment[None, :])
        given = tuple(a[row] for a in floats[2:])

        def project(x: np.ndarray, given: tuple[np.ndarray, ...] = given) -> tuple[np.ndarray, ...]:
            if subject.weights is None:
                return given
            return tuple(a + np.einsum("tm,mhd->thd", x, subject.weights[n]) for n, a in zip("qkv", given, strict=True))

        x = np.zeros((LENGTH, subject.dims.model_dim)) if floats.x is None else floats.x[row]
        wanted = subject.reference(floats.params, x, project, pos, visible)
        findings.equal(f"row {row}: outputs", outputs[row], wanted, subject.exact)


def check_bfloat16(subject: Subject, findings: Findings) -> None:
    """Vectors are rounded to 8 bits, and nothing else is: where a hook maps them once more, outputs once, positions
    never. On CPUs scores, weights and sums are in float32, so that gradients of params are those of float32."""
    encoding = subject.encoding
    if encoding.acts_on("embed"):
        _check_embed(subject, findings)
    if encoding.sites == ("embed",):
        return
    narrow = lambda tree: jax.tree.map(lambda a: jnp.asarray(a, jnp.bfloat16), tree)  # noqa: E731
    floats = narrow(subject.floats._replace(params={}))
    exact = jax.tree.map(lambda a: np.asarray(a, np.float64), floats)._replace(params=subject.floats.params)
    known = np.broadcast_to(subject.known, (ROWS, LENGTH))
    where = Where(known, subject.in_order, 0 * known)
    params, cotangent = subject.single((subject.floats.params, narrow(subject.cotangent)))
    wanted = subject.dense(where, exact, np.float64(cotangent), subject.no_weights)
    kernel = refusal(encoding, causal(), in_order=True, segments=False) is None
    executors: list[tuple[str, Any]] = [("dense", dense), ("tiles", even_tiles)]
    for name, executor in executors + ([("fused", fused)] if kernel else []):
        run = subject.at_known_positions(executor, causal())
        found = run(narrow(subject.no_weights), floats._replace(params=params), cotangent)
        _compare(subject, findings, name, jax.device_get(found), wanted)


def _compare(subject: Subject, findings: Findings, name: str, found: tuple[Any, Floats], wanted: tuple[Any, Floats]):
    mapped = {"query", "key", "value", "output"} & {*subject.encoding.sites}
    # Logits of these sizes are off by up to 2 units if both sides are rounded, weights by twice that.
    findings.equal(f"{name}: outputs", found[0], wanted[0], 4 * UNIT if mapped else subject.rough, UNIT)
    findings.holds(found[0].dtype == jnp.bfloat16, f"{name}: outputs are {found[0].dtype}, not bfloat16")
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(found[1]), jax.tree.leaves(wanted[1]), strict=True
    ):  # fmt: skip
        learned = path[0].name == "params"
        bound = 4 * UNIT if mapped else subject.rough if learned else 2 * UNIT
        off = float(np.linalg.norm(np.asarray(a, np.float64) - b)) / max(float(np.linalg.norm(b)), 1e-30)
        leaf = jax.tree_util.keystr(path).lstrip(".")
        findings.holds(off <= bound, f"{name}: gradient of {leaf} is off by {off:.2g} of its norm, {bound:.2g} allowed")
        if learned:
            findings.holds(a.dtype == np.float32, f"{name}: gradient of {leaf} is {a.dtype}, not float32")


def _check_embed(subject: Subject, findings: Findings) -> None:
    """The sum in float32, rounded once."""
    x, pos = jnp.asarray(subject.floats.x, jnp.bfloat16), subject.where.pos
    run = subject.compiled("embed", jax.vmap(subject.encoding.embed, in_axes=(None, 0, 0)))
    found = run(subject.single(subject.floats.params), x, pos)
    with jax.enable_x64(True):
        wanted = run(subject.floats.params, np.asarray(x, np.float64), pos)
    findings.equal("embedded", found, wanted, 1e-6, UNIT)
