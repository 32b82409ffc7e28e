"""Check a task of the user's own before it is trained on: what it says of itself, and some of its items.

The tasks of posx are compared with plain Python in its tests instead.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import traceback
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from posx.errors import ConfigError, DataError, PosxError
from posx.lab.tasks.base import EOS, FIRST, SPECIAL, Task, draw_rows

#: The items that are made, and the least tokens of their rows.
_ITEMS, _LENGTH = 64, 64


def check_words(task: Task) -> None:
    """Raise ConfigError for the first thing that is wrong with the fields, the alphabet or the sizes of a task."""
    with _report(task, ConfigError):
        if problem := next(_word_problems(task), ""):
            raise ConfigError(f"task {type(task).__name__}: {problem}.")


@functools.cache
def check_items(task: Task) -> None:
    """Raise DataError for the first thing that is wrong with some items of a task, of all sizes up to 64 tokens."""
    with _report(task, DataError):
        length = task.fitting_length(_LENGTH)
        numbers = np.linspace(task.fewest, task.longest(length), _ITEMS).astype(np.int32)
        problems = _row_problems if type(task).row is not Task.row else _item_problems
        if problem := next(problems(task, numbers, length), ""):
            raise DataError(f"task {type(task).__name__}: {problem}.")


@contextlib.contextmanager
def _report(task: Task, error_class: type[PosxError]) -> Iterator[None]:
    """Raise an error of the code of a task as one line, with its place in the file of the class."""
    try:
        yield
    except PosxError:
        raise
    except Exception as error:
        file = inspect.getsourcefile(type(task)) or ""
        lines = [one.lineno for one in traceback.extract_tb(error.__traceback__) if one.filename == file]
        place = f" ({Path(file).name}, line {lines[-1]})" if lines else ""
        words = str(error).strip().split("\n")[0]
        traced = ". n is traced: write jnp.where in place of if, and arrays of `room` entries in place of slices"
        raise error_class(
            f"task {type(task).__name__}: {type(error).__name__}: {words}{place}"
            f"{traced * ('racer' in type(error).__name__ or 'static' in words)}"
        ) from error


def _word_problems(task: Task) -> Iterator[str]:
    for name in sorted({field.name for field in dataclasses.fields(task)} & {"fewest", "objective"}):
        yield f"write {name} = {getattr(task, name)!r} without a type. With one it is a field"
    for name in ("alphabet", "most"):
        if callable(getattr(task, name)):
            yield f"{name} is a method. Write @property above it"
    words = task.alphabet
    if not words or not all(isinstance(word, str) and word and not any(map(str.isspace, word)) for word in words):
        yield f"the alphabet {words!r} needs words: texts without spaces"
    if twice := [word for n, word in enumerate(words) if word in (*words[:n], *SPECIAL)]:
        yield f"the alphabet has {twice[0]!r} twice, or as one of {', '.join(SPECIAL)}"
    if task.most is not None and task.most < task.fewest:
        yield f"most is {task.most}, less than fewest, which is {task.fewest}"
    last = 1 << 10 if task.most is None else task.most
    for n in (task.fewest, last):
        if task.size(n) <= n:
            yield f"size({n}) is {task.size(n)}, but a row of {n} symbols has at least {n + 1} tokens"


def _item_problems(task: Task, numbers: np.ndarray, length: int) -> Iterator[str]:
    if type(task).item is Task.item:
        yield "it defines neither `item` nor `row`"
    keys, symbols = jax.random.split(jax.random.key(0), len(numbers)), len(task.alphabet)
    draw = jax.jit(jax.vmap(lambda key, n: task.item(key, n, length)))
    question, answer, counts, source = jax.device_get(draw(keys, jnp.asarray(numbers)))
    arrays = {"question": question, "answer": answer} | ({} if source is None else {"source": source})
    for name, array in arrays.items():
        if array.ndim != 2 or not np.issubdtype(array.dtype, np.integer):
            yield f"the {name} of an item must be one row of integers, not {array.dtype}{list(array.shape[1:])}"
    counts = np.broadcast_to(counts, len(numbers))
    if counts.min() < 0 or not counts.any():
        yield f"its answers have {counts.min()} symbols"
    for row, (n, count) in enumerate(zip(numbers, counts, strict=True)):
        if n > question.shape[1] or count > answer.shape[1]:
            yield f"with n = {n}, the arrays of an item are shorter than its question or answer"
        for symbol in (*question[row, :n], *answer[row, :count]):
            if not 0 <= symbol < symbols:
                yield f"with n = {n}, it makes symbol {symbol}, but its alphabet ends at symbol {symbols - 1}"
        if (most := int(n + count + 3)) > task.size(int(n)):
            yield f"with n = {n}, it makes rows of {most} tokens, more than its size says, {task.size(int(n))}"
        if source is not None and not ((source[row, :count] >= 0) & (source[row, :count] < n)).all():
            yield f"with n = {n}, an answer is read from outside of the question, whose places are 0 to {n - 1}"


def _row_problems(task: Task, numbers: np.ndarray, length: int) -> Iterator[str]:
    symbols = len(task.alphabet)
    for n in sorted({int(numbers[0]), int(numbers[-1])}):
        tokens, scored, _ = jax.device_get(draw_rows(task, jax.random.split(jax.random.key(0), 8), n, n, length))
        if not 0 <= tokens.min() <= tokens.max() < FIRST + symbols:
            wrong = tokens.min() if tokens.min() < 0 else tokens.max()
            yield f"with n = {n}, it makes symbol {wrong - FIRST}, but its alphabet ends at symbol {symbols - 1}"
        if not scored.any(axis=1).all():
            yield f"with n = {n}, a row has no answer, so nothing is learned"
        if task.objective == "next_token" and not (tokens[:, : task.size(n)] == EOS).any(axis=1).all():
            yield f"with n = {n}, it makes rows of more tokens than its size says, {task.size(n)}"
