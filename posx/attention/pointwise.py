"""Scores that act pair by pair, for the kernel: numbers of tokens, and a function of pairs of these numbers.

`score` is written for all heads and reads vectors. An instance of the kernel has one head, and no vectors but those of
products. So the program of `score`, as JAX traces it, is split in two:

* All that depends on queries alone, on keys alone or on neither is evaluated outside, for all tokens at once. JAX
  differentiates it as it does any other function.
* The kernel runs the steps of pairs, each of which must act on every pair alone. They read results of the other steps:
  numbers of tokens, [h or 1, t].

GRAPE-A's gates are such numbers, and its steps of pairs are s - slope (gate_i + gate_j) |i - j|. Axes are told apart by
their sizes: a first trace has numbers of queries and of keys that no other axis has.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from posx.attention.programs import CUSTOM, ELEMENTWISE, SHAPES, Program, Step, run_on_pairs, trace_program, trace_rules
from posx.attention.tiles import TileInputs, make_tile, map_batch, score_tile
from posx.contract import Encoding, Params, Tile, defined_hooks, wide_dtype

Struct = jax.ShapeDtypeStruct
#: Bits of the dependence of a value: on queries, on keys, on arrays that get gradients, on the mask.
QUERIES, KEYS, LEARNED, MASK = 1, 2, 4, 8
PAIRS = QUERIES | KEYS
#: The same for the fields of a tile.
OF_TILE = *(QUERIES | LEARNED, KEYS | LEARNED) * 3, QUERIES, KEYS, QUERIES | LEARNED, PAIRS | MASK


@dataclasses.dataclass(frozen=True, eq=False)
class Pointwise:
    """The program of a score.

    Attributes:
      program: the traced score.
      sizes: (h, q, k) at which it is traced.
      s: the place of s.
      outside, pairs: the steps to run for all tokens at once, and those for each pair.
      reads: of queries and of keys, the places of numbers that get gradients, and of the others. A number that no token
        has counts as one of queries, and as one of keys without a gradient.
      scalars: the values that depend on nothing, by place.
      rules: what `trace_rules` returns, by step.
    """

    program: Program
    sizes: tuple[int, int, int]
    s: int
    outside: list[int]
    pairs: list[int]
    reads: tuple[tuple[list[int], list[int]], ...]
    scalars: dict[int, Any]
    rules: dict[int, tuple[Program, Program]]

    def numbers(self, encoding: Encoding, params: Params, tile: Tile) -> Any:
        """Return the numbers [h or 1, t] in the order of `reads`, of one sequence. One that no token has is repeated.

        tile: all queries and all keys, without `visible`.
        """
        (h, *tokens), counts = self.sizes, (tile.q_pos.shape[0], tile.k_pos.shape[0])
        s: Any = Struct((tile.q.shape[1], *counts), self.program.avals[self.s].dtype)
        visible: Any = Struct(counts, jnp.bool_)
        program = trace_program(encoding.score, params, s, tile._replace(visible=visible))
        if program.outline != self.program.outline:
            raise ValueError(f"{type(encoding).__name__}.score has other steps for {counts[0]} tokens than for fewer.")
        values = program.constants | dict(enumerate(jax.tree.leaves((params, s, tile))))
        for step in (program.steps[n] for n in self.outside):
            results = step.run([x.val if isinstance(x, Literal) else values[x] for x in step.inputs])
            values.update(zip(step.outputs, results, strict=True))

        def number(place: int, count: int) -> jax.Array:
            x, shape = jnp.asarray(values[place]), self.program.avals[place].shape
            heads_first = sorted(range(x.ndim), key=lambda axis: (shape[axis] in tokens, shape[axis] == h))
            x = x.transpose(heads_first).reshape(h if h in shape else 1, -1)
            return jnp.broadcast_to(x.astype(jnp.int32) if x.dtype == jnp.bool_ else x, (x.shape[0], count))

        sides = zip(self.reads, counts, strict=True)
        return tuple(tuple(tuple(number(x, count) for x in part) for part in side) for side, count in sides)

    def score_pairs(self, q: Any, k: Any, s: jax.Array, by_keys: bool) -> jax.Array:
        """Return the score [1, 1, q, k] of one head, from its numbers [1, t] and what s is before it.

        by_keys: pairs have keys first, as products that are made so. On a GPU all else would compute them twice.
        """

        def pairs(x: jax.Array) -> jax.Array:
            return x.T if by_keys else x

        # Axes of 1 come and go by `reshape`. The gradients of other operations are sums, by which registers spill.
        avals = self.program.avals
        s_pairs = pairs(s.reshape(s.shape[2:])).astype(avals[self.s].dtype)
        values = self.scalars | {self.s: s_pairs}
        for side in (0, 1) if by_keys else (1, 0):  # rows of a tile read what no token has
            for place, x in zip(jax.tree.leaves(self.reads[side]), jax.tree.leaves((q, k)[side]), strict=True):
                x = x.reshape(-1).astype(avals[place].dtype)
                values[place] = jax.lax.broadcast_in_dim(x, s_pairs.shape, (side ^ by_keys,))
        run_on_pairs(self.program, self.pairs, values, s_pairs.shape, self.rules)
        score = jnp.broadcast_to(values[self.program.results[0]], s_pairs.shape)
        return pairs(score.astype(s.dtype)).reshape(s.shape)


def pointwise(encoding: Encoding, params: Params, tile: Tile) -> Pointwise | str:
    """Return the score of an encoding for the kernel, or why it has none, in words that follow "the score".

    Args:
      encoding: its `score` acts.
      params: its parameters, or their shapes.
      tile: the arrays that `score` is given, or their shapes, for any numbers of tokens.
    """
    sides, factor = tile[:8], tile.logit_scale
    others = {n for x in jax.tree.leaves(params) for n in x.shape} | {1, tile.q.shape[1]}
    others |= {n for x in jax.tree.leaves(sides) for n in x.shape[1:]}
    tokens = q, k = tuple(itertools.islice((n for n in itertools.count(3) if n not in others), 2))
    small = [
        jax.tree.map(lambda x, n=tokens[n % 2]: Struct((n, *x.shape[1:]), x.dtype), side)
        for n, side in enumerate(sides)
    ]
    scale = Struct((factor.shape[0], q if factor.shape[1] > 1 else 1, 1), factor.dtype)
    s = Struct((tile.q.shape[1], q, k), wide_dtype(tile.mapped_q.dtype))
    params = jax.tree.map(lambda x: Struct(x.shape, x.dtype), params)
    leaves, tree = jax.tree.flatten((params, s, Tile._make((*small, scale, Struct(tokens, jnp.bool_)))))
    return _pointwise(encoding, tuple(leaves), tree)


def score_shapes(pairs: TileInputs) -> Tile:
    """Return the shapes of what `score` is given of one sequence in a whole call, mapped_q alone if it does not act."""

    def one() -> Tile:
        if "score" not in defined_hooks(pairs.encoding):
            return Tile._make([None] * len(Tile._fields))._replace(mapped_q=pairs.q.tokens.mapped[0].swapaxes(0, 1))
        return score_tile(jax.tree.map(lambda x: x[0], make_tile(pairs)))

    return jax.eval_shape(one)


def pointwise_score(pairs: TileInputs, tile: Tile) -> tuple[Any, Any]:
    """Return the score of a whole call for the kernel, and its numbers [b or 1, h or 1, t], see `Pointwise.numbers`.

    Both are empty if `score` does not act. tile: what `score_shapes` returns.
    """
    encoding, _, (params, *_), *_ = pairs
    if "score" not in defined_hooks(encoding):
        return None, [(None, None)] * 2
    score: Any = pointwise(encoding, params, tile)
    return score, map_batch(lambda one: score.numbers(encoding, params, score_tile(one)), make_tile(pairs))


@functools.lru_cache(maxsize=1024)
def _pointwise(encoding: Encoding, leaves: tuple[Any, ...], tree: Any) -> Pointwise | str:
    params, s, tile = tree.unflatten(leaves)
    program, place = trace_program(encoding.score, params, s, tile), len(jax.tree.leaves(params))
    levels = [LEARNED] * place + [PAIRS | LEARNED]
    levels += [level for x, level in zip(tile, OF_TILE, strict=True) for _ in jax.tree.leaves(x)]
    levels = _levels(program, s.shape, levels)
    needed, outside, pairs = set(program.results), list[int](), list[int]()
    for n, step in reversed(list(enumerate(program.steps))):
        if needed.intersection(step.outputs):
            needed.update(step.places)
            (pairs if _varies_by_pair(levels[step.outputs[0]]) else outside).insert(0, n)
    scalars, rules = (
        _scalars(program, levels),
        {n: trace_rules(program.steps[n]) for n in pairs if _is_custom(program, n)},
    )
    made, read = {place}, dict[int, None]()
    for n in pairs:
        step = program.steps[n]
        if why := _step_refusal(program, step, s.shape, rules.get(n)):
            return why
        read |= dict.fromkeys(x for x in step.places if x not in scalars.keys() | made)
        made.update(step.outputs)
    if unmade := [x for x in (*read, *program.results) if _varies_by_pair(levels[x]) and x not in made]:
        return "reads tile.visible" if levels[unmade[0]] & MASK else "holds an array of all pairs"
    reads: tuple[tuple[list[int], list[int]], ...] = ([], []), ([], [])
    for x in read:
        learned = levels[x] & LEARNED and jnp.issubdtype(program.avals[x].dtype, jnp.floating)
        reads[s.shape[2] in program.avals[x].shape][0 if learned else 1].append(x)
        if not {*s.shape[1:]} & {*program.avals[x].shape}:
            reads[1][1].append(x)
    return Pointwise(program, s.shape, place, outside, pairs, reads, scalars, rules)


def _varies_by_pair(level: int) -> bool:
    return level & PAIRS == PAIRS


def _is_custom(program: Program, n: int) -> bool:
    return program.steps[n].name == CUSTOM


def _levels(program: Program, sizes: tuple[int, int, int], given: list[int]) -> list[int]:
    """Return what each value depends on, given that of the arguments. An axis of tokens counts as one on them."""
    levels = given + [0] * (len(program.avals) - len(given))
    for n, aval in enumerate(program.avals):
        levels[n] |= QUERIES * (sizes[1] in aval.shape) | KEYS * (sizes[2] in aval.shape)
    for step in program.steps:
        for x in step.outputs:
            levels[x] |= functools.reduce(operator.or_, (levels[y] for y in step.places), 0)
    return levels


def _scalars(program: Program, levels: list[int]) -> dict[int, Any]:
    """Return the scalars that depend on nothing, by place."""
    scalars = {place: x for place, x in program.constants.items() if not np.shape(x)}
    for step in program.steps:
        scalar = not any(levels[x] or program.avals[x].shape for x in step.outputs)
        if scalar and scalars.keys() >= set(step.places):
            with jax.ensure_compile_time_eval():
                made = step.run([x.val if isinstance(x, Literal) else scalars[x] for x in step.inputs])
            scalars |= zip(step.outputs, (np.asarray(x)[()] for x in made), strict=True)
    return scalars


def _step_refusal(program: Program, step: Step, sizes: tuple[int, int, int], rules: Any) -> str | None:
    """Return why the kernel cannot run a step for each pair alone, None if it can. rules: see `trace_rules`."""
    inner = [x for own in rules or () for x in own.steps]
    names = [x.name for x in inner] if rules else [step.name]
    if other := [name for name in names if name not in ELEMENTWISE | SHAPES]:
        return f"applies {other[0]} to pairs"
    inputs, outputs = ([[n for n in program.avals[x].shape if n > 1] for x in xs] for xs in (step.places, step.outputs))
    if step.name == "reshape" and inputs != outputs:
        return "applies reshape to pairs"
    for own in outputs:
        if not set(sizes[1:]) <= set(own) <= set(sizes) or len(set(own)) < len(own):
            return f"makes arrays of more than heads, queries and keys by {step.name}"
    return f"applies {step.name} to pairs and arrays" if any(own.constants for own in rules or ()) else None
