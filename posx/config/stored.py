"""A run's settings as its `config.json` holds them, and what makes two of them the same run.

The file holds what was asked for, each setting under its own path, and under "resolved" what came of what was left
open. Rules and defaults change from version to version, so a stored run is rebuilt, compared and named by that alone.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any

from posx.config import SECTIONS, Resolution, RunConfig, schema_1
from posx.config.model import ModelConfig
from posx.encodings import Chain, Dims, Encoding, Spec, code_of, encoding_class, from_spec, given_fields, spec_of
from posx.encodings.grammar import parse
from posx.encodings.rates import Rate, Rates, from_json, rates_of_layers, special, to_json
from posx.errors import ConfigError
from posx.fields import typed_fields

SCHEMA_VERSION = 2

#: What a setting meant before it existed, for the files that lack it: whoever adds a setting adds it here. Defaults may
#: change, these lines may not: digests leave a setting out where it means this.
BEFORE: dict[str, dict[str, Any]] = {
    "model": {"remat": "none"},
    "data": {"tuning_fraction": 0.0},
    "train": {"dispatch_steps": 1, "position_lr_multiplier": 0.0},
    "eval": {},
}

#: The same for the fields of encodings, by the name of the encoding.
ENCODINGS_BEFORE: dict[str, dict[str, Any]] = {}

#: Fields of encodings that no longer exist, and the value that they had in every run. Stored specs may hold them, and
#: digests still do.
ENCODINGS_PAST: dict[str, dict[str, Any]] = {"learned": {"stretched_to": 0}, "tupe": {"stretched_to": 0}}

#: Settings that do not change what the weights become: they may differ when a work folder is used again.
SAFE_TO_CHANGE = (
    "data.cache_dir", "train.dispatch_steps", "train.log_steps", "train.checkpoint_steps", "train.keep_checkpoints",
    "eval.",
)  # fmt: skip

#: Settings that say where the text lies: what lies there has a digest of its own.
PLACES = ("data.source", "data.subset", "data.train_split", "data.validation_split", "data.validation")

#: Settings of the model that open ones are resolved from, themselves included.
SIZES = ("num_layers", "model_dim", "num_heads", "num_kv_heads", "mlp", "mlp_dim")


def to_stored(run: RunConfig, **facts: Any) -> dict[str, Any]:
    """What `config.json` holds of `run`, with `facts` beside what it was resolved to."""
    found = run.resolution
    sizes = {name: value for name, value in vars(found.model).items() if value != getattr(run.model, name)}
    resolved = {"layers": [spec_of(encoding) for encoding in found.layers], "model": sizes}
    resolved["rates"] = to_json(found.rates)
    resolved |= {name: dict(told) for name in ("data", "code") if (told := getattr(found, name))} | facts
    return {"schema_version": SCHEMA_VERSION, **run.to_json(), "resolved": resolved}


def from_stored(values: Any) -> RunConfig:
    """The run that a `config.json` of any version holds, as it was resolved then.

    Raises ConfigError for a version this posx does not know, and for a setting that is unknown or missing.
    """
    version = values.get("schema_version") if isinstance(values, Mapping) else None
    if version is None:
        family = values.get("model_type") if isinstance(values, Mapping) else None
        whose = f", but of a Hugging Face model ({family})" if family else ""
        raise ConfigError(f"it has no schema_version, so it is not of a run that `posx train` made{whose}")
    if version == 1:
        values = schema_1.migrated(values)
    elif version != SCHEMA_VERSION:
        raise ConfigError(f"schema_version={version!r} is not one of those this posx reads, 1 to {SCHEMA_VERSION}")
    sections = {name: _with_earlier(cls, _mapping(values, name), BEFORE[name], name) for name, cls in SECTIONS.items()}
    run = RunConfig.from_json({"encoding": without_past(_mapping(values, "encoding")), **sections})
    given_fields(run.encoding)
    resolved = _mapping(values, "resolved")
    layers, sizes = resolved.get("layers"), _mapping(resolved, "model")
    if not isinstance(layers, list) or len(layers) != run.model.num_layers:
        raise ConfigError(f"resolved.layers must name the encodings of all {run.model.num_layers} layers")
    model = dataclasses.replace(run.model, **typed_fields(ModelConfig, sizes, "resolved.model", "resolved.model."))
    data, code = (_mapping(resolved, name) if name in resolved else {} for name in ("data", "code"))
    encodings = tuple(from_spec(_whole(without_past(spec))) for spec in layers)
    rates = _rates(resolved, encodings, model.dims(run.train.length))
    return dataclasses.replace(run, stored=Resolution(encodings, model, rates, data, code))


def _rates(resolved: Mapping[str, Any], layers: tuple[Encoding, ...], dims: Dims) -> Rates:
    """How the layers' parameters are trained; like all others where a file is from before there were rates.

    Raises ConfigError.
    """
    names = [[name for name, _ in own] for own in rates_of_layers(layers, dims)]
    if "rates" not in resolved:
        return tuple(tuple((name, Rate()) for name in own) for own in names)
    try:
        told = map(dict, from_json(resolved["rates"]))
        return tuple(tuple((name, layer[name]) for name in own) for own, layer in zip(names, told, strict=True))
    except (KeyError, TypeError, ValueError, AttributeError):
        raise ConfigError("resolved.rates must say lr_multiplier and decays of every layer's parameters") from None


def like(run: RunConfig, stored: RunConfig | None) -> RunConfig:
    """`run` with its open settings as they were resolved for `stored`, if it asks for the same; else `run` itself.

    The same is asked for by the words of then, and by the values that came of them.
    """
    if stored is None:
        return run
    found = stored.resolution
    sizes = {name: getattr(found.model, name) for name in SIZES}
    same = (
        run.stored is None
        and not run.model.problems()
        and run.train.length == stored.train.length
        and all(_same(getattr(run.model, n), getattr(stored.model, n), size) for n, size in sizes.items())
        and all(map(_asks_for, run.layers, stored.layers, found.layers))
    )
    if not same:
        return run
    model = dataclasses.replace(run.model, **sizes)
    rates, code = _rates_asked(run, stored), code_of(found.layers)
    return dataclasses.replace(run, stored=Resolution(found.layers, model, rates, code=code))


def repeated(run: RunConfig, earlier: RunConfig | None) -> RunConfig:
    """Return `like(run, earlier)` for a command that names the config.json of the run that it repeats.

    Raises ConfigError if that run's own encodings have other code by now.
    """
    found = like(run, earlier)
    if earlier is not None and found.stored is not None and (changes := code_changes(earlier)):
        raise ConfigError(
            f"--config_json: {changes} since that file was written. Restore the code, or name the settings with "
            "--config to train with the code as it is now"
        )
    return found


def code_changes(run: RunConfig) -> str:
    """Say which of a stored run's own encodings have other code by now; empty if none has."""
    before, now = run.resolution.code, code_of(run.resolution.layers)
    changed = [f"{name} (digest {before.get(name, 'unknown')}, now {now[name]})" for name in now]
    changed = [text for name, text in zip(now, changed, strict=True) if before.get(name) != now[name]]
    return f"the code of {' and of '.join(changed)} has changed" if changed else ""


def _rates_asked(run: RunConfig, stored: RunConfig) -> Rates:
    """Those of `stored` where `run` asks for them in the same words or by number; another number stands for theirs; and
    where it leaves open what was not, today's."""
    found, asked = stored.resolution, run.train.position_lr_multiplier
    if asked == stored.train.position_lr_multiplier:
        return found.rates
    if asked:
        return tuple(tuple((name, rate._replace(lr_multiplier=asked)) for name, rate in own) for own in found.rates)
    return rates_of_layers(found.layers, run.model.dims(run.train.length))


def _asks_for(asked: Spec, before: Spec, value: Encoding) -> bool:
    (cls, given), (_, first) = _given(asked), _given(before)
    names = (field.name for field in dataclasses.fields(value))
    return cls is type(value) and all(_same(given.get(n), first.get(n), getattr(value, n)) for n in names)


def _given(spec: Spec) -> tuple[type[Encoding], dict[str, Any]]:
    """The class that `spec` names and the fields that it sets."""
    if isinstance(spec, Encoding):
        return type(spec), {name: value for name, value in vars(spec).items() if value is not None}
    if isinstance(spec, str):
        spec = parse(spec)
    return (encoding_class(spec["name"]), given_fields(spec)) if isinstance(spec, Mapping) else (Chain, {"parts": spec})


def _same(asked: Any, before: Any, value: Any) -> bool:
    """Whether `asked` is `before` once more, or the `value` that was made of it; None is what is left open."""
    if asked is None or before is None or asked == before:
        return asked in (before, value)
    if isinstance(value, Encoding):
        return _asks_for(asked, before, value)
    if isinstance(value, tuple) and len(asked) == len(before) == len(value):
        return all(map(_same, asked, before, value))
    return asked == value


def digest(run: RunConfig) -> str:
    """Names the run by what it is: a hash of the settings that decide its weights and its rows."""
    return _digest(run, lambda path: path.startswith("eval.") or _decisive(path))


def identity(run: RunConfig, text: str = "") -> str:
    """Names what was trained: a hash of the settings that decide its weights.

    `text` is the digest of the text it was trained on, where that is known: it stands for where the text lies.
    """
    if not text:
        return _digest(run, _decisive)
    return _digest(run, lambda path: _decisive(path) and path not in (*PLACES, "data.tokenizer"), text)


def _digest(run: RunConfig, counts: Callable[[str], bool], text: str = "") -> str:
    kept: dict[str, Any] = {"text": text} if text else {}
    for path, value in _flat(run).items():
        section, _, name = path.partition(".")
        if counts(path) and _since(BEFORE[section], name, value):
            kept[path] = value
    kept["layers"] = [_since_before(spec_of(encoding)) for encoding in run.resolution.layers]
    if rates := special(run.resolution.rates):
        kept["rates"] = rates
    if code := run.resolution.code:
        kept["code"] = dict(code)
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:8]


def digests(values: Mapping[str, Any]) -> tuple[str, ...]:
    """The names that the run of a `config.json` has had."""
    name = digest(from_stored(values))
    return (name, schema_1.digest(values)) if values["schema_version"] == 1 else (name,)


def on_text_of(held: RunConfig, run: RunConfig) -> RunConfig:
    """`run` with its text, and its tokenizer where that is a file, named as `held` names them.

    Where they lie makes no other run: whether it is the same text is told by its digest.
    """
    names = [path.removeprefix("data.") for path in PLACES]
    names += [] if {held.data.tokenizer, run.data.tokenizer} & {"bytes", "bpe"} else ["tokenizer"]
    return dataclasses.replace(run, data=dataclasses.replace(run.data, **{n: getattr(held.data, n) for n in names}))


def differences(old: RunConfig, new: RunConfig) -> list[str]:
    """Settings in which two runs differ and that change what the weights become, as "path: old -> new".

    Where the text lies is none of them.
    """
    runs = (old, on_text_of(old, new))
    layers = [[spec_of(encoding) for encoding in run.resolution.layers] for run in runs]
    if all(len(set(run.resolution.layers)) == 1 for run in runs):
        a, b = (_flat(run) | _leaves(specs[0], "encoding") for run, specs in zip(runs, layers, strict=True))
    else:
        a, b = (_flat(run) | _leaves(specs, "layers") for run, specs in zip(runs, layers, strict=True))
    if old.resolution.layers == new.resolution.layers:  # else the encodings tell
        for leaves, run in zip((a, b), runs, strict=True):
            leaves |= {f"rates.{place}": rate for place, rate in special(run.resolution.rates).items()}
            leaves |= {f"code.{name}": code for name, code in run.resolution.code.items()}
    return [
        f"{path}: {a.get(path)!r} -> {b.get(path)!r}"
        for path in sorted(a.keys() | b.keys())
        if a.get(path) != b.get(path) and _decisive(path)
    ]


def _decisive(path: str) -> bool:
    """Whether a setting changes what the weights become."""
    return not path.startswith(SAFE_TO_CHANGE)


def _flat(run: RunConfig) -> dict[str, Any]:
    """{"section.name": value} of all settings but the layers' encodings."""
    sections = {name: getattr(run, name) for name in SECTIONS} | {"model": run.resolution.model}
    flat = {f"{name}.{key}": value for name, section in sections.items() for key, value in vars(section).items()}
    # What came of these is in the layers, and in the rates.
    del flat["model.layer_policy"], flat["train.position_lr_multiplier"]
    return flat


def _leaves(spec: Any, path: str) -> dict[str, Any]:
    """{"path.to.field": value} of a spec, encodings within encodings included."""
    if not isinstance(spec, dict | list):
        return {path: spec}
    items = spec.items() if isinstance(spec, dict) else enumerate(spec)
    return {place: value for key, inner in items for place, value in _leaves(inner, f"{path}.{key}").items()}


def _since(before: Mapping[str, Any], name: str, value: Any) -> bool:
    """Whether a setting says something that was not so before it existed."""
    return name not in before or before[name] != value


def _since_before(spec: Any) -> Any:
    """`spec` without the fields that mean what was so before they existed, and with those that no longer exist."""
    if isinstance(spec, list | tuple):
        return [_since_before(part) for part in spec]
    if not isinstance(spec, dict):
        return spec
    before, past = ENCODINGS_BEFORE.get(spec["name"], {}), ENCODINGS_PAST.get(spec["name"], {})
    return past | {name: _since_before(value) for name, value in spec.items() if _since(before, name, value)}


def without_past(spec: Any) -> Any:
    """A stored spec without the fields that no longer exist, if they have the value that every run had."""
    if isinstance(spec, list | tuple):
        return [without_past(part) for part in spec]
    if not isinstance(spec, Mapping):
        return spec
    past = ENCODINGS_PAST.get(str(spec.get("name")), {}).items()
    return {key: without_past(value) for key, value in spec.items() if (key, value) not in past}


def _whole(spec: Any) -> Any:
    """A stored spec with the fields it lacks, because they are newer than it, as they were before they existed."""
    if isinstance(spec, list):
        return [_whole(part) for part in spec]
    if not isinstance(spec, Mapping) or not isinstance(spec.get("name"), str):
        return spec
    name = spec["name"]
    given = {key: _whole(value) for key, value in spec.items() if key != "name"}
    return {"name": name} | _with_earlier(encoding_class(name), given, ENCODINGS_BEFORE.get(name, {}), name)


def _with_earlier(cls: type, given: Mapping[str, Any], before: Mapping[str, Any], where: str) -> dict[str, Any]:
    """`given` with what of a class's fields it lacks as that was before. Raises ConfigError where that is not known."""
    values = {**before, **given}
    for field in dataclasses.fields(cls):
        if field.init and field.name not in values:
            raise ConfigError(
                f"{where}.{field.name} is missing, and nothing says what it was before it existed: write into the file "
                "what it was for this run"
            )
    return values


def _mapping(values: Any, name: str) -> Mapping[str, Any]:
    found = values.get(name) if isinstance(values, Mapping) else None
    if not isinstance(found, Mapping):
        raise ConfigError(f"the config has no section {name!r}")
    return found
