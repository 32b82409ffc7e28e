"""The possible causes of a run's failure beyond its training length L, and a change that takes each of them away.

A change is put on the trained weights without training. If the loss then returns to that at L, its cause is found. All
losses are in nats per token, on the same targets.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from posx.attention.masks import Mask
from posx.contract import Encoding, walk_chain
from posx.encodings import from_spec, spec_text
from posx.encodings.frequencies import Geometric
from posx.encodings.rope import Rope
from posx.encodings.xpos import Xpos
from posx.errors import ConfigError
from posx.evaluation.statistics import LARGEST_NLL
from posx.lab.config import RunConfig

#: The name of the run without a change.
TRAINED = "as trained"
#: A perplexity of less than this times that at L is no failure.
LEAST_RISE = 1.05
#: The shares of the loss that a change must restore to name the cause of the failure, and of most of it.
WHOLE, MOST = 0.9, 0.5


class Change(NamedTuple):
    """A change of trained weights' encoding or masks that takes one possible cause of the failure away.

    Attributes:
      name: in tables and sentences.
      cause: "the failure comes from ..." if the loss returns to that at L.
      encoding: a spec or a field, as of `posx evaluate --encoding`; "" for the trained one.
      masks: as of `posx evaluate --masks`; "" for the trained ones.
    """

    name: str
    cause: str
    encoding: str = ""
    masks: str = ""


def changes(run: RunConfig, longest: int) -> list[Change]:
    """Return the changes that a run's encoding allows, those of the narrowest cause first.

    Each of the first three keeps all tokens visible. The last one hides them.

    Args:
      run: a trained run.
      longest: window, in tokens, which is longer than L.
    """
    train_len, parts = run.train.length, list(walk_chain(from_spec(run.encoding)))
    trained = next((run.layers[n] for n, kind in enumerate(run.model.words) if kind == "encoding"), None)
    made = []
    if trained is not None and not trained.acts_on("logit_scale"):
        words = "attention that spreads over more tokens"
        made.append(Change("logits times log length", words, f"{run.encoding}+log_length"))
    ropes = list(rotations(trained)) if trained is not None else []
    if ropes and all(rope.frequencies == Geometric() for rope in ropes):
        factor = longest / train_len
        rule = f"frequencies=ntk_by_parts(factor={factor:g},slow=1,fast=1.001)"
        words = "angles of slow planes that training never met"
        made.append(Change(f"slow planes {factor:g} times slower", words, rule))
    if any(type(part) is Rope for part in parts) and train_len > 1:
        held = f"self_extend(window={train_len - 1},group=0)"
        spec = "+".join(held if type(part) is Rope else spec_text(part) for part in parts)
        words = "distances that training never met, not from the number of tokens"
        with contextlib.suppress(ConfigError):  # a later map, or a decay
            from_spec(spec)
            made.append(Change(f"distances held at {train_len - 1:,}", words, spec))
    words = f"tokens that are {train_len:,} or more back"
    return [*made, Change(f"window of {train_len:,}", words, masks="window")]


def rotations(encoding: Encoding) -> Iterator[Rope]:
    """Yield the rotations of an encoding whose angles grow with the distance without end."""
    for part in walk_chain(encoding):
        if type(part) is Rope:
            yield part
        elif isinstance(part, Xpos):
            yield part.rope


def new_planes(run: RunConfig, length: int) -> float | None:
    """Return the share of planes that meet angles in windows of `length` tokens that training never met.

    A plane that completes a turn within L tokens has met all angles. All layers count. None without rotations.
    """
    seen = list[np.ndarray]()
    for encoding, mask in zip(run.layers, run.model.masks, strict=True):
        most = mask.window if mask.window and not mask.sinks else length
        then, now = min(run.train.length, most), min(length, most)  # the farthest that a query sees
        for rope in rotations(encoding):
            trained, met = (
                n * rope.at_length(size).frequencies.checked(rope.base, rope.rotary_dim or 0)
                for n, size in ((then, run.train.length), (now, length))
            )
            seen.append(((trained < 2 * np.pi) & (met > trained * (1 + 1e-9))).ravel())
    return round(float(np.concatenate(seen).mean()), 6) if seen else None


def observations(run: RunConfig, row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers of a window's attention weights and planes. row: of the weights as trained.

    `equal_far_weight` is the `far_weight` of equal weights on all tokens that a query sees. Numbers that were not read
    are None.
    """
    length = row["eval_len"]
    equal = float(np.mean([_equal_far_weight(mask, run.train.length, length) for mask in run.model.masks]))
    names = ("attention_items", "far_weight", "attention_entropy", "zero_weights", "zero_weights_bfloat16", "attention")
    return {
        "eval_len": length,
        **{name: row.get(name) for name in names},
        "equal_far_weight": round(equal, 6),
        "new_planes": new_planes(run, length),
    }


def _equal_far_weight(mask: Mask, train_len: int, length: int) -> np.ndarray:
    """Return the share [length] of the tokens that each query sees under a causal mask which is L or more back."""
    places, window = np.arange(length) + 1, mask.window or length
    recent, sinks = np.minimum(places, window), np.clip(places - window, 0, mask.sinks)  # within the window and outside
    far = np.maximum(recent - train_len, 0) + np.clip(places - max(window, train_len), 0, mask.sinks)
    return far / (recent + sinks)


def losses_by_position(row: Mapping[str, Any], train_len: int) -> list[dict[str, Any]]:
    """Return the mean losses of positions between 0, L/2, L, 2 L, 4 L and so on.

    row: of `per_position`. Each of its bins counts as one position, at which it begins.
    """
    if not row.get("position_nll"):
        return []
    begins, counts = np.array(row["position_edges"][:-1]), np.array(row["position_targets"])
    doubled = max(0, math.ceil(math.log2(row["eval_len"] / train_len)))
    edges = [0, train_len // 2, *(train_len * 2**n for n in range(doubled)), row["eval_len"]]
    sums, made = np.array(row["position_nll"], float) * counts, []
    for start, end in itertools.pairwise(edges):
        inside = (begins >= start) & (begins < end)
        if counts[inside].sum():
            nll = float(sums[inside].sum() / counts[inside].sum())
            made.append({"from": start, "to": end, "nll": round(nll, 5)})
    return made


def loss_lines(rows: Mapping[str, Sequence[Mapping[str, Any]]], train_len: int) -> list[dict[str, Any]]:
    """Return a line for each change and length: its loss, its `ratio` of perplexity, and the share `restored`.

    The ratio is to the perplexity as trained at L. The share is (loss as trained - loss) / (loss as trained - loss as
    trained at L). It is None up to L, and at lengths at which the run does not fail, see LEAST_RISE.

    Args:
      rows: {name of a change, TRAINED for none: its rows of one protocol}.
      train_len: L, in tokens.
    """
    trained = {row["eval_len"]: row.get("nll") for row in rows[TRAINED]}
    base, lines = trained.get(train_len), []
    for name, row in ((name, row) for name, own in rows.items() for row in own):
        length, nll, ratio, restored = row["eval_len"], row.get("nll"), None, None
        if nll is not None and base is not None:
            ratio = math.exp(min(nll - base, LARGEST_NLL))
            before = trained.get(length)
            fails = before is not None and before - base >= math.log(LEAST_RISE)
            if fails and length > train_len and name != TRAINED:
                restored = (before - nll) / (before - base)
        facts = {"eval_len": length, "status": row.get("status", "ok"), "nll": nll, "ppl": row.get("ppl")}
        lines.append({"change": name, **facts, "ratio": ratio, "restored": restored})
    return lines


def conclude(lines: Sequence[Mapping[str, Any]], causes: Mapping[str, str], train_len: int) -> str:
    """Return why the run fails at its longest window with a loss, by the rules of docs/guides/autopsy.md.

    A second sentence names the longer windows without one.

    Args:
      lines: those of `loss_lines`.
      causes: {name of a change: the cause that it takes away}, the narrowest first.
      train_len: L, in tokens.
    """
    trained = {line["eval_len"]: line for line in lines if line["change"] == TRAINED}
    longest = max((n for n, line in trained.items() if n > train_len and line["ratio"] is not None), default=0)
    failed = [f"{n:,} ({line['status']})" for n, line in trained.items() if n > longest and line["nll"] is None]
    missing = f"there is no loss as trained at {', '.join(failed)} tokens."
    if not longest:
        return f"Nothing follows: {missing}"
    sentence = _conclusion(longest, trained[longest]["ratio"], lines, causes, train_len)
    return f"{sentence} T{missing[1:]}" if failed else sentence


def _conclusion(
    longest: int, ratio: float, lines: Sequence[Mapping[str, Any]], causes: Mapping[str, str], train_len: int
) -> str:
    """Return the conclusion on one window. ratio: of its perplexity to that at L."""
    if ratio < LEAST_RISE:
        return f"The run does not fail up to {longest:,} tokens: perplexity is {ratio:.3f} times that at {train_len:,}."
    shares = {line["change"]: line["restored"] for line in lines if line["eval_len"] == longest}
    shares = {name: shares[name] for name in causes if shares.get(name) is not None}
    best = max(shares, key=lambda name: shares[name], default="")
    chosen = next((name for name, share in shares.items() if share >= WHOLE), best)
    if not chosen or shares[chosen] < MOST:
        most = f" The most is {shares[chosen]:.0%}, by {chosen}." if chosen else ""
        return f"No change restores half of the loss at {longest:,} tokens: the cause is none of these.{most}"
    which = "the failure comes" if shares[chosen] >= WHOLE else "most of the failure comes"
    return (
        f"{chosen[0].upper()}{chosen[1:]}: restores {shares[chosen]:.0%} of the loss at {longest:,} tokens, so {which} "
        f"from {causes[chosen]}."
    )
