"""The answer to each task's question in plain Python: words in, words out."""

import re


def binary_majority(words):
    return ["0" if words.count("0") > words.count("1") else "1"]


def majority(words):
    counts = sorted((words.count(word) for word in {*words}), reverse=True)
    assert counts[:2] != counts[:1] * 2, "a tie"
    return [max({*words}, key=words.count)]


def sort(words):
    assert len({*words}) == len(words)
    return sorted(words, key=int)


def unique_copy(words):
    assert len({*words}) == len(words)
    return words


def repeat_copy(words):
    return words


def parity(words):
    return ["eo"[words.count("1") % 2]]


def addition(words):
    a, b = "".join(words).split("+")
    assert all(number == "0" or number[0] == "1" for number in (a, b))
    return list(bin(int(a, 2) + int(b, 2))[2:])


def passkey(words):
    at = words.index("#")
    assert words.count("#") == 1 and all(w.isdigit() == (at < n <= at + 5) for n, w in enumerate(words))
    return words[at + 1 : at + 6]


def selective_copy(words):
    return [w for w in words if w != "."]


def s5(words):
    state = "01234"
    for word in words:
        state = "".join(word[int(thing)] for thing in state)
    return [state]


def member(pattern, words):
    return ["y" if re.fullmatch(pattern, "".join(words)) else "n"]


def aa_star(words):
    return member("(aa)*", words)


def ab_star(words):
    return member("(ab)*", words)


def starts_with_a(words):
    return member("a[ab]*", words)


def ends_with_a(words):
    return member("[ab]*a", words)


def contains_ab(words):
    return member("[abc]*ab[abc]*", words)


def flip_flop(words):
    """Return {place: answer} of a row without its first and last word."""
    answers, memory = {}, None
    for place, (what, bit) in enumerate(zip(words[::2], words[1::2], strict=True)):
        memory = bit if what == "w" else memory
        if what == "r":
            answers[2 * place + 1] = memory
    assert words[0] == "w" and words[-2] == "r"
    return answers


def mqar(words):
    half = len(words) // 2
    count = max(1, half // 8)
    known = {words[2 * n]: words[2 * n + 1] for n in range(count)}
    assert len(known) == count == len({*known.values()}) and all(word[0] == "k" for word in known)
    answers = {n + 1: known[words[n]] for n in range(2 * count, len(words)) if words[n][0] == "k"}
    assert len(answers) == count and all(n % 2 for n in answers)
    assert all(words[n][0] == "n" for n in range(2 * count, len(words)) if not {n, n - 1} & {m - 1 for m in answers})
    return answers
