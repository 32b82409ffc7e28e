"""JAX functions computed one operation at a time, almost all by NumPy: a reference without a compiler.

XLA compiles a single operation in about 20 ms for a CPU, and in 50 to 100 ms for a GPU. Dense attention with Shaw's
vectors has 200 operations of different shapes. XLA takes 6 s of a CPU core for them, this file 0.8 s.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.extend import core

from posx.machine.platforms import is_on_cpu

#: Functions of NumPy for operations that compute each number of the result from one number of each operand.
ELEMENTWISE: dict[str, Callable[..., Any]] = {
    "abs": np.abs, "add": np.add, "add_any": np.add, "and": np.logical_and, "cos": np.cos, "div": np.divide,
    "eq": np.equal, "exp": np.exp, "ge": np.greater_equal, "gt": np.greater, "le": np.less_equal, "log": np.log,
    "log1p": np.log1p, "lt": np.less, "max": np.maximum, "min": np.minimum, "mul": np.multiply, "ne": np.not_equal,
    "neg": np.negative, "sign": np.sign, "sin": np.sin, "stop_gradient": np.asarray, "sub": np.subtract,
}  # fmt: skip
REDUCTIONS: dict[str, Callable[..., Any]] = {
    "reduce_and": np.all, "reduce_max": np.max, "reduce_min": np.min, "reduce_or": np.any, "reduce_sum": np.sum
}  # fmt: skip


def run_in_numpy(function: Callable[..., Any], *args: Any) -> Any:
    """Return function(*args) with NumPy arrays, computed one operation at a time.

    JAX computes the few operations that are not in this file, on a CPU if it has one.
    """
    with _cpu_context(), jax.disable_jit(), np.errstate(all="ignore"):  # loops of a known length are unrolled
        program, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
        results = _evaluate(program, jax.tree.leaves(args))
    return jax.tree.unflatten(jax.tree.structure(shapes), map(np.asarray, results))


def _cpu_context() -> contextlib.AbstractContextManager:
    """Return a context in which JAX computes on a CPU."""
    try:
        return contextlib.nullcontext() if is_on_cpu() else jax.default_device(jax.devices("cpu")[0])
    except RuntimeError:  # JAX_PLATFORMS names accelerators alone
        return contextlib.nullcontext()


def _evaluate(program: core.ClosedJaxpr, args: list[Any]) -> list[Any]:
    """Return the results of a traced function."""
    values = dict(zip(program.jaxpr.invars, map(np.asarray, args), strict=True))
    values |= zip(program.jaxpr.constvars, map(np.asarray, program.consts), strict=True)

    def read(atom: Any) -> np.ndarray:
        return values[atom] if isinstance(atom, core.Var) else np.asarray(atom.val, atom.aval.dtype)

    for operation in program.eqns:
        results = _compute(operation, [read(atom) for atom in operation.invars])
        values |= zip(operation.outvars, results, strict=True)
    return [read(atom) for atom in program.jaxpr.outvars]


def _compute(operation: core.JaxprEqn, args: list[Any]) -> list[Any]:
    """Return the results of one operation."""
    name, params, stated = operation.primitive.name, operation.params, operation.outvars[0].aval
    if name == "cond":
        return _evaluate(params["branches"][int(args[0])], args[1:])
    if name.startswith("custom_") and "call_jaxpr" in params:
        return _evaluate(params["call_jaxpr"], args)
    if name in OPERATIONS:
        result = OPERATIONS[name](*args, **params)
        if result.dtype == getattr(stated, "dtype", None):  # NumPy divides integers into floating-point numbers
            return [result]
    given = operation.primitive.bind(*args, **params)
    return list(map(np.asarray, given if operation.primitive.multiple_results else [given]))


def _elementwise(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **_: function(*args)


def _reduction(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, *, axes, **_: function(x, axis=axes)


def _broadcast(x: Any, *, shape: Any, broadcast_dimensions: Any, **_: Any) -> Any:
    aligned = [1] * len(shape)
    for n, size in zip(broadcast_dimensions, x.shape, strict=True):
        aligned[n] = size
    return np.broadcast_to(x.reshape(aligned), shape)


def _product(a: Any, b: Any, *, dimension_numbers: Any, preferred_element_type: Any, **_: Any) -> Any:
    """Return sums of products of a and b. The batch's axes are first, then the other axes of a, then those of b."""
    (over_a, over_b), (batch_a, batch_b) = dimension_numbers
    of_a, of_b = list(range(a.ndim)), list(range(a.ndim, a.ndim + b.ndim))
    for n, m in zip((*over_a, *batch_a), (*over_b, *batch_b), strict=True):
        of_b[m] = of_a[n]
    batch, summed = [of_a[n] for n in batch_a], [of_a[n] for n in over_a]
    free = [n for n in (*of_a, *of_b) if n not in (*batch, *summed)]
    return np.einsum(a, of_a, b, of_b, [*batch, *free], dtype=preferred_element_type, casting="same_kind")


def _slice(x: Any, *, start_indices: Any, limit_indices: Any, strides: Any) -> Any:
    return x[tuple(map(slice, start_indices, limit_indices, strides or (None,) * x.ndim))]


#: The operations that NumPy computes: functions of the operands, and of the operation's parameters by name.
OPERATIONS: dict[str, Callable[..., Any]] = {
    **{name: _elementwise(function) for name, function in ELEMENTWISE.items()},
    **{name: _reduction(function) for name, function in REDUCTIONS.items()},
    "broadcast_in_dim": _broadcast,
    "concatenate": lambda *arrays, dimension: np.concatenate(arrays, dimension),
    "convert_element_type": lambda x, *, new_dtype, **_: x.astype(new_dtype),
    "dot_general": _product,
    "reshape": lambda x, *, new_sizes, **_: x.reshape(new_sizes),
    "select_n": lambda which, *cases: np.choose(which.astype(int), cases),
    "slice": _slice,
    "squeeze": lambda x, *, dimensions: x.squeeze(dimensions),
    "transpose": lambda x, *, permutation: x.transpose(permutation),
}
