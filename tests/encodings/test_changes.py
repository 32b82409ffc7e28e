"""A spec put on a trained encoding changes the fields that it names, and no other."""

import contextlib
import dataclasses

import pytest

from posx.encodings import ENCODINGS, changed, encoding_name, from_spec
from posx.encodings.grammar import value_text
from posx.errors import ConfigError
from tests.encodings.cases import SPECS

BASE = "rope(base=100000, rotary_dim=4)"
#: A rule in the fields of which each was given.
RULE = "yarn(factor=2, original_len=16, fast=20, slow=2)"


@pytest.mark.parametrize("case", SPECS)
def test_an_unnamed_field_of_any_encoding_stays(case):
    """The bare name changes nothing. A field changes alone, named in a spec or by itself."""
    trained = from_spec(SPECS[case])
    name = encoding_name(trained)
    assert changed(name, trained) == trained
    for field in dataclasses.fields(trained) if name in ENCODINGS else ():
        value = getattr(trained, field.name)
        other = {bool: not value, int: 2, float: 77.0}.get(type(value))
        if field.init and other is not None and not any(hasattr(inner, field.name) for inner in vars(trained).values()):
            with contextlib.suppress(ConfigError):  # out of the range
                wanted = dataclasses.replace(trained, **{field.name: other})
                word = f"{field.name}={value_text(other)}"
                assert changed(f"{name}({word})", trained) == changed(word, trained) == wanted


@pytest.mark.parametrize(
    ("trained", "text", "wanted"),
    [
        (BASE, "rope(frequencies=yarn(factor=4))", "rope(base=100000, rotary_dim=4, frequencies=yarn(factor=4))"),
        (BASE, "frequencies=yarn(factor=4)", "rope(base=100000, rotary_dim=4, frequencies=yarn(factor=4))"),
        (BASE, "base=auto", None),
        (BASE, "rotary_dim=auto", "rope(base=100000)"),
        (BASE, "rope+log_length", f"{BASE}+log_length"),
        (BASE, "nope", "nope"),
        *((BASE, name, f"{name}({field}={BASE})") for name, field in (
            ("self_extend", "rope"), ("dual_chunk", "rope"), ("xpos", "rope"), ("rotated_values", "base"))),
        (BASE, "self_extend(rope=rope(frequencies=ntk(factor=2)), window=9)",
         "self_extend(rope=rope(base=100000, rotary_dim=4, frequencies=ntk(factor=2)), window=9)"),
        (f"xpos(rope={BASE})", "rope", BASE),
        (f"xpos(rope={BASE})", "base=500", "xpos(rope=rope(base=500, rotary_dim=4))"),
        (f"self_extend(rope={BASE}, window=9)", "dual_chunk(window=20)", f"dual_chunk(rope={BASE}, window=20)"),
        (f"{BASE}+alibi", "frequencies=linear(factor=2)",
         "rope(base=100000, rotary_dim=4, frequencies=linear(factor=2))+alibi"),
        (f"{BASE}+alibi", "alibi+rope(base=500)", "alibi+rope(base=500, rotary_dim=4)"),
        (f"{BASE}+alibi", "rope+nope", f"{BASE}+nope"),
        (f"rope(frequencies={RULE})", "rope(frequencies=yarn(factor=8))",
         "rope(frequencies=yarn(factor=8, original_len=16, fast=20, slow=2))"),
        (f"rope(frequencies={RULE})", "factor=8", "rope(frequencies=yarn(factor=8, original_len=16, fast=20, slow=2))"),
        (f"rope(frequencies={RULE})", "frequencies=llama3(factor=8)",
         "rope(frequencies=llama3(factor=8, original_len=16))"),
        (f"rope(frequencies={RULE})", "frequencies=geometric", "rope"),
        (f"rope(frequencies={RULE})", "frequencies=resonance", f"rope(frequencies=resonance(of={RULE}))"),
        (f"rope(frequencies={RULE})", "frequencies=resonance(of=llama3)",
         "rope(frequencies=resonance(of=llama3(original_len=16)))"),
        (f"rope(frequencies=resonance(of={RULE}))", "frequencies=llama3", "rope(frequencies=llama3(original_len=16))"),
        ("fope(base=50, original_len=9)", "rope(base=50, frequencies=yarn(factor=2))",
         "rope(base=50, frequencies=yarn(factor=2, original_len=9))"),
        ("rope(base=5)+sinusoidal(base=7)", "rope+nope", "rope(base=5)+nope"),
        ("rope(base=5)+rope(base=7)", "rope+rope(rotary_dim=4)", "rope(base=5)+rope(base=7, rotary_dim=4)"),
        ("sandwich(base=5)+sandwich(base=7)", "sandwich+sandwich", "sandwich(base=5)+sandwich(base=7)"),
    ],
)  # fmt: skip
def test_changed_encoding_of_a_trained_one(trained, text, wanted):
    if wanted is None:
        with pytest.raises(ConfigError):
            changed(text, from_spec(trained))
    else:
        assert changed(text, from_spec(trained)) == from_spec(wanted)


@pytest.mark.parametrize(
    ("trained", "text", "problem"),
    [
        (f"{BASE}+alibi", "rope(base=500)", "would drop alibi. Write rope\\+alibi"),
        (f"{BASE}+alibi", "self_extend", "would drop alibi"),
        (f"{BASE}+alibi", "rotated_values+alibi", "would hold the whole chain"),
        (BASE, "sinusoidal", "base=10000.0, but the run was trained with base=100000.0 in rope"),
        ("alibi", "frequencies=ntk(factor=2)", "no such field. The fields are: num_heads"),
        (BASE, "bas=5", "Did you mean 'base'"),
        (BASE, "base=5, layout=interleaved", "give one field"),
        ("rope+rope(base=5)", "base=7", "rope and rope have this field"),
        ("rope+rope(base=5)", "rope", "rope: the run was trained with 2 of these"),
        ("sandwich(base=5)+sandwich(base=7)", "sandwich", "sandwich: the run was trained with 2 of these"),
        ("rope(base=7)+rope(base=7)",
         "rope(base=7, layout=half_split, rotary_dim=4, frequencies=geometric)",
         "rope alone would drop rope"),
        ("rope(base=5)+rope", "dual_chunk(rope=rope(rotary_dim=4))",
         "rope: the run was trained with 2 of these"),
        (BASE, "sinusoidal+log_length", "sinusoidal would have base=10000.0, but"),
        (f"{BASE}+alibi", "sinusoidal+alibi", "sinusoidal would have base=10000.0, but"),
        (BASE, "dape(base=sinusoidal)", "sinusoidal would have base=10000.0, but"),
        *((trained, text, f"rope would have base=10000.0, but the run was trained with {trained[5:12]}") for trained in
          ("fope(base=50.0)",) for text in ("self_extend", "dual_chunk+log_length", "xpos(scale_base=9)")),
    ],
)  # fmt: skip
def test_a_change_of_what_is_not_named_is_refused(trained, text, problem):
    with pytest.raises(ConfigError, match=problem):
        changed(text, from_spec(trained))
