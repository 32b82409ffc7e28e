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
    for tokens, scored in zip(*rows_of(task), strict=True):
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
