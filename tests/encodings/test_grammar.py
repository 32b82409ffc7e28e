"""The text of a spec: read, written again the same, and one line at the word that is wrong."""

import ast
import re
from pathlib import Path

import pytest

import posx
from posx.conformance import DIMS
from posx.encodings import grammar
from posx.encodings.grammar import parse, unparse
from posx.errors import ConfigError

READ = {
    "rope": {"name": "rope"},
    " rope ": {"name": "rope"},
    "rope(base=500000)": {"name": "rope", "base": 500000},
    "learned(std=-1.5e-3, beyond=clamp)": {"name": "learned", "std": -1.5e-3, "beyond": "clamp"},
    "tupe(untied=(0, 3))": {"name": "tupe", "untied": (0, 3)},
    "shaw(values=False, max_distance=auto)": {"name": "shaw", "values": False, "max_distance": "auto"},
    "rope + alibi+nope": [{"name": "rope"}, {"name": "alibi"}, {"name": "nope"}],
    "pkg.my_module:MyEncoding(gain=3, note='a: b')": {"name": "pkg.my_module:MyEncoding", "gain": 3, "note": "a: b"},
    "dape(base=t5(max_distance=128)) + log_length": [
        {"name": "dape", "base": {"name": "t5", "max_distance": 128}}, {"name": "log_length"},
    ],
    "dape(base=kerple)": {"name": "dape", "base": "kerple"},
    "remap(of=rope+alibi, by=my:Far(k=(1,)))": {
        "name": "remap", "of": [{"name": "rope"}, {"name": "alibi"}], "by": {"name": "my:Far", "k": (1,)},
    },
}  # fmt: skip


@pytest.mark.parametrize("text", READ)
def test_what_is_read_is_written_and_read_again(text):
    assert parse(text) == READ[text]
    assert parse(unparse(READ[text])) == READ[text]


def documented() -> set[str]:
    """The specs in the docstrings of posx/encodings: calls with fields, and sums."""
    fields = r"\(\w+=(?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)"
    one = rf"\b(?:{'|'.join(posx.ENCODINGS)})\b(?:{fields})?"
    found = set()
    for path in Path(grammar.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                text = " ".join((ast.get_docstring(node) or "").split())
                found |= {spec for spec in re.findall(rf"{one}(?:\s?\+\s?{one})*", text) if {*spec} & {*"(+"}}
    return found


def test_every_documented_spec_can_be_built():
    specs = documented()
    assert {"rope(base=500000)", "dape(base=t5(max_distance=128)) + log_length", "bam+ssmax"} <= specs
    for spec in sorted(specs):
        posx.build(spec, DIMS)


@pytest.mark.parametrize(
    ("text", "at"),
    [
        ("rope(base=)", ")'"), ("rope(500)", "'500'"), ("rope alibi", "'alibi'"), ("rope - alibi", "'rope - alibi'"),
        ("rope(base=1, base=2)", "base"), ("rope(**{})", "'**'"), ("", "'its end'"), ("3", "'3'"),
        ("a:b:c", "'a:b:c'"), ("rope(base=[x for x in y])", "[x for x in y]"), ("(" * 9999, "'"),
        ("rope(frequencies=yarn(factor=4)", "'its end': a closing bracket is missing"),
        ("__import__('os').system('x')", "'x'"), ("rope(base=lambda: 3)", "lambda"),
    ],
)  # fmt: skip
def test_one_line_points_at_what_is_wrong(text, at):
    with pytest.raises(ConfigError, match="^encoding ") as error:
        parse(text)
    assert at in str(error.value).partition(", at ")[2]
    assert len(str(error.value)) < 250
