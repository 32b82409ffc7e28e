"""Every task's items against its definition in plain Python."""

import jax
import numpy as np
import pytest

from posx.lab.tasks import TASKS, draw_rows
from posx.lab.tasks.base import SPECIAL
from tests.lab.tasks import solvers

LENGTH = 70


def rows_of(task, count=200, longest=None, seed=0):
    keys = jax.random.split(jax.random.key(seed), count)
    return jax.tree.map(np.asarray, draw_rows(task, keys, task.fewest, longest or task.longest(LENGTH), LENGTH))


def words_of(task, tokens):
    text = (*SPECIAL, *task.alphabet)
    return [text[n] for n in tokens]


@pytest.mark.parametrize("name", TASKS)
def test_answers_are_those_of_a_plain_solver(name):
    task, sizes = TASKS[name](), set()
    rows = rows_of(task)
    for tokens, scored in zip(rows.tokens, rows.scored, strict=True):
        words = words_of(task, tokens)
        end = words.index("<eos>")
        assert words[0] == "<bos>" and set(words[end + 1 :]) <= {"<pad>"} and not scored[end + 1 :].any()
        sizes.add(end + 1)
        if "<sep>" in words:
            at = words.index("<sep>")
            assert words[at + 1 : end] == getattr(solvers, name)(words[1:at])
            assert scored.tolist() == [at < n <= end for n in range(LENGTH + 1)]
        else:
            answers = getattr(solvers, name)(words[1:end])
            assert {n: words[1 + n] for n in answers} == answers
            assert np.flatnonzero(scored).tolist() == [1 + n for n in answers]
    assert max(sizes) <= LENGTH + 1 and len(sizes) > 5


def expected_places(name, words):
    """{place of an answer's token: the place that it is read from} of a row of words, in plain Python."""
    if name in ("unique_copy", "repeat_copy"):
        n = words.index("<sep>") - 1
        return {n + 2 + i: 1 + i for i in range(n)}
    if name == "sort":
        at = words.index("<sep>")
        return {n: words.index(words[n]) for n in range(at + 1, words.index("<eos>"))}
    if name == "selective_copy":
        at = words.index("<sep>")
        return {at + 1 + i: n for i, n in enumerate(n for n in range(1, at) if words[n] != ".")}
    if name == "passkey":
        return {words.index("<sep>") + 1 + i: words.index("#") + 1 + i for i in range(5)}
    if name == "flip_flop":
        return {
            n + 1: max(m for m in range(1, n, 2) if words[m] == "w") + 1
            for n in range(1, words.index("<eos>"), 2)
            if words[n] == "r"
        }
    if name == "mqar":
        first = {word: n for n, word in reversed([*enumerate(words)])}
        return {n + 1: first[word] + 1 for n, word in enumerate(words) if word[0] == "k" and first[word] < n}
    return None


@pytest.mark.parametrize("name", TASKS)
def test_answers_name_the_place_they_are_read_from(name):
    rows = rows_of(TASKS[name](), count=50)
    if rows.source is None:
        assert expected_places(name, []) is None
        return
    for tokens, source in zip(rows.tokens, rows.source, strict=True):
        found = {int(n): int(source[n]) for n in np.flatnonzero(source >= 0)}
        assert found == expected_places(name, words_of(TASKS[name](), tokens))
        assert all(tokens[n] == tokens[place] for n, place in found.items())
