"""Every task's items against its definition in plain Python."""

import collections

import jax
import numpy as np
import pytest

from posx.errors import DataError
from posx.evaluation.answers import Answers
from posx.lab.config import DataConfig
from posx.lab.data.tasks import open_task
from posx.lab.tasks import TASKS, draw_rows
from posx.lab.tasks.base import SPECIAL
from tests.lab.tasks import solvers

LENGTH = 70


def rows_of(task, sizes=None):
    fewest, longest = sizes or (task.fewest, task.longest(LENGTH))
    keys = jax.random.split(jax.random.key(0), 200)
    return jax.tree.map(np.asarray, draw_rows(task, keys, fewest, longest, LENGTH))


def words_of(task, tokens):
    text = (*SPECIAL, *task.alphabet)
    return [text[n] for n in tokens]


#: The tasks with questions and answers.
ANSWERED = [name for name, task in TASKS.items() if task.objective == "next_token"]


@pytest.mark.parametrize("name", ANSWERED)
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


@pytest.mark.parametrize("name", ANSWERED)
def test_answers_name_the_place_they_are_read_from(name):
    rows = rows_of(TASKS[name]())
    if rows.source is None:
        assert expected_places(name, []) is None
        return
    for tokens, source in zip(rows.tokens, rows.source, strict=True):
        found = {int(n): int(source[n]) for n in np.flatnonzero(source >= 0)}
        assert found == expected_places(name, words_of(TASKS[name](), tokens))
        assert all(tokens[n] == tokens[place] for n, place in found.items())


def draw_strings(name, n):
    """Return the members and the other strings among 200 items of n symbols."""
    task, strings = TASKS[name](), {"y": [], "n": []}
    for tokens in rows_of(task, (n, n)).tokens:
        string, answer = "".join(words_of(task, tokens)).removeprefix("<bos>").split("<sep>")
        strings[answer[0]].append(string)
    return strings["y"], strings["n"]


@pytest.mark.parametrize("name", ["ab_star", "starts_with_a", "ends_with_a", "contains_ab"])
def test_members_are_half_of_the_strings_of_a_length(name):
    members, others = draw_strings(name, 20)
    assert 70 < len(members) < 130
    assert {len(one) for one in members} == {len(one) for one in others} == {40 if name == "ab_star" else 20}


def test_strings_outside_a_language_are_near_members():
    (member, *_), others = draw_strings("ab_star", 20)
    changed = [tuple(n for n in range(40) if member[n] != other[n]) for other in others]
    assert {len(places) for places in changed} == {1, 2, 40}
    assert all(b - a == 1 for a, b in (places for places in changed if len(places) == 2))
    assert len({places[0] for places in changed if len(places) == 1}) > 10
    members, others = draw_strings("contains_ab", 20)
    assert {one.count("ab") for one in members} == {1} and len({one.index("ab") for one in members}) > 10
    shares = [[sum(one.count(a) for one in kind) / (20 * len(kind)) for a in "abc"] for kind in (members, others)]
    np.testing.assert_allclose(*shares, atol=0.06)


def test_right_tokens_are_counted_by_distance():
    """A model that sees 15 tokens back answers with the digits of near marks alone. They are as far as their mark."""
    task = TASKS["passkey"]()
    items = rows_of(task)
    words = [words_of(task, tokens) for tokens in items.tokens]
    distances = np.array([one.index("<sep>") - one.index("#") - 1 for one in words])
    best = np.repeat(distances[:, None] < 16, LENGTH, axis=1)
    row = Answers().make_row(LENGTH, "items", items, "ok", (np.zeros_like(best, float), best))
    counts = collections.Counter(5 * [int(distance).bit_length() for distance in distances])
    assert row["distance_edges"] == [0, 1, 2, 4, 8, 16, 32, 64, 128][: len(row["distance_edges"])]
    assert row["distance_targets"] == [counts[n] for n in range(len(row["distance_targets"]))]
    shares = [1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0]
    assert row["distance_accuracy"] == [share if counts[n] else None for n, share in enumerate(shares)]
    parity = rows_of(TASKS["parity"]())
    assert (
        Answers().make_row(LENGTH, "items", parity, "ok", (np.zeros_like(best, float), best))["distance_edges"] is None
    )


@pytest.mark.parametrize(("right", "counts"), [(0, (167, 205, 334)), (1, (4, 10, 50, 58))])
def test_a_share_lies_within_its_interval(right, counts):
    """If no item is right, or every item is, rounding must not put an end of the interval beyond the share."""
    for count in counts:
        tokens, scored = np.zeros((count, 2), int), np.tile([False, True], (count, 1))
        best = np.full((count, 1), bool(right))
        row = Answers(count).make_row(1, "items", (tokens, scored, None), "ok", (np.zeros((count, 1)), best))
        low, high = row["exact_match_interval"]
        assert low <= row["exact_match"] == right <= high


def test_items_that_are_alike_give_no_interval_of_tokens():
    """15 of 22 tokens of each: rounding must not make an interval without width of them."""
    tokens, scored = np.zeros((10, 23), int), np.tile(np.arange(23) > 0, (10, 1))
    best = np.tile(np.arange(22) < 15, (10, 1))
    row = Answers(10).make_row(22, "items", (tokens, scored, None), "ok", (np.zeros((10, 22)), best))
    assert (row["accuracy"], row["accuracy_interval"]) == (15 / 22, None)


def test_a_word_that_a_task_lacks_is_refused():
    tokenizer = open_task(DataConfig(source="task:flip_flop")).tokenizer
    assert tokenizer.decode(tokenizer.encode_batch(["w 0 r"])[0]) == "w 0 r"
    with pytest.raises(DataError, match="'read', 'write' is no word of it. It has <bos> <sep> <eos> <pad> 0 1 w r i."):
        tokenizer.encode_batch(["<bos> write 0 read"])
    with pytest.raises(DataError, match="'x' is no word of it. It has .* 0 1 2 .* and 134 more."):
        open_task(DataConfig(source="task:unique_copy")).tokenizer.encode_batch(["<bos> x"])
