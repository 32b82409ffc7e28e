"""Traced functions as data: programs without calls. Steps that act on each pair alone also run on one head's tile."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal, jaxpr_as_fun

#: Operations on each element alone that Triton has, as have their derivatives.
ELEMENTWISE = frozenset(
    "abs acos acosh add add_any and asin asinh atan atan2 atanh cbrt ceil clamp convert_element_type cos cosh div eq "
    "exp exp2 expm1 floor ge gt integer_pow is_finite le log log1p logistic lt max min mul ne neg not or pow rem rsqrt "
    "select_n sign sin sinh sqrt square stop_gradient sub tan tanh xor".split()
)
#: Operations that add, drop or move axes.
SHAPES = frozenset({"broadcast_in_dim", "expand_dims", "reshape", "squeeze", "transpose"})
#: A call that has a derivative of its own.
CUSTOM = "custom_jvp_call"
#: The calls that are inlined, with the parameter that holds their program.
CALLS = {"closed_call": "call_jaxpr", "eval_jaxpr": "call_jaxpr", "jit": "jaxpr"}


class Step(NamedTuple):
    """An equation. Its outputs are places of values, and so are its inputs if they are no literals."""

    eqn: Any
    inputs: tuple[Any, ...]
    outputs: tuple[int, ...]

    @property
    def name(self) -> str:
        return self.eqn.primitive.name

    @property
    def places(self) -> list[int]:
        """The places of inputs."""
        return [x for x in self.inputs if isinstance(x, int)]

    def run(self, inputs: Sequence[Any]) -> list[Any]:
        primitive = self.eqn.primitive
        results = primitive.bind(*inputs, **primitive.get_bind_params(self.eqn.params))
        return list(results) if primitive.multiple_results else [results]


class Program(NamedTuple):
    """A traced function. The places of its values count up: arguments first, then the others as they are made."""

    avals: list[Any]
    constants: dict[int, Any]
    steps: list[Step]
    results: list[Any]

    @property
    def outline(self) -> list[Any]:
        """The steps without sizes."""
        return [(step.name, step.places, step.outputs) for step in self.steps]


def trace_program(function: Callable[..., Any], *arguments: Any, calls: dict[str, str] = CALLS) -> Program:
    """Return the program of a function of arrays or shapes. calls: those that are inlined, see CALLS."""
    program = Program([], {}, [], [])

    def new(var: Any) -> int:
        program.avals.append(var.aval)
        return len(program.avals) - 1

    def inline(closed: Any, inputs: Sequence[Any]) -> list[Any]:
        jaxpr = closed.jaxpr
        places = dict(zip(jaxpr.invars, inputs, strict=True)) | {var: new(var) for var in jaxpr.constvars}
        program.constants.update((places[var], x) for var, x in zip(jaxpr.constvars, closed.consts, strict=True))

        def read(atoms: Any) -> list[Any]:
            return [x if isinstance(x, Literal) else places[x] for x in atoms]

        for eqn in jaxpr.eqns:
            if inner := eqn.params.get(calls.get(eqn.primitive.name)):
                outputs = inline(inner, read(eqn.invars))
            else:
                outputs = [new(var) for var in eqn.outvars]
                program.steps.append(Step(eqn, tuple(read(eqn.invars)), tuple(outputs)))
            places.update(zip(eqn.outvars, outputs, strict=True))
        return read(jaxpr.outvars)

    closed = jax.make_jaxpr(function)(*arguments)
    program.results.extend(inline(closed, [new(var) for var in closed.jaxpr.invars]))
    return program


def trace_rules(step: Step) -> tuple[Program, Program]:
    """Return the program of a custom call, and that of (results, tangents) of arguments and their tangents.

    Neither is differentiated, so custom calls in them are inlined.
    """
    avals: Any = [x.aval for x in step.eqn.invars]
    avals = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in avals]
    inlined = functools.partial(trace_program, calls=CALLS | {CUSTOM: "call_jaxpr"})

    def both(*arguments: Any) -> Any:
        return jax.jvp(lambda *x: step.run(x), arguments[: len(avals)], arguments[len(avals) :])

    return inlined(jaxpr_as_fun(step.eqn.params["call_jaxpr"]), *avals), inlined(both, *avals, *avals)


def run_on_pairs(
    program: Program, steps: Iterable[int], values: dict[int, Any], shape: tuple[int, ...], rules: Any = ()
) -> None:
    """Add the results of steps to values by place, for one head and `shape` = (q, k) pairs.

    Each step is in ELEMENTWISE or SHAPES, or in `rules` with what `trace_rules` returns. An axis in the program is one
    of heads, queries, keys, or 1. So values need no others than [q or 1, k or 1], and no step that moves axes.
    """
    for n in steps:
        step = program.steps[n]
        inputs = [literal(x) if isinstance(x, Literal) else values[x] for x in step.inputs]
        if n in rules:
            results = custom_call(rules[n], shape, inputs)
        else:
            results = inputs[:1] if step.name in SHAPES else step.run([jnp.broadcast_to(x, shape) for x in inputs])
        values.update(zip(step.outputs, results, strict=True))


def literal(x: Literal) -> Any:
    return np.asarray(x.val, getattr(x.aval, "dtype", None))[()]


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def custom_call(rules: tuple[Program, Program], shape: tuple[int, ...], inputs: list[Any]) -> list[Any]:
    """Return the results of a call that has a derivative of its own, for pairs of this shape."""
    return _results(rules[0], shape, inputs)


@custom_call.defjvp
def _(rules: tuple[Program, Program], shape: tuple[int, ...], inputs: Any, tangents: Any) -> Any:
    results = _results(rules[1], shape, [*inputs[0], *tangents[0]])
    return results[: len(results) // 2], results[len(results) // 2 :]


def _results(program: Program, shape: tuple[int, ...], inputs: list[Any]) -> list[Any]:
    values = {n: x.astype(program.avals[n].dtype) for n, x in enumerate(inputs)}
    run_on_pairs(program, range(len(program.steps)), values, shape)
    return [jnp.broadcast_to(literal(x) if isinstance(x, Literal) else values[x], shape) for x in program.results]
