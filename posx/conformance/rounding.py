"""The rounding of attention: float32 and bfloat16 against float64."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from posx.attention import Slots, causal, refusal
from posx.attention.dense import dense
from posx.attention.fused import fused
from posx.conformance.findings import Findings, leaves
from posx.conformance.subject import CheckSubject, Floats, even_tiles, run_in_float64, single, variant
from posx.contract import MAPS, Composite, Encoding, Features, Params, acting_hooks, parts
from posx.machine.platforms import is_on_cpu

#: Tokens that all positions are moved by.
SHIFTS = (1, 23, 1000, 32_768, 1_000_000, 2**24 + 1)
#: One part in 256: the most that rounding to 8 bits changes a number by, of its size.
UNIT = 2.0**-8
#: Random signs of roundings that are tried.
DRAWS = 8


def single_outputs(subject: CheckSubject, slots: Slots) -> np.ndarray:
    """Return outputs of the dense executor in float32."""
    return np.asarray(subject.layer_program()(*single((subject.weights, subject.floats)), slots))


def check_float32(subject: CheckSubject, findings: Findings) -> None:
    """Compare the dense executor in float32 with float64, at near and far positions.

    Both are given the same parameters and vectors, rounded to float32: only what the encoding itself rounds counts.
    """
    weights, floats = jax.tree.map(np.float64, single((subject.weights, subject.floats)))
    for shift, slots in subject.shift_slots((0, *SHIFTS)):
        outputs, bound = single_outputs(subject, slots), subject.rough
        wanted = subject.run(slots, floats, weights=weights).outputs
        if subject.encoding.acts_on("logit_scale"):  # rounding grows with it
            bound *= max(1.0, float(np.abs(subject.run_per_token("logit_scale", slots.pos)).max()))
        findings.equal(f"positions moved by {shift}: outputs", outputs, wanted, bound)


def check_bfloat16(subject: CheckSubject, findings: Findings) -> None:
    """Check that only vectors are rounded to 8 bits: each map rounds once more, outputs once, positions never.

    On CPUs scores, weights and sums are in float32, so that gradients of params are as exact as in float32.
    Accelerators also round the operands of products: weights, and the gradients of scores and weights. If maps act,
    `_rounding_effects` derives from the encoding itself how far their roundings may move each gradient.
    """
    encoding = subject.encoding
    if encoding.acts_on("embed"):
        _check_embed(subject, findings)
    if acting_hooks(encoding) == ("embed",):
        return
    narrow = functools.partial(jnp.asarray, dtype=jnp.bfloat16)
    floats = subject.floats.map(narrow)
    params, cotangent = single((floats.params, narrow(subject.cotangent)))
    exact = floats._replace(params=params).map(lambda a: np.asarray(a, np.float64))
    exact, cotangent64 = jax.tree.map(np.float64, (exact, cotangent))
    wanted = subject.run(subject.one_document(), exact, cotangent64, subject.no_weights)
    kernel = refusal(encoding, params, causal(), in_order=True, segments=False) is None
    weights = jax.tree.map(narrow, subject.no_weights)
    # If a map rounds both sides, logits of this size are off by up to 2 units, and weights by twice that.
    rounds = max(sum(_maps(part, hook) for part in parts(encoding)) for hook in MAPS)
    # Weights are off by half a unit if they are rounded, and values are at most 4.
    of_outputs = 4 * UNIT * rounds + (0 if is_on_cpu() else 2 * UNIT) or subject.rough
    moved = _rounding_effects(subject, exact, cotangent64, wanted.gradients)
    for name, executor in {"dense": dense, "tiles": even_tiles, **({"fused": fused} if kernel else {})}.items():
        o, grads = subject.program(executor, causal())(weights, floats._replace(params=params), None, cotangent)
        findings.equal(f"{name}: outputs", o, wanted.outputs, of_outputs, UNIT)
        findings.holds(o.dtype == jnp.bfloat16, f"{name}: outputs are {o.dtype}, not bfloat16")
        for leaf, a, b in leaves(grads, wanted.gradients):
            size = max(float(np.linalg.norm(b)), 1e-30)
            is_exact = is_on_cpu() and leaf.startswith("params")
            own = subject.rough if is_exact else 2 * UNIT  # the gradient itself is rounded too
            off, bound = float(np.linalg.norm(a - b)) / size, own + 2 * rounds * moved[leaf] / size
            problem = f"{name}: gradient of {leaf} is off by {off:.2g} of its norm, allowed {bound:.2g}"
            findings.holds(off <= bound, problem)
        for leaf, a in grads.params.items():
            findings.holds(a.dtype == np.float32, f"{name}: gradient of params.{leaf} is {a.dtype}, not float32")


def _rounding_effects(
    subject: CheckSubject, floats: Floats, cotangent: np.ndarray, gradients: Floats
) -> dict[str, float]:
    """Return how far the gradient of each leaf moves, in its norm, if every map rounds vectors and their gradients.

    A gradient is a sum whose terms may cancel: that of a rotation's frequency depends on distances, and its terms grow
    with positions. So the rounding of each term counts. Rounding changes a number by at most UNIT of it. Here each
    mapped number, and its gradient on the way back, is changed by UNIT of it in float64, up or down at random. The
    result is the root mean square over several draws. Real roundings are 0.4 UNIT in the root mean square, so that
    twice the result is five standard deviations. Maps that follow one another round as often as there are maps.
    """
    encoding, maps = subject.encoding, acting_hooks(subject.encoding, MAPS)
    squares = dict.fromkeys([leaf for leaf, _ in leaves(gradients)], 0.0)
    if not maps:
        return squares
    hooks = {hook: _round_hook(encoding, hook) for hook in maps}
    rounding = CheckSubject(variant(encoding, **hooks), subject.dims, params=floats.params)
    rng = np.random.default_rng(6)
    for _ in range(DRAWS):  # other last bits, which are the signs
        given, other = jax.tree.map(lambda a: a * (1 + 1e-5 * rng.standard_normal(a.shape)), (floats[1:], cotangent))
        result = rounding.run(subject.one_document(), Floats(floats.params, *given), other, subject.no_weights)
        for leaf, a, b in leaves(result.gradients, gradients):
            squares[leaf] += float(np.sum((a - b) ** 2)) / DRAWS
    return {leaf: square**0.5 for leaf, square in squares.items()}


def _round_hook(encoding: Encoding, hook: str) -> Any:
    """Return the hook with its result moved as far as rounding may move it."""

    def call(self: Encoding, params: Params, vectors: jax.Array, pos: jax.Array, features: Features) -> jax.Array:
        return _perturb(getattr(encoding, hook)(params, vectors, pos, features))

    return call


@jax.custom_vjp
def _perturb(x: jax.Array) -> jax.Array:
    """Return x with each number changed by UNIT of it, up or down by one of its last bits; so is its gradient."""
    return x * (1 + UNIT * (1 - 2 * (jnp.floor(jnp.abs(jnp.frexp(x)[0]) * 2**22) % 2)))


_perturb.defvjp(lambda x: (_perturb(x), None), lambda _, gradient: (_perturb(gradient),))


def _maps(part: Encoding, hook: str) -> bool:
    """Return whether the code of a part itself maps vectors by `hook`, not only the parts that it joins."""
    joins = isinstance(part, Composite) and getattr(type(part), hook) is getattr(Composite, hook)
    return part.acts_on(hook) and not joins


def _check_embed(subject: CheckSubject, findings: Findings) -> None:
    """Check that the sum of embeddings is in float32, rounded once."""
    x, pos = jnp.asarray(subject.floats.x, jnp.bfloat16), subject.slots.pos
    run = subject.compile("embed", jax.vmap(subject.encoding.embed, in_axes=(None, 0, 0)))
    embeddings = run(single(subject.floats.params), x, pos)
    wanted = run_in_float64(run, subject.floats.params, np.asarray(x, np.float64), pos)
    findings.equal("embeddings", embeddings, wanted, 1e-6, UNIT)
