"""The hooks by themselves: shapes and types, the same under jit as outside, and the value they belong to."""

from __future__ import annotations

import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from posx.encodings import Encoding, values
from posx.encodings.base import BY_DISTANCE
from posx.errors import ConfigError
from posx.testing.dtypes import types_found
from posx.testing.findings import Findings
from posx.testing.subject import Subject

#: Hooks whose results follow the type of token vectors; all others are at least float32, `output` as the sums it gets.
BY_VECTORS = ("embed", "query", "key", "value")


def check_hooks(subject: Subject, findings: Findings) -> None:
    """Shapes and types under strict promotion: float32 for all that depends on position (float64 where 64-bit types are
    on), vectors in the type they came in."""
    for vectors, wanted in (("float32", "float32"), ("float64", "float64"), ("bfloat16", "float32")):
        try:
            found = types_found(subject.encoding, subject.dims, vectors)
        except ConfigError as error:
            findings.holds(
                False, f"with {vectors} vectors, under strict rank and type promotion: {error}{_remedy(error)}"
            )
            continue
        for hook, kinds in found.items():
            due = vectors if hook in BY_VECTORS else wanted
            found_kinds = ", ".join(sorted(kinds))
            cast = "the vectors' own type, such as .astype(q.dtype)" if hook in BY_VECTORS else "at least float32"
            findings.holds(
                kinds <= {due},
                f"{hook} gives {found_kinds} for {vectors} vectors, not {due}; cast the result to {cast}",
            )


def _remedy(error: ConfigError) -> str:
    """Return how to write a hook so that it needs no implicit promotion; "" if the error is about something else."""
    if "TypePromotionError" in str(error):
        return "; cast to the type of the vectors that the hook is given, for example with .astype(s.dtype)"
    if "rank_promotion" in str(error):
        return "; write the missing axes, for example with a[None, :]"
    return ""


def check_value(subject: Subject, findings: Findings) -> None:
    """Equal, hashed and printed by its fields; resolved once; parameters drawn from the key that `init` is given."""
    encoding, dims = subject.encoding, subject.dims
    again = pickle.loads(pickle.dumps(encoding))
    findings.holds(again == encoding and hash(again) == hash(encoding), "a pickled value comes back as another one")
    findings.holds(repr(again) == repr(encoding), f"is printed as {again!r} after pickling")
    findings.holds(encoding.resolve(dims) == encoding, "resolving a resolved value changes it")
    for length in (dims.train_len, 2 * dims.train_len):
        findings.holds(isinstance(encoding.at_length(length), Encoding), f"at_length({length}) gives no encoding")


def check_eager(subject: Subject, findings: Findings) -> None:
    """Each hook gives outside jit what it gives under it, and at whole positions of type float what at integers."""
    called = values.check_hooks(subject.encoding, subject.dims)
    params = subject.single(subject.floats.params)
    given = {hook: _filled(hook, arguments) for hook, (arguments, _) in called.items()}

    def all_hooks(params: Any, given: dict[str, Any]) -> dict[str, Any]:
        return {hook: getattr(subject.encoding, hook)(params, *arguments) for hook, arguments in given.items()}

    run = subject.compiled("hooks", all_hooks)
    wanted = jax.device_get(run(params, given))
    arrays = jax.tree.map(jnp.asarray, (params, given))
    findings.equal("outside jit: ", all_hooks(*arrays), wanted, subject.rough, subject.rough)
    if not subject.encoding.integer_positions:
        floats = jax.tree.map(lambda a: a.astype(np.float32) if _is_positions(a) else a, given)
        findings.equal("at positions of type float: ", run(params, floats), wanted, subject.rough, subject.rough)


def _is_positions(array: Any) -> bool:
    return array.dtype == np.int32 and len(array.shape) == 1


def _filled(hook: str, arguments: Any) -> Any:
    """Arrays for shapes: positions count up from 1, distances from -2, floats are random, all pairs are visible."""
    rng = np.random.default_rng(0)

    def fill(struct: Any) -> np.ndarray:
        if struct.dtype == np.bool_:
            return np.ones(struct.shape, np.bool_)
        if hook in BY_DISTANCE:
            return np.arange(struct.shape[0]).astype(struct.dtype) - 2
        if _is_positions(struct):
            return np.arange(1, struct.shape[0] + 1, dtype=np.int32)
        if struct.dtype == np.int32:  # what a carry counts
            return rng.integers(100, size=struct.shape, dtype=np.int32)
        return rng.standard_normal(struct.shape).astype(np.float32)

    return jax.tree.map(fill, arguments)
