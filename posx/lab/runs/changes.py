"""Trained weights under another encoding or other masks. Only the named parts change."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from posx.attention import Slots, attend
from posx.attention.masks import Mask, window
from posx.contract import Chain, Dims, Params, Value, abstract_params, walk_values
from posx.contract.composite import select_part
from posx.encodings import Encoding, build, changed, code_of, field_text, from_spec, spec_text
from posx.encodings.frequencies import Geometric
from posx.encodings.grammar import parse_field
from posx.encodings.rates import layer_rates
from posx.encodings.rope import Rope
from posx.errors import ConfigError
from posx.lab.config import RunConfig
from posx.lab.config.mask_texts import mask_text, parse_mask
from posx.lab.config.sections import shortest_cycle

#: The words of `--layers`: which layers a change acts on.
LAYERS = ("", "all", "full", "window")
#: Positions at which two encodings are compared, beside those near the whole numbers in their fields.
PROBES = (*range(256), *(sign + 2**n for n in range(8, 31) for sign in (-1, 0, 1)))


def change_run(run: RunConfig, encoding: str = "", masks: Sequence[str] = (), layers: str = "") -> RunConfig:
    """Return the run that has the weights of `run` under another encoding and other masks; `run` if they act alike.

    Args:
      run: a trained run.
      encoding: a spec or a field, see `posx.encodings.changed`; "" for the trained one.
      masks: texts as in `model.mask_policy`, cycled over the changed layers; () for the trained ones. Fields that they
        do not name are kept. A window without a size has the training length if the layer has no window yet.
      layers: the layers that change: "full" for those without a window, "window" for those with one, "all". "" stands
        for the layers that have the run's own `encoding`, and for all if only masks are given.

    Raises:
      ConfigError: a text is wrong, no layer would change, or the parameters do not fit the trained ones.
    """
    chosen = _choose_layers(run, encoding, layers)
    texts, policy = list(run.layer_texts), run.model.layer_policy
    asked, encodings, new_masks = run.asked, list(run.layers), list(run.model.masks)
    if encoding:
        for n in chosen:
            encodings[n], texts[n] = _change_encoding(encoding, run, n)
        _check_acts_on_these(encoding, encodings, run.layers)
        main = next((texts[n] for n in chosen if run.model.words[n] == "encoding"), texts[chosen[0]])
        policy = shortest_cycle(tuple("encoding" if text == main else text for text in texts))
        asked = dataclasses.replace(asked, encoding=main)
    if masks[len(chosen) :]:
        raise ConfigError(f"--masks: {masks[len(chosen)]} would be in none of the {len(chosen)} layers. Give fewer.")
    for place, n in enumerate(chosen if masks else ()):
        trained = new_masks[n]
        over = trained if trained.window else window(run.train.length, trained.sinks)
        new_masks[n] = parse_mask(masks[place % len(masks)], over)
    pairs = dict.fromkeys(zip(encodings, run.layers, strict=True))  # layers mostly have one encoding
    if new_masks == list(run.model.masks) and all(_act_alike(new, old, run.dims) for new, old in pairs):
        return run
    model = dataclasses.replace(
        run.model, layer_policy=policy, mask_policy=shortest_cycle(tuple(map(mask_text, new_masks)))
    )
    given = dataclasses.replace(asked.model, layer_policy=policy, mask_policy=model.mask_policy)
    asked = dataclasses.replace(asked, model=given)
    rates = layer_rates(tuple(encodings), run.dims, run.train.position_lr_multiplier)
    return dataclasses.replace(
        run,
        layers=tuple(encodings),
        model=model,
        rates=rates,
        code=code_of(encodings),
        asked=asked,
        parent=run.as_parent(),
    )


def _choose_layers(run: RunConfig, encoding: str, layers: str) -> list[int]:
    """Return the numbers of the layers that a change acts on. Raises ConfigError if there are none.

    A change of one field acts on those of the named layers that have this field, if any has.
    """
    if layers not in LAYERS:
        raise ConfigError(f"--layers={layers} is unknown. Give all, full or window.")
    words, masks = run.model.words, run.model.masks
    kinds = {
        "": lambda n: not encoding or words[n] == "encoding",
        "all": lambda n: True,
        "full": lambda n: not masks[n].window,
        "window": lambda n: bool(masks[n].window),
    }
    if not (numbers := [n for n in range(len(masks)) if kinds[layers](n)]):
        policy = ",".join(run.model.layer_policy)
        why = f"the masks are {run.model.mask_policy}" if layers else f"model.layer_policy={policy}"
        raise ConfigError(f"--layers={layers or 'auto'}: no layer would change, because {why}. Give --layers=all.")
    field = set(parse_field(encoding) or ())
    have = {n: {f.name for value in walk_values(run.layers[n]) for f in dataclasses.fields(value)} for n in numbers}
    return [n for n in numbers if field & have[n]] or numbers


def _change_encoding(text: str, run: RunConfig, layer: int) -> tuple[Encoding, str]:
    """Return the encoding that `text` makes of a layer's, resolved, and its spec.

    Fields that were left open are resolved again, as YaRN's factor of the logits follows its `factor`. A part of a
    chain keeps their trained values if its learned arrays need these, as the buckets of T5 do. All parts keep them if
    this version of posx resolves them in another way. Raises ConfigError if the parameters do not fit the trained ones.
    """
    given, trained = from_spec(run.model.layers(run.encoding)[layer]), run.layers[layer]
    learned, follows = _shapes(trained, run.dims), build(given, run.dims) == trained
    new = changed(text, given if follows else trained)
    if follows and _shapes(build(new, run.dims), run.dims) != learned:
        arrays = {name: array.shape for name, array in abstract_params(trained, run.dims).items()}
        new = _fitting_encoding(new, changed(text, trained), arrays, run.dims)
    encoding = build(new, run.dims)
    if (wanted := _shapes(encoding, run.dims)) == learned:
        return encoding, spec_text(new)
    raise ConfigError(
        f"{spec_text(new)} needs the parameters {wanted or 'none'}, but {spec_text(given)} has learned "
        f"{learned or 'none'}. Use an encoding with the same parameters, or train on with posx train --from."
    )


def _fitting_encoding(new: Encoding, kept: Encoding, learned: dict[str, Any], dims: Dims) -> Encoding:
    """Return `new`, with the parts of `kept` in place of those whose parameters do not have the `learned` shapes."""
    if isinstance(new, Chain) and isinstance(kept, Chain):
        parts = enumerate(zip(new.parts, kept.parts, strict=True))
        return Chain(tuple(_fitting_encoding(*both, select_part(str(n), learned), dims) for n, both in parts))
    return new if {k: x.shape for k, x in abstract_params(build(new, dims), dims).items()} == learned else kept


def _shapes(encoding: Encoding, dims: Dims) -> dict[str, Any]:
    """Return the shapes of an encoding's parameters by name; those of all layers together are named "shared NAME"."""
    arrays = abstract_params(encoding, dims)
    return {f"shared {name}" if name in encoding.shared else name: array.shape for name, array in arrays.items()}


def _check_acts_on_these(text: str, new: Sequence[Encoding], old: Sequence[Encoding]) -> None:
    """Raise ConfigError if a change would act on other layers than those whose encoding changes.

    An encoding that adds to the embeddings acts once, on all layers. Arrays that layers share are stored by the place
    of their encoding among the distinct ones, which must stay.
    """
    pairs = list(zip(new, old, strict=True))
    changes = [(one, other) for one, other in pairs if one != other]
    torn = any(
        (one.acts_on("embed") and any((a == one) != (b == other) for a, b in pairs))
        or (other.acts_on("embed") and any(a != one and b == other for a, b in pairs))
        for one, other in changes
    )
    places = [[list(dict.fromkeys(layers)).index(one) for one in layers] for layers in (new, old)]
    moved = any(other.shared and n != m for n, m, other in zip(*places, old, strict=True))
    if torn or moved:
        why = "it acts on all through the embeddings" if torn else "arrays that layers share would move to other layers"
        raise ConfigError(
            f"--encoding={text}: it would change {len(changes)} of {len(pairs)} layers, but {why}. Change all layers "
            "of one encoding alike, as with --layers=all."
        )


def _act_alike(new: Encoding, old: Encoding, dims: Dims) -> bool:
    """Tell whether two encodings give equal attention, as `yarn(factor=1)` and plain RoPE do.

    Rules that give equal frequencies are equal. Encodings without parameters are compared on random vectors. Others are
    alike only if they are equal, since their parameters are not known here. Equality also decides for encodings that
    change with the length of the text or read features, and for the user's own. The positions at which these differ are
    not known.
    """
    new, old = _with_plain_rules(new), _with_plain_rules(old)
    lengths, pos = [2**n for n in range(1, 31)], set(PROBES)
    for value in (new, old):
        set_by_length = any(value.at_length(n) != value.at_length(dims.train_len) for n in lengths)
        unknown = set_by_length or code_of([value]) or any(map(value.acts_on, ("embed", "features")))
        if new == old or unknown or abstract_params(value, dims):
            return new == old
        fields = (inner for part in walk_values(value) for inner in vars(part).values())
        sizes = (inner for inner in fields if isinstance(inner, int) and 8 < inner < 2**30)
        pos |= {size + offset for size in sizes for offset in range(-8, 9)}
    rng = np.random.default_rng(0)
    slots = Slots(np.array(sorted(pos), np.int32), np.arange(len(pos), dtype=np.int32))
    q, k, v = (
        jnp.asarray(rng.standard_normal((1, len(pos), heads, dims.head_dim)), jnp.float32)
        for heads in (dims.num_heads, dims.kv_heads, dims.kv_heads)
    )

    one, other = (
        attend(encoding.at_length(dims.train_len), Params(), q, k, v, slots, executor="dense")
        for encoding in (new, old)
    )
    return np.allclose(one, other, rtol=0, atol=1e-5)


def _with_plain_rules(value: Any) -> Any:
    """Return a value with `geometric` in place of rules that give its frequencies, as `yarn(factor=1)`."""
    if type(value) is Rope and (rule := value.frequencies) == rule.at_length(2**30) and rule.magnitude == 1:
        frequencies, plain = (one.checked(value.base, value.rotary_dim or 0) for one in (rule, Geometric()))
        return (
            dataclasses.replace(value, frequencies=Geometric()) if np.allclose(frequencies, plain, 1e-12, 0) else value
        )
    return value.with_inner(_with_plain_rules)


def run_differences(new: RunConfig, old: RunConfig, fix: str = "") -> list[str]:
    """Return a line for each change of encoding or mask between two runs: old, new and the layers, of those in both.

    fix: follows the number of changed layers that see a window alone.
    """
    lines: dict[str, list[int]] = {}
    shown = list(zip(old.layers, new.layers, old.model.masks, new.model.masks, strict=False))  # one may have more
    for n, (one, other, mask, masked) in enumerate(shown):
        words = [] if one == other else [_difference(one, other)]
        words += [] if mask == masked else [f"{mask_text(mask)} -> {mask_text(masked)}"]
        lines.setdefault("; ".join(words), []).append(n)
    kept = lines.pop("", [])
    masks = old.model.masks[: len(shown)]
    changed_lines = [f"{line}, in {_where(layers, masks, fix)}" for line, layers in lines.items()]
    return changed_lines + ([f"{len(kept)} of {len(shown)} layers are as trained"] if changed_lines and kept else [])


def _where(layers: Sequence[int], masks: Sequence[Mask], fix: str) -> str:
    """Name layers by their numbers from 1, with those that have a window."""
    windows = [n for n in layers if masks[n].window]
    which = "all" if len(layers) == len(masks) else f"{len(layers)} of {len(masks)}"
    numbers = "" if which == "all" else f" ({', '.join(str(n + 1) for n in layers)})"
    if not windows or len(windows) == len(masks):
        return f"{which} layers{numbers}"
    return f"{which} layers{numbers}, {len(windows)} of which see a window alone{fix}"


def _difference(old: Value, new: Value) -> str:
    """Return the fields that differ, as "base: 10000 -> 500000", or both values if they are of two classes."""
    if type(old) is not type(new) or isinstance(old, Chain):
        return f"{field_text(old)} -> {field_text(new)}"
    pairs = {field.name: (getattr(old, field.name), getattr(new, field.name)) for field in dataclasses.fields(old)}
    return ", ".join(f"{name}: {field_text(a)} -> {field_text(b)}" for name, (a, b) in pairs.items() if a != b)
