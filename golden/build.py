"""Write the vectors: python -m golden.build FOLDER [FAMILY ...]. One JSON file each, from float64 references alone.

`tests/golden/write.py` is another thing: it stores outputs of released libraries.
"""

import dataclasses
import itertools
import json
import pathlib
import sys
import zlib

import numpy as np

from golden import reference, reference_content, reference_planes, reference_rotary
from golden.families import FAMILIES
from golden.family import MODEL_DIM, draw, grid, spec, value

#: Another number says that stored outputs or the form of the files changed.
VERSION = 1
STEP = 2.0**-17
#: References of whole sequences.
WHOLE = reference_content.WHOLE | reference_rotary.WHOLE
#: Kinds of case with gradients: all but those of decoding and of far positions.
GRADIENTS = ("whole", "odd_length", "left_padding", "packed", "window", "window_sinks", "both_sides", "grouped")
#: Distances around the edges of T5's buckets, and far ones.
DISTANCES = (0, 1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 1000, 4095)
#: Contents of empty slots.
GARBAGE = 64.0
#: Largest differences by type of the inputs. Rotated vectors and weights may be rounded to bfloat16.
TOLERANCE = {"float32": 2e-5, "bfloat16": 3e-2}
#: Phases of a few thousand radians are off by 2e-4 in float32, which is allowed; one radian at 2^24 is not.
FAR = dict.fromkeys(("offset_4096", "offset_2_24", "far"), 1e-3)
#: The faults that a kind of case shows in every encoding that has it.
KINDS = {
    "whole": "the formula",
    "odd_length": "padding to an even length or to whole tiles that is seen",
    "step": "a query behind a cache off by one position; a causal mask aligned to the first key",
    "left_padding": "empty slots that leak, or that count as positions",
    "padded_step": "the slot's number taken for the position of a query behind padding",
    "packed": "documents that leak into each other, or positions that do not start again",
    "window": "a window off by one: 4 keys with the query's own",
    "window_sinks": "first tokens forgotten behind the window; positions that count the cache, as StreamingLLM's do",
    "offset_4096": "positions or phases in bfloat16",
    "offset_2_24": "positions or phases in float32, which skips odd numbers beyond 2^24",
    "far": "distances that are clipped, or that share a bucket wrongly",
    "both_sides": "the sign of the distance; keys after the query",
    "grouped": "query heads that read the wrong key head, or its slope",
}


def visible(q_idx, k_idx, q_segment, k_segment, mask):
    """Return who sees whom, bool [q, k], by arrival order. An order of -1 marks an empty slot."""
    i, j = q_idx[:, None], k_idx[None, :]
    seen = (i >= 0) & (j >= 0) & (q_segment[:, None] == k_segment[None, :])
    if mask["causal"]:
        seen &= j <= i
    if mask["window"]:
        seen &= (i - j < mask["window"]) | (j < mask["sinks"])
    return seen


def slots(kind):
    """Return the positions, arrival orders and documents [k] of the keys of a kind of case, and its first query."""
    count = {"whole": 6, "odd_length": 7, "step": 9, "packed": 9, "window": 10, "window_sinks": 10, "far": 21}
    padding = 3 if kind in ("left_padding", "padded_step") else 0
    n = count.get(kind, 8)
    pos, segment = np.arange(n), np.zeros(n + padding, int)
    if kind == "packed":
        pos, segment = np.where(pos < 5, pos, pos - 5), (pos >= 5).astype(int)
    if kind.startswith("offset"):
        pos = pos + (4096 if kind == "offset_4096" else 2**24 + 1)
    if kind == "far":
        pos = max(DISTANCES) - np.array(DISTANCES[::-1])
    first = {"step": n - 1, "padded_step": n + padding - 1, "far": n - 2}.get(kind, 0)
    empty = np.zeros(padding, int)
    return np.concatenate([empty, pos]), np.concatenate([empty - 1, np.arange(n)]), segment, first


def along_axes(pos, axes):
    """Return positions with two or three axes.

    Two are the row and column of a patch, in rows of three. Three are (time, height, width) of two words, an image of
    2 x 2 patches, and the words after it.
    """
    if axes == 2:
        return np.stack(np.divmod(pos, 3), axis=-1)
    patches = [(2, 2, 2), (2, 2, 3), (2, 3, 2), (2, 3, 3)]
    return np.array([(p, p, p) if p < 2 else patches[p - 2] if p < 6 else (p - 2,) * 3 for p in pos.tolist()])


def inputs(name, kind):
    """Return the inputs of a case of a family."""
    family, rng = FAMILIES[name], np.random.default_rng(zlib.crc32(f"{name} {kind}".encode()))
    pos, idx, segment, first = slots(kind)
    mask = {"causal": not family.bidirectional and kind != "both_sides", "window": 0, "sinks": 0}
    if kind.startswith("window"):
        mask = {"causal": True, "window": 4, "sinks": 2 if kind == "window_sinks" else 0}
    empty, key_heads = idx < 0, family.heads // (2 if kind == "grouped" else 1)
    case = {"mask": mask, "q_idx": idx[first:], "k_idx": idx, "q_segment": segment[first:], "k_segment": segment}
    case["visible"] = visible(*(case[key] for key in ("q_idx", "k_idx", "q_segment", "k_segment")), mask)
    pos = pos if family.axes == 1 else along_axes(pos, family.axes)
    case |= {"q_pos": pos[first:], "k_pos": pos}
    shapes = {
        "x": (MODEL_DIM,),
        "q": (family.heads, family.head_dim), "k": (key_heads, family.head_dim), "v": (key_heads, family.head_dim),
    }  # fmt: skip
    for part in family.reads:
        given = grid(rng, len(idx), *shapes[part])
        case[part] = np.where(empty.reshape(-1, *(1 for _ in shapes[part])), GARBAGE, given)
    part = "q" if "q" in family.reads else "x"
    case[part] = case[part][first:]
    if "q" in family.reads and kind in (GRADIENTS[:1] if family.mixes else GRADIENTS):
        case["g"] = grid(rng, *case["q"].shape)
    return case


def outputs(family, arrays, case, v=None):
    """Return the outputs of a case in float64, for its own values or for others."""
    name, encoding = family.encoding.name, family.encoding
    if "q" not in case:
        return reference.embed(name, encoding, arrays, case["x"], case["q_pos"].tolist())
    q, k, v = case["q"], case["k"], case["v"] if v is None else v
    if name in WHOLE:
        before = len(k) - len(q)
        q = np.concatenate([np.zeros((before, *q.shape[1:])), q])
        seen = visible(*(case[key] for key in ("k_idx", "k_idx", "k_segment", "k_segment")), case["mask"])
        return WHOLE[name](encoding, arrays, case.get("x"), lambda _: (q, k, v), case["k_pos"], seen)[before:]
    at = case["q_pos"].tolist(), case["k_pos"].tolist()
    return reference.reference(name, encoding, arrays, q, k, v, *at, case["visible"])


def results(family, arrays, case):
    """Return the outputs, and the weights [h, q, k]: outputs for values that are unit vectors, one for each key.

    Encodings that change values have the weights of a form that does not.
    """
    if "q" not in case:
        return {"outputs": outputs(family, arrays, case)}
    units = np.repeat(np.eye(len(case["k"]))[:, None], case["k"].shape[1], axis=1)
    plain, encoding = arrays, family.encoding
    if encoding.name == "shaw":
        encoding = value(encoding.name, **encoding.fields | {"values": False})
    elif encoding.name == "rotated_values":
        encoding = encoding.base
    elif encoding.name == "canon":
        plain = arrays | {"value": np.zeros((1, 1, 1))}
    else:  # both at once, for speed
        both = outputs(family, arrays, case, np.concatenate([case["v"], units], axis=-1))
        o, w = np.split(both, [family.head_dim], axis=-1)
        return {"outputs": o, "weights": w.transpose(1, 0, 2)}
    w = outputs(dataclasses.replace(family, encoding=encoding), plain, case, units)
    return {"outputs": outputs(family, arrays, case), "weights": w.transpose(1, 0, 2)}


def gradients(family, arrays, case):
    """Return the gradients of sum(outputs * g) by q and k: central differences, which have 9 right digits."""
    by = {part: np.zeros_like(case[part]) for part in "qk"}
    (by_moves if family.encoding.name in WHOLE else by_pairs)(family, arrays, case, by)
    return {f"grad_{part}": gradient for part, gradient in by.items()}


def by_pairs(family, arrays, case, by):
    """Add the gradients through the logit of each pair. Softmax is differentiated by hand."""
    name, logit = family.encoding.name, reference.LOGITS[family.encoding.name]
    group = family.heads // case["k"].shape[1]
    for h, i, j in np.argwhere(case["weights"]):
        at = case["q_pos"][i].tolist(), case["k_pos"][j].tolist()
        v = case["v"][j, h // group] + reference.value_term(name, family.encoding, arrays, *at)
        slope = case["weights"][h, i, j] * case["g"][i, h] @ (v - case["outputs"][i, h])
        rows = {"q": (i, h), "k": (j, h // group)}
        for part, c in itertools.product("qk", range(family.head_dim)):
            ends = []
            for step in (STEP, -STEP):
                pair = {each: case[each][row].copy() for each, row in rows.items()}
                pair[part][c] += step
                ends.append(logit(family.encoding, arrays, *pair.values(), *at, h))
            by[part][rows[part]][c] += slope * (ends[0] - ends[1]) / (2 * STEP)


def by_moves(family, arrays, case, by):
    """Add the changes of all outputs.

    A row depends on its own query alone, and a head on its own vectors, unless the family `mixes`. So all queries are
    moved at once, and all heads.
    """

    def slopes(part, *place):
        """Return the change of the sum, by query and head [q, h]."""
        ends = []
        for step in (STEP, -STEP):
            moved = dict(case, **{part: case[part].copy()})
            moved[part][place] += step
            ends.append(outputs(family, arrays, moved))
        return ((ends[0] - ends[1]) * case["g"]).sum(axis=-1) / (2 * STEP)

    for c in range(family.head_dim):
        if family.mixes:
            for part, t, h in itertools.product("qk", range(len(case["k"])), range(family.heads)):
                by[part][t, h, c] = slopes(part, t, h, c).sum()
            continue
        by["q"][..., c] = slopes("q", ..., c)
        for j in np.flatnonzero(case["k_idx"] >= 0):
            of_heads = slopes("k", j, slice(None), c).sum(axis=0)
            by["k"][j, :, c] = of_heads.reshape(case["k"].shape[1], -1).sum(axis=1)


def constants(family):
    """Return what a reader may compare before attention: frequencies and the attention factor, or slopes."""
    encoding = family.encoding
    if encoding.name == "rope":
        rule, base, width = encoding.frequencies, encoding.base, encoding.rotary_dim
        of_heads = [
            [reference_planes.theta(rule, base, width, c, h) for c in range(width // 2)] for h in range(family.heads)
        ]
        alike = all(theta == of_heads[0] for theta in of_heads)
        return {"theta": of_heads[0] if alike else of_heads, "attention_factor": reference_planes.magnitude(rule)}
    return {"slopes": reference.alibi_slopes(family.heads)} if encoding.name == "alibi" else {}


def settings(given):
    """Return a value as a dictionary of plain numbers and words."""
    if not hasattr(given, "fields"):
        return given
    return {"name": given.name} | {name: settings(each) for name, each in given.fields.items()}


def build(name, with_gradients=True):
    """Return the file of a family as a dictionary of plain values. Gradients take most of the time."""
    family = FAMILIES[name]
    arrays = draw(family, np.random.default_rng(zlib.crc32(name.encode())))
    cases = []
    for kind, fault in KINDS.items():
        if kind not in family.without:
            case = inputs(name, kind)
            case |= results(family, arrays, case)
            if "g" in case and with_gradients:
                case |= gradients(family, arrays, case)
            catches = f"{fault}: {family.catches}" if kind == "whole" else fault
            tolerance = TOLERANCE | ({"float32": FAR[kind]} if kind in FAR else {})
            cases.append({"name": kind, "catches": catches, "tolerance": tolerance} | case)
    return {
        "version": VERSION, "family": name, "spec": spec(family.encoding), "settings": settings(family.encoding),
        "formula": family.formula, "source": family.source, "differs": family.differs,
        "constants": constants(family), "arrays": arrays, "cases": cases,
    }  # fmt: skip


def as_list(given):
    """Return a NumPy array as nested lists."""
    return given.tolist()


def write(folder, names=tuple(FAMILIES)):
    """Write the files of families into a folder, a case a line."""
    pathlib.Path(folder).mkdir(parents=True, exist_ok=True)
    for name in names:
        text = json.dumps(build(name), default=as_list, allow_nan=False, separators=(",", ":"))
        text = text.replace(',"cases":[', ',\n"cases":[\n').replace('},{"name":', '},\n{"name":')
        pathlib.Path(folder, f"{name}.json").write_text(text + "\n", encoding="utf-8")


def main(folder, *names):
    """Write the named families, or all."""
    if unknown := [name for name in names if name not in FAMILIES]:
        sys.exit(f"there is no family {unknown[0]!r}. There are {', '.join(FAMILIES)}.")
    write(folder, names or tuple(FAMILIES))


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("Write python -m golden.build FOLDER [FAMILY ...].")
    main(*sys.argv[1:])
