"""A task: items made by a pure function of a key, each a question and its answer in one row of tokens.

Shapes: t + 1 tokens of a row, of which the model reads the first t and predicts the last t.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from posx.contract.fields import snake_case

#: The first ids of every task, and their text.
BOS, SEP, EOS, PAD = range(4)
SPECIAL = ("<bos>", "<sep>", "<eos>", "<pad>")
#: The id of a task's first symbol.
FIRST = len(SPECIAL)


class Items(NamedTuple):
    """Items as rows of tokens.

    Attributes:
      tokens: int32 [b, t + 1] or [t + 1]: <bos>, the item, <eos>, then <pad>.
      scored: bool, as tokens: whether a token belongs to the answer.
      source: int32, as tokens: the place in the row that a token of the answer is read from, -1 for other tokens. None
        if the task has no answer that is read from one place.
    """

    tokens: jax.Array
    scored: jax.Array
    source: jax.Array | None = None


class Item(NamedTuple):
    """A question and its answer, in symbols from 0 on. Entries beyond their ends are not read.

    Attributes:
      question: int32 [n].
      answer: int32 [m].
      length: of the answer, int32 [].
      source: int32 [m], the place in the question, from 0 on, that each symbol of the answer is read from. None if
        there is no such place.
    """

    question: jax.Array
    answer: jax.Array
    length: jax.Array
    source: jax.Array | None = None


@dataclasses.dataclass(frozen=True)
class Task:
    """A family of items, as many as there are keys for each number n of symbols.

    A task defines `alphabet`, `size` and `item`. One whose answers stand between parts of its question defines `row`
    instead of `item`.
    """

    #: The fewest symbols of a question.
    fewest: ClassVar[int] = 1
    #: The `train.objective` that its items are for. If it is masked, a row is <bos> and `length` symbols, and `scored`
    #: are the symbols that may be hidden.
    objective: ClassVar[str] = "next_token"

    @property
    def alphabet(self) -> tuple[str, ...]:
        """The text of each symbol."""
        raise NotImplementedError

    @property
    def most(self) -> int | None:
        """The most symbols of a question, None if there is no limit."""
        return None

    def size(self, n: int) -> int:
        """Return the tokens of the longest row with n symbols, <bos> and <eos> included."""
        raise NotImplementedError

    def item(self, key: jax.Array, n: jax.Array, room: int) -> Item:
        """Return one item with n <= `room` symbols in arrays of at least `room` entries."""
        raise NotImplementedError

    def row(self, key: jax.Array, n: jax.Array, length: int) -> Items:
        """Return one item as <bos> question <sep> answer <eos>, in `length` + 1 tokens."""
        question, answer, count, source = self.item(key, n, length)
        place = jnp.arange(length + 1)
        tokens = jnp.where(place <= n, FIRST + question[jnp.clip(place - 1, 0, len(question) - 1)], SEP)
        tokens = tokens.at[0].set(BOS)
        start = n + 2
        tokens = jnp.where(place >= start, FIRST + answer[jnp.clip(place - start, 0, len(answer) - 1)], tokens)
        end = start + count
        tokens = jnp.where(place == end, EOS, jnp.where(place > end, PAD, tokens))
        if source is not None:
            read = 1 + source[jnp.clip(place - start, 0, len(source) - 1)]
            source = jnp.where((place >= start) & (place < end), read, -1).astype(jnp.int32)
        return Items(tokens.astype(jnp.int32), (place >= start) & (place <= end), source)

    def paired_row(self, symbols: jax.Array, answers: jax.Array, source: jax.Array, n: jax.Array, length: int) -> Items:
        """Return n pairs of symbols as <bos> pairs <eos>, in `length` + 1 tokens. Their second symbols may be answers.

        Args:
          symbols: [m, 2], with m >= n and 2 m >= `length`.
          answers: whether a pair has an answer, bool [m].
          source: the number of the pair whose second symbol the answer is read from, [m].
          n: pairs.
          length: t.
        """
        place = jnp.arange(length + 1)
        pair = jnp.maximum(place - 1, 0) // 2
        tokens = jnp.concatenate([jnp.array([BOS]), FIRST + symbols.reshape(-1)])[: length + 1]
        tokens = jnp.where(place == 2 * n + 1, EOS, jnp.where(place > 2 * n + 1, PAD, tokens))
        scored = answers[pair] & (place > 0) & (place % 2 == 0) & (place <= 2 * n)
        return Items(tokens.astype(jnp.int32), scored, jnp.where(scored, 2 * source[pair] + 2, -1).astype(jnp.int32))

    def longest(self, length: int) -> int:
        """Return the most symbols of an item that fits `length` + 1 tokens; below `fewest` if none fits."""
        n, most = self.fewest - 1, length if self.most is None else min(length, self.most)
        while n < most and self.size(n + 1) <= length + 1:
            n += 1
        return n

    def fitting_length(self, length: int) -> int:
        """Return `length`, doubled until an item fits it."""
        while self.longest(length) < self.fewest:
            length *= 2
        return length

    def length_problem(self, length: int) -> str:
        """Return what this task has in place of items of `length` tokens, if it has none of them."""
        return f"no item of {length} tokens. The shortest item needs {self.size(self.fewest) - 1}"

    @property
    def vocab_size(self) -> int:
        return FIRST + len(self.alphabet)

    @property
    def name(self) -> str:
        return snake_case(type(self))


@functools.partial(jax.jit, static_argnames=("task", "length"))
def draw_rows(task: Task, keys: jax.Array, fewest: jax.Array, longest: jax.Array, length: int) -> Items:
    """Return one item for each of keys [b], with `fewest` to `longest` symbols, all numbers equally likely."""

    def draw(key: jax.Array) -> Items:
        size_key, item_key = jax.random.split(key)
        n = jax.random.randint(size_key, (), fewest, longest + 1)
        return task.row(item_key, n, length)

    return jax.vmap(draw)(keys)


def shuffle(key: jax.Array, n: jax.Array, room: int) -> jax.Array:
    """Return the places of 0 to n - 1 in a random order, int32 [room]; the entries from n on stay in place."""
    at = jnp.arange(room)
    drawn = jnp.where(at < n, jax.random.uniform(key, (room,)), 1.0 + at.astype(jnp.float32))
    return jnp.argsort(jnp.argsort(drawn))
