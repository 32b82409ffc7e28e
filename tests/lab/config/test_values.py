"""A value is the same value however it is written: on the command line, on an axis, in a config file, in JSON."""

import shlex
import typing

import hypothesis
import pytest
from hypothesis import strategies as st

from posx.errors import ConfigError
from posx.lab.argv.settings import override, settings_text
from posx.lab.config import SECTIONS, base_config, read_sections, run_config
from posx.lab.sweeps.axes import point_config, sweep_points

#: {setting: type} of all sections.
TYPES = {
    f"{section}.{name}": hint for section, cls in SECTIONS.items() for name, hint in typing.get_type_hints(cls).items()
}

LETTERS = st.text(st.sampled_from("ab .'\"(),=+/\\:"), max_size=6).map(str.strip)
VALUES = {
    int: st.integers(-(2**40), 2**40),
    float: st.floats(-1e9, 1e9) | st.sampled_from([-0.0, 0.0, 1e-3]) | st.integers(-9, 9),
    bool: st.booleans(),
    str: LETTERS,
    tuple[int, ...]: st.lists(st.integers(0, 999), max_size=3).map(tuple),
    tuple[str, ...]: st.lists(st.sampled_from(["rope", "rope(base=5, layout='half')", "a b", "it's"]), max_size=3).map(
        tuple
    ),
}


def in_quotes(text):
    return [f"{quote}{text}{quote}" for quote in "'\"" if quote not in text]


def spellings(value, kind) -> list[str]:
    """Ways to write one value as the value of a setting."""
    if kind is int:
        found = [str(value), f" {value} ", f"{value}.0", f"{value:.15e}"]
    elif kind is float:
        found = [repr(value), f"{value:.17e}", f" {value!r}"]
    elif kind is bool:
        found = [str(value), str(value).lower(), str(value)[0], str(int(value))]
    elif kind is str:
        return in_quotes(value)[:1] + ([value] if value[:1] not in "'\"" and value else [])
    else:
        items = ", ".join(text if (text := str(item))[0] not in "'\"" else f'"{text}"' for item in value)
        found = [f"({items})", f"[{items},]" if items else "[]", *([f"{items}, "] if items else ["()"])]
        return found + in_quotes(found[0])
    return found + in_quotes(found[0])


def typed(config):
    """Return the sections of a run."""
    return {name: getattr(config, name) for name in SECTIONS}


def sections_with(word, axis=False):
    """Return the typed sections of a config in which one word sets something."""
    config = base_config("nope").lock()
    config.sweep.encodings = ("nope",)
    given = override(read_sections(config), [word])
    return typed(point_config(given, sweep_points(given)[0]) if axis else given)


@hypothesis.settings(max_examples=25, deadline=None, database=None, derandomize=True)
@hypothesis.given(st.data())
def test_value_is_the_same_however_it_is_written(data):
    setting = data.draw(st.sampled_from(sorted(set(TYPES) - {"train.length", "train.seed"})))
    kind = str if typing.get_origin(TYPES[setting]) is typing.Literal else TYPES[setting]
    value = data.draw(VALUES[kind])
    section, _, name = setting.partition(".")
    config = base_config("nope").lock()
    config[section][name] = value
    wanted = typed(read_sections(config))
    (again,) = [word for word in settings_text(read_sections(config)).splitlines() if f"--config.{setting}=" in word]
    found = [sections_with(*shlex.split(again))]
    for text in spellings(value, kind):
        found.append(sections_with(f"--config.{setting}={text}"))
        bare = typing.get_origin(kind) is tuple and text[0] not in "([\"'"  # several values of an axis
        if not bare and (kind is not str or text[:1] in "'\""):
            found.append(sections_with(f"--config.sweep.axes.{setting}={text}", axis=True))
    config = base_config("nope")
    config.sweep.encodings, config.sweep.axes = ("nope",), {setting: (value,)}
    found.append(typed(point_config(read_sections(config), sweep_points(read_sections(config))[0])))
    assert found == [wanted] * len(found)
    assert {repr(sections) for sections in found} == {repr(wanted)}, "-0.0 equals 0.0 but is written in another way"


def test_run_with_minus_zero_has_the_hash_of_zero():
    def hash_of(text):
        given = override(read_sections(base_config("nope")), [f"--config.train.weight_decay={text}"])
        return run_config(given).hash

    assert len({hash_of(text) for text in ("0", "0.0", "-0.0", "'-0'", "0e0")}) == 1


@pytest.mark.parametrize("text", ["auto", "none", "None", "'none'"])
def test_open_field_of_an_encoding_is_left_open(text):
    config = read_sections(base_config("t5(max_distance=9)"))
    given = override(config, [f"--config.encoding.max_distance={text}"])
    assert run_config(given) == run_config(base_config("t5"))


@pytest.mark.parametrize(
    ("word", "wanted"),
    [
        ("--config.train.steps=many", "--config.train.steps=many: not a whole number"),
        ("--config.train.steps=1.5", "--config.train.steps=1.5: not a whole number"),
        ("--config.train.learning_rate=fast", "--config.train.learning_rate=fast: not a number"),
        ("--config.model.tied=maybe", "--config.model.tied=maybe: not true or false"),
        ("--config.eval.lengths=64,x", "--config.eval.lengths=64,x: x is not a whole number"),
        ("--config.encoding.base=big", "--config.encoding.base=big: not a number"),
        ("--config.sweep.seeds=0,x", "--config.sweep.seeds=0,x: x is not a whole number"),
        ("--noconfig.train.steps=5", "write --config.train.steps=VALUE"),
    ],
)
def test_wrong_value_is_named_with_what_is_expected(word, wanted):
    with pytest.raises(ConfigError) as error:
        override(read_sections(base_config("rope")), [word])
    assert wanted in str(error.value)


@pytest.mark.parametrize(
    "words",
    [
        ("--config.train.steps=5", "--config.train.steps=6"),
        ("--config.train.steps=5", "--config.train.steps=5"),
        ("--config.encoding=rope", "--config.encoding.name=t5"),
        ("--config.sweep.seeds=0,1", "--config.sweep.axes.train.seed=2,3"),
        ("--config.model.tied", "--noconfig.model.tied"),
    ],
)
def test_setting_given_twice_is_refused(words):
    with pytest.raises(ConfigError, match="setting. Give it once.") as error:
        override(read_sections(base_config("rope")), words)
    assert all(word in str(error.value) for word in words)


def test_list_on_the_command_line_replaces_the_axis_of_a_file():
    config = base_config("rope")
    config.sweep.axes = {"train.seed": (7, 8)}
    config.sweep.encodings = ("rope",)
    given = override(read_sections(config.lock()), ["--config.sweep.seeds=0,1,2"])
    assert [point["train.seed"] for point in sweep_points(given)] == [0, 1, 2]
