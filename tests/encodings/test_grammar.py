"""The text of a spec: read, written again the same, and one line at the word that is wrong."""

import pytest

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
    "rope(frequencies=yarn(factor=8)) + log_length": [
        {"name": "rope", "frequencies": {"name": "yarn", "factor": 8}}, {"name": "log_length"},
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


@pytest.mark.parametrize(
    ("text", "at"),
    [
        ("rope(base=)", ")'"), ("rope(500)", "'500'"), ("rope alibi", "'alibi'"), ("rope - alibi", "'rope - alibi'"),
        ("rope(base=1, base=2)", "base"), ("rope(**{})", "'**'"), ("", "'its end'"), ("3", "'3'"),
        ("a:b:c", "'a:b:c'"), ("rope(base=[x for x in y])", "[x for x in y]"), ("(" * 9999, "'"),
        ("__import__('os').system('x')", "'x'"), ("rope(base=lambda: 3)", "lambda"),
    ],
)  # fmt: skip
def test_one_line_points_at_what_is_wrong(text, at):
    with pytest.raises(ConfigError, match="^encoding ") as error:
        parse(text)
    assert at in str(error.value).partition(", at ")[2]
    assert len(str(error.value)) < 250
