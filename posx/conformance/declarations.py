"""An encoding by itself: its hooks, the value they belong to, and the facts that the class declares.

Each fact is shown to hold, or its opposite if that is declared.
"""

from __future__ import annotations

import functools
import math
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from posx.attention import Mask, attend, causal, full
from posx.conformance.executors import decode_spans
from posx.conformance.findings import Findings
from posx.conformance.rounding import SHIFTS, single_outputs
from posx.conformance.subject import (
    KNOWN,
    LENGTH,
    ORDER,
    PREFIX,
    CheckSubject,
    add_axes,
    run_in_float64,
    single,
    variant,
    where_tokens,
)
from posx.contract import HOOKS, Chain, Encoding, acting_hooks, distance_terms, position_shape, shapes
from posx.errors import ConfigError, UndefinedLength

#: Hooks that map token vectors, so that results have the type of these. All other results are at least float32.
BY_VECTORS = {name for name, hook in HOOKS.items() if hook.gives and hook.takes[:1] in (("x",), ("vectors",))}

#: How to write a hook without implicit promotion, by a word of the error that JAX raises.
REMEDIES = {
    "TypePromotionError": "Cast explicitly: posx.as_float(x) for distances, x.astype(s.dtype) for vectors.",
    "rank_promotion": "Write the missing axes, for example with a[None, :].",
}


def check_hooks(subject: CheckSubject, findings: Findings) -> None:
    """Check shapes and types under strict promotion.

    Vectors keep their type. All else is float32, or float64 if 64-bit types are on.
    """
    for vectors, types in subject.types.items():
        if isinstance(types, ConfigError):
            remedy = next((f". {remedy}" for word, remedy in REMEDIES.items() if word in str(types)), "")
            findings.holds(False, f"with {vectors} vectors, under strict rank and type promotion: {types}{remedy}")
            continue
        for hook, kinds in types.items():
            by_vectors = hook in BY_VECTORS
            wanted = "float32" if vectors == "bfloat16" and not by_vectors else vectors
            cast = "the vectors' own type, such as .astype(vectors.dtype)" if by_vectors else "at least float32"
            findings.holds(
                kinds <= {wanted},
                f"{hook} returns {', '.join(sorted(kinds))} for {vectors} vectors, not {wanted}. Cast it to {cast}.",
            )


def check_value(subject: CheckSubject, findings: Findings) -> None:
    """Check that a pickled copy is the same value, and that `resolve` and `at_length` return encodings."""
    encoding, dims = subject.encoding, subject.dims
    again = pickle.loads(pickle.dumps(encoding))
    findings.holds(again == encoding and hash(again) == hash(encoding), "a pickled copy is not equal to the value")
    findings.holds(repr(again) == repr(encoding), f"a pickled copy prints as {again!r}")
    findings.holds(encoding.resolve(dims) == encoding, "resolve changes a value that is already resolved")
    for length in (dims.train_len, 2 * dims.train_len):
        findings.holds(isinstance(encoding.at_length(length), Encoding), f"at_length({length}) returns no encoding")


def check_eager(subject: CheckSubject, findings: Findings) -> None:
    """Compare each hook outside jit with the hook inside, and at float positions with integer ones."""
    called, rough = shapes.hook_shapes(subject.encoding, subject.dims), subject.rough
    params = single(subject.floats.params)
    given = {hook: _make_arrays(subject.encoding, hook, arguments) for hook, (arguments, _) in called.items()}

    def all_hooks(params: Any, given: dict[str, Any]) -> dict[str, Any]:
        return {hook: getattr(subject.encoding, hook)(params, *arguments) for hook, arguments in given.items()}

    run = subject.compile("hooks", all_hooks)
    wanted = jax.device_get(run(params, given))
    findings.equal("outside jit:", all_hooks(*jax.tree.map(jnp.asarray, (params, given))), wanted, rough, rough)
    if not subject.encoding.integer_positions:
        floats = jax.tree.map(lambda a: a.astype(np.float32) if _is_positions(subject.encoding, a) else a, given)
        findings.equal("at float positions:", run(params, floats), wanted, rough, rough)


def _is_positions(encoding: Encoding, array: Any) -> bool:
    """Return whether an array is one of integer positions [t] or [t, n], or of distances [n]."""
    return array.dtype == np.int32 and array.shape[1:] == position_shape(encoding)


def _make_arrays(encoding: Encoding, hook: str, arguments: Any) -> Any:
    """Make arrays for shapes: positions from 1, distances from -2, random floats, and all pairs visible."""
    rng = np.random.default_rng(0)

    def fill(struct: Any) -> np.ndarray:
        if struct.dtype == np.bool_:
            return np.ones(struct.shape, np.bool_)
        if hook == "by_distance":
            return np.arange(struct.shape[0]).astype(struct.dtype) - 2
        if _is_positions(encoding, struct):
            return np.arange(1, math.prod(struct.shape) + 1, dtype=np.int32).reshape(struct.shape)
        if struct.dtype == np.int32:  # a count in a carry
            return rng.integers(100, size=struct.shape, dtype=np.int32)
        return rng.standard_normal(struct.shape).astype(np.float32)

    return jax.tree.map(fill, arguments)


def check_shift_invariant(subject: CheckSubject, findings: Findings) -> None:
    """Check that adding one constant to all positions changes nothing, or something if declared False."""
    if not subject.encoding.shift_invariant:
        shifted = subject.shift_slots((0, *SHIFTS), subject.one_document(ORDER))
        still, *moved = (subject.outputs(slots) for _, slots in shifted)
        problem = "shift_invariant = False, but adding a constant to all positions changes nothing"
        return findings.differ(problem, moved, [still] * len(moved))
    still = subject.outputs(subject.near)
    for shift, slots in subject.shift_slots(SHIFTS):
        outputs = subject.outputs(slots)
        findings.equal(f"positions moved by {shift}: outputs", outputs, still, max(1e-7, subject.exact))
    if findings.problems:
        findings.problems[0] += ". If the method reads absolute positions, declare shift_invariant = False."


def check_prefix(subject: CheckSubject, findings: Findings) -> None:
    """Check that vectors, positions and number of later tokens do not change earlier outputs."""
    later, slots, exact = ORDER[0] >= PREFIX, subject.unpacked, subject.exact
    floats, before = subject.floats.change_tokens(later), subject.outputs(slots)[:, :PREFIX]
    moved = slots._replace(pos=where_tokens(later, slots.pos[:, ::-1], slots.pos))
    findings.equal("if later tokens change: outputs", subject.outputs(slots, floats)[:, :PREFIX], before, 0)
    findings.equal("if later tokens move too: outputs", subject.outputs(moved, floats)[:, :PREFIX], before, exact)
    findings.equal("without later tokens: outputs", decode_spans(subject, [slice(0, PREFIX)]), before, exact)


def check_reach(subject: CheckSubject, findings: Findings) -> None:
    """Check that `by_distance` is constant from `reach` on, in both directions, and not before.

    If vectors have no declared reach, say from which distance on they are constant.
    """
    reach = subject.encoding.reach
    if reach is None or not subject.encoding.acts_on("by_distance"):
        return findings.nothing(f"no reach is declared{_measured_reach(subject)}")
    far, near = subject.defined_distances(reach + np.array([0, 1, 2, 1000, 100_000])), np.arange(reach)[-1000:]
    if not far.size:
        return findings.nothing(f"reach = {reach} is beyond max_position = {subject.encoding.max_position}")
    for name, term in _distance_terms(subject, np.concatenate([far, -far, near])).items():
        past, future, inside = np.split(term, [len(far), 2 * len(far)])
        for side, rows in (("past", past), ("future", future)):
            first = np.broadcast_to(rows[:1], rows.shape)
            findings.equal(f"reach = {reach}, but {name} still changes beyond it in the {side}", rows, first, 0)
        if reach:
            problem = f"reach = {reach}, but {name} is already constant at shorter distances"
            findings.differ(problem, inside, past[:1] + 0 * inside)


#: The largest distance that is tried as the reach of vectors.
LOOKED_AT = 1024
_FASTER = "Attention is faster with"


def _measured_reach(subject: CheckSubject) -> str:
    """Say from which distance on vectors by distance are constant, "" if there is none or no vector."""
    distances = subject.defined_distances(np.concatenate([np.arange(LOOKED_AT + 1), 2 ** np.arange(11, 24)]))
    vectors = distance_terms(subject.encoding, subject.floats.params).keys() & {"query", "key", "value"}
    if not vectors or distances[-1] <= LOOKED_AT:
        return ""
    changes = np.zeros(len(distances), bool)
    for term in _distance_terms(subject, np.concatenate([distances, -distances])).values():
        for side in np.split(term, 2):
            changes |= (side != side[-1:]).reshape(len(side), -1).any(axis=1)
    reach = int(changes.nonzero()[0].max(initial=-1)) + 1
    return f", but nothing changes from {reach} tokens on. {_FASTER} reach = {reach}." if reach <= LOOKED_AT else ""


def check_fades(subject: CheckSubject, findings: Findings) -> None:
    """Check that the bias by distance falls without bound, or the token bias from token to token, if declared.

    An encoding may do so without declaring it: it is then slower, but right.
    """
    problems = _problems_with_fading(subject)
    if not subject.encoding.fades:
        hint = "" if problems else f", but it falls at these parameters. {_FASTER} fades = True, if it always falls."
        return findings.nothing(f"fades = False{hint}")
    for problem in problems:
        findings.holds(False, f"fades = True, but {problem}")


def _problems_with_fading(subject: CheckSubject) -> list[str]:
    """List why the bias by distance, or the token bias, does not fall."""
    encoding, distances = subject.encoding, subject.defined_distances(2 ** np.arange(24))
    bias, by_token = _distance_terms(subject, distances).get("bias"), encoding.acts_on("token_bias")
    problems = [] if bias is not None or by_token else ["there is neither a bias by distance nor a token bias"]
    if bias is not None:
        falling_from = 12 if isinstance(encoding, Chain) else 0  # in a chain, once the other parts are constant
        if (np.diff(bias[falling_from:], axis=0) > 0).any():
            problems.append("the bias rises with distance, at least for some parameters")
        half = len(distances) // 2
        if not (bias[-1] < bias[half]).all():
            problems.append(f"the bias is equal at distances {distances[half]} and {distances[-1]}")
    if by_token:
        u = subject.run_per_token("token_bias", ORDER).sum(axis=-1)  # [b, t, h]
        if (np.diff(u, axis=1) > 0).any():
            problems.append("the token bias rises from one token to the next")
        if not (u[:, -1] < u[:, 0]).any():
            problems.append("the token bias stays the same")
    return problems


def check_causal_only(subject: CheckSubject, findings: Findings) -> None:
    """Check that non-causal masks are refused if declared, and that it is declared if later keys all look the same."""
    encoding, distances = subject.encoding, subject.defined_distances(np.arange(1, 1000))
    if encoding.causal_only:
        refused = _refuses(subject, ConfigError, KNOWN, full())
        return findings.holds(refused, "causal_only = True, but attend accepts a mask that is not causal")
    if encoding.acts_on("token_bias"):
        problem = "causal_only = False, but a token bias favours keys further ahead. Declare causal_only = True."
        return findings.holds(False, problem)
    earlier, later = (_distance_terms(subject, sign * distances).values() for sign in (1, -1))
    if set(acting_hooks(encoding)) != {"by_distance"} or not later:
        return findings.nothing("causal_only = False, and hooks other than by_distance act")
    same = [all((term == term[:1]).all() for term in terms) for terms in (earlier, later)]
    problem = "causal_only = False, but later keys at all distances get the same terms. Declare causal_only = True."
    findings.holds(same[0] or not same[1], problem)


def _distance_terms(subject: CheckSubject, distances: np.ndarray) -> dict[str, np.ndarray]:
    """Return the terms at signed distances [n] by name, each [n, ...]; {} if there are none."""
    if not subject.encoding.acts_on("by_distance"):
        return {}
    run = subject.compile("by_distance", subject.encoding.by_distance)
    terms = run_in_float64(run, subject.floats.params, distances.astype(np.int32))._asdict()
    given_terms = {name: term for name, term in terms.items() if term is not None}
    return {name: np.moveaxis(x, -1, 0) if name in ("bias", "scaled") else x for name, x in given_terms.items()}


def check_positions(subject: CheckSubject, findings: Findings) -> None:
    """Check that positions up to the last alone are defined, and that the order of slots has no effect."""
    encoding, last = subject.encoding, subject.encoding.max_position
    wanted = subject.outputs(subject.slots)
    findings.holds(np.isfinite(wanted).all(), "outputs at some position are NaN or infinite")
    if not encoding.axes:
        elsewhere = subject.slots._replace(pos=subject.slots.pos[::-1])
        findings.equal("axes = 0, but at other positions: outputs", subject.outputs(elsewhere), wanted, 0)
    # Features, and scores of whole rows, follow the order of the slots.
    if not encoding.acts_on("features") and encoding.tiling == "any":
        order = np.random.default_rng(7).permutation(LENGTH)
        outputs = subject.outputs(*subject.reorder(order))
        findings.equal("slots in another order: outputs", outputs, wanted[:, order], subject.exact)
    if last is not None:
        pos = np.where(ORDER < LENGTH - 1, 1, last + 1).astype(np.int32)
        outputs = single_outputs(subject, subject.one_document(pos))[:, -1]
        problem = f"max_position = {last}, but under jit outputs at {last + 1} are finite. Return NaN there."
        findings.holds(np.isnan(outputs).all(), problem)
        problem = f"max_position = {last}, but attend accepts position {last + 1}"
        findings.holds(_refuses(subject, UndefinedLength, pos), problem)
    if encoding.integer_positions:
        refused = _refuses(subject, ValueError, ORDER.astype(np.float32))
        findings.holds(refused, "integer_positions = True, but attend accepts float positions")


def _refuses(subject: CheckSubject, error: type[Exception], pos: np.ndarray, mask: Mask = causal()) -> bool:
    """Return whether `attend` raises `error` at positions known on the host."""
    params, x, q, k, v = single(subject.floats)
    pos = add_axes(subject.encoding, pos)
    try:
        jax.eval_shape(functools.partial(attend, subject.encoding, q_slots=pos, x=x, mask=mask), params, q, k, v)
    except error:
        return True
    return False


def check_tiling(subject: CheckSubject, findings: Findings) -> None:
    """Check that an encoding has the same outputs in small tiles, or others if it declares whole rows of keys."""
    encoding = subject.encoding
    if encoding.tiling != "any":
        anyway = CheckSubject(variant(encoding, tiling="any"), subject.dims, params=subject.floats.params)
        problem = f"tiling = {encoding.tiling!r}, but outputs in small tiles are the same"
        return findings.differ(problem, anyway.tiles(subject.slots).outputs, subject.run(subject.slots).outputs)
    if not encoding.acts_on("score"):
        return findings.nothing("`tiling` is 'any', and the encoding has no score")
    tiled, wanted = (run(subject.slots).outputs for run in (subject.tiles, subject.run))
    problem = "tiling = 'any', but scores depend on other keys of the tile. Declare tiling = 'rows' or 'neighbours'."
    findings.holds(np.abs(tiled - wanted).max(initial=0) <= subject.exact, problem)
