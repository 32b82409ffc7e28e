"""What a class declares about itself, shown to be so; and where it declares the opposite, shown not to be."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from posx.attention import attend, full
from posx.encodings import Chain, Encoding
from posx.encodings.base import BY_DISTANCE, FALLING, acting
from posx.errors import ConfigError, UndefinedLength
from posx.testing.decoding import decoded_prefix
from posx.testing.findings import SEEN, Findings
from posx.testing.precision import single_outputs
from posx.testing.subject import LENGTH, PREFIX, ROWS, Subject, Where

#: Tokens that all positions are moved by.
SHIFTS = (1, 17, 1000, 32_768, 1_000_000, 2**24 + 1)


def check_shift_invariant(subject: Subject, findings: Findings) -> None:
    """Adding one constant to all positions changes nothing; or something, if declared False."""
    if not subject.encoding.shift_invariant:
        order, last = subject.in_order, subject.encoding.max_position or 2**31
        shifts = [n for n in SHIFTS if order.max() + n <= last]
        still, *moved = (subject.dense(Where(order + np.int32(n), order, 0 * order))[0] for n in (0, *shifts))
        findings.differ("declared False, but if all positions move", moved, [still] * len(moved), SEEN)
        return
    given, (still, _) = subject.where, subject.dense(subject.where)
    for shift in SHIFTS:
        if given.pos.max() + shift <= (subject.encoding.max_position or 2**31):
            found, _ = subject.dense(given._replace(pos=given.pos + np.int32(shift)))
            findings.equal(f"moved by {shift}: outputs", found, still, max(1e-7, subject.exact))


def check_prefix_consistent(subject: Subject, findings: Findings) -> None:
    """Neither the vectors nor the positions of later tokens, nor their number, change what came before."""
    later = np.arange(LENGTH) >= PREFIX
    where, (before, _) = subject.unpacked, subject.dense(subject.unpacked)
    floats = subject.floats.changed(later)
    moved = where._replace(pos=np.where(later, where.pos[:, ::-1], where.pos))
    others, elsewhere = (subject.dense(where, floats)[0][:, :PREFIX] for where in (where, moved))
    alone, before = decoded_prefix(subject), before[:, :PREFIX]
    if subject.encoding.prefix_consistent:
        findings.equal("if later tokens change: outputs", others, before, 0)
        findings.equal("if later tokens move too: outputs", elsewhere, before, subject.exact)
        findings.equal("without later tokens: outputs", alone, before, subject.exact)
        return
    findings.differ("declared False, but if later tokens change or go", (others, elsewhere, alone), (before,) * 3, SEEN)


def check_reach(subject: Subject, findings: Findings) -> None:
    """From `reach` on, either way, `curve` and `relative` are constant, and nearer they are not."""
    encoding, reach = subject.encoding, subject.encoding.reach
    if reach is None or not acting(encoding, BY_DISTANCE):
        return findings.nothing("declares none")
    far = reach + np.array([0, 1, 2, 1000, 100_000])
    near = np.arange(reach)[-1000:]
    terms = _by_distance(subject, np.concatenate([far, -far, near]))
    for name, term in terms.items():
        ahead, behind, inside = np.split(term, [len(far), 2 * len(far)])
        for side, rows in (("past", ahead), ("future", behind)):
            findings.equal(f"{name} beyond {reach} in the {side}", rows, np.broadcast_to(rows[:1], rows.shape), 0)
        if reach:
            findings.differ(f"reach = {reach}, but nearer too {name}", inside, ahead[:1] + 0 * inside, SEEN)


def check_fades(subject: Subject, findings: Findings) -> None:
    """`curve` falls on and on with distance, or `potential` from token to token, if declared; one that does so
    undeclared is right, but slower."""
    if not subject.encoding.fades:
        return findings.nothing("not declared")
    falling = acting(subject.encoding, FALLING)
    findings.holds(bool(falling), "declared True, but there is neither a curve nor a potential")
    if "curve" in falling:
        curve = _by_distance(subject, 2 ** np.arange(24))["curve"]
        # In a chain it falls once the others have come to rest.
        falling_from = 12 if isinstance(subject.encoding, Chain) else 0
        rises = np.diff(curve[falling_from:], axis=0) > 0
        findings.holds(not rises.any(), "declared True, but the curve rises with distance")
        findings.holds(
            (curve[-1] < curve[12]).all(), f"declared True, but the curve is the same at {2**12} and {2**23}"
        )
    if "potential" in falling:
        u = subject.of_tokens("potential", subject.in_order).sum(axis=-1)  # [b, t, h] of sequences in order
        findings.holds(
            (np.diff(u, axis=1) <= 0).all(), "declared True, but the potential rises from a token to the next"
        )
        findings.holds((u[:, -1] < u[:, 0]).any(), "declared True, but the potential stays the same")


def check_causal_only(subject: Subject, findings: Findings) -> None:
    """Refused where later keys are seen, if declared; and declared, where nothing would tell later keys apart."""
    encoding, distances = subject.encoding, np.arange(1, 1000)
    if encoding.causal_only:
        params, x, q, k, v = subject.single(subject.floats)
        where = {"q_pos": subject.known, "k_pos": subject.known, "x": x, "mask": full()}
        call = functools.partial(attend, encoding, params, q, k, v, **where)
        findings.holds(_raises(ConfigError, call), "declared True, but attend serves a mask that is not causal")
        return
    if encoding.acts_on("potential"):
        return findings.holds(False, "declared False, but a potential gives keys more the further ahead they stand")
    if not {*encoding.sites} <= {"bias", "relative"} or not _by_distance(subject, distances):
        return findings.nothing("not declared, and there are more than terms by distance")
    earlier, later = (_by_distance(subject, sign * distances).values() for sign in (1, -1))
    same = [all((term == term[:1]).all() for term in terms) for terms in (earlier, later)]
    findings.holds(same[0] or not same[1], "declared False, but all later keys get the same, near or far")


def _by_distance(subject: Subject, distances: np.ndarray) -> dict[str, np.ndarray]:
    """What acts at signed distances [n], each [n, ...]."""
    encoding = subject.encoding

    def terms(params: Any, distance: Any) -> dict[str, Any]:
        found: dict[str, Any] = encoding.relative(params, distance)._asdict() if encoding.acts_on("relative") else {}
        found = {f"relative.{name}": term for name, term in found.items() if term is not None}
        if encoding.acts_on("curve"):
            found["curve"] = encoding.curve(params, distance.astype(jnp.result_type(float)))
        return found

    with jax.enable_x64(True):
        found = subject.compiled("terms", terms)(subject.floats.params, distances.astype(np.int32))
    return {name: np.moveaxis(term, -1, 0) if name == "curve" else term for name, term in jax.device_get(found).items()}


def check_positions(subject: Subject, findings: Findings) -> None:
    """Positions count, places do not: slots in any order give the same, and positions up to the last are defined."""
    where, floats = subject.where, subject.floats
    wanted, _ = subject.dense(where)
    findings.holds(np.isfinite(wanted).all(), "outputs are not finite at some position")
    # Features, and scores of whole rows, go by the order of the slots.
    if not subject.encoding.acts_on("features") and subject.encoding.tiling == "any":
        order = np.random.default_rng(7).permutation(LENGTH)
        moved = jax.tree.map(lambda a: a[:, order], floats._replace(params={}))._replace(params=floats.params)
        found, _ = subject.dense(Where(*(a[:, order] for a in where)), moved)
        findings.equal("slots in another order: outputs", found, wanted[:, order], subject.exact)
    _check_last(subject, findings)
    _check_kind(subject, findings)


def _check_last(subject: Subject, findings: Findings) -> None:
    last = subject.encoding.max_position
    if last is None:
        return
    pos = np.full((ROWS, LENGTH), 1, np.int32)
    pos[:, -1] = last + 1
    o = single_outputs(subject, Where(pos, subject.in_order, 0 * pos))
    findings.holds(
        np.isnan(o[:, -1]).all(), f"under jit position {last + 1} is served, but max_position = {last}: give NaN there"
    )
    refused = _raises(UndefinedLength, lambda: _attended(subject, pos))
    findings.holds(refused, f"attend serves position {last + 1}, but max_position = {last}")


def _check_kind(subject: Subject, findings: Findings) -> None:
    if subject.encoding.integer_positions:
        pos = subject.in_order.astype(np.float32)
        refused = _raises(ValueError, lambda: _attended(subject, pos))
        findings.holds(refused, "attend serves positions between tokens")


def _attended(subject: Subject, pos: np.ndarray) -> None:
    """A call at positions known on the host, by shapes alone."""
    params, x, q, k, v = subject.single(subject.floats)
    jax.eval_shape(lambda *a: attend(subject.encoding, *a, q_pos=pos, k_pos=pos, x=x), params, q, k, v)


def _raises(error: type[Exception], function: Callable[[], Any]) -> bool:
    try:
        function()
    except error:
        return True
    return False


def check_tiling(subject: Subject, findings: Findings) -> None:
    """One tile must span all keys, if so declared: cut anywhere, the outputs are others."""
    encoding = subject.encoding
    if encoding.tiling == "any":
        return findings.nothing("it declares 'any', which the check of tiles shows")
    cut: Any = dataclasses.dataclass(frozen=True)(type(type(encoding).__name__, (type(encoding),), {"tiling": "any"}))
    fields = [field.name for field in dataclasses.fields(encoding) if field.init]
    anyway: Encoding = cut(**{name: getattr(encoding, name) for name in fields})
    other = Subject(anyway, subject.dims).tiles(subject.where)[0]
    findings.differ("tiling = 'rows', but in small tiles", other, subject.dense(subject.where)[0], SEEN)
