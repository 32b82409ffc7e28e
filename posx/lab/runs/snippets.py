"""An encoding as code for other libraries: NumPy, PyTorch and FlexAttention, or its formula in LaTeX.

The hooks are evaluated into tables of numbers, in float64: frequencies of planes, biases by distance, logit scales by
position. The code of a snippet reads these tables alone. An encoding whose hooks depend on content has no such tables.
"""

from __future__ import annotations

import functools
import inspect
import math
import string
import textwrap
import tomllib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import posx
from posx.contract import (
    Dims,
    Encoding,
    Params,
    abstract_params,
    acting_hooks,
    distance_terms,
    walk_chain,
    walk_values,
)  # fmt: skip
from posx.encodings import ENCODINGS, encoding_name, spec_text
from posx.encodings.frequencies import FrequencyRule, Geometric
from posx.encodings.rope import Rope
from posx.errors import ConfigError

#: The hooks that tables can hold. `query` and `key` are rotations by frequencies, so of `rope` alone.
WRITABLE = ("query", "key", "logit_scale", "by_distance")
#: The most numbers of one table, which are 12 MB of text, and the most tokens that hooks are evaluated for.
MOST_NUMBERS = MOST_TOKENS = 2**20
#: In a template: before the tags of which a line needs one. They are the form, and the tables that the snippet has.
TAG = "  #? "
_TORCH = {
    "np": "torch", "cat": "torch.cat", "repeat": "torch.repeat_interleave", "cast": "to", "axis": "dim", "max": "amax",
    "keepdims": "keepdim", "array": "torch.tensor", "narrow": "torch.float32,\n    device=DEVICE",
    "wide": "torch.float64,\n    device=DEVICE", "library": "PyTorch",
}  # fmt: skip
#: The words that complete the templates, by form.
CODE_FORMS: dict[str, dict[str, str]] = {
    "torch-flex": _TORCH | {"library": "FlexAttention of PyTorch"},
    "torch": _TORCH,
    "numpy": {
        "np": "np", "cat": "np.concatenate", "repeat": "np.repeat", "cast": "astype", "axis": "axis", "max": "max",
        "keepdims": "keepdims", "array": "np.array", "narrow": "np.float64", "wide": "np.float64", "library": "NumPy",
    },
}  # fmt: skip

HEADER = '''\
"""$title

$facts
Call:

    attention(q, k, v, pos, pos, np.tri(t, dtype=bool)), pos = np.arange(t)  #? numpy
    attention(q, k, v, pos, pos, torch.ones(t, t, dtype=torch.bool).tril()), pos = torch.arange(t)  #? torch
    attention(q, k, v, create_block_mask(lambda b, h, i, j: i >= j, None, None, t, t, DEVICE))  #? torch-flex
"""

import numpy as np  #? numpy
import torch  #? torch|torch-flex
from torch.nn.attention.flex_attention import create_block_mask, flex_attention  # noqa: F401  #? torch-flex

DEVICE = "cpu"  # of the tables: positions and tensors must be there too  #? torch|torch-flex
MAX_LENGTH = $length'''

CHECK = '''

def check(positions):
    """Raise ValueError for positions beyond those that this file was written for."""
    if positions.min() < 0 or positions.max() >= MAX_LENGTH:
        raise ValueError(f"positions must be from 0 to {MAX_LENGTH - 1}: export again with a larger --length")
'''

ROTATE = '''

def rotate(x, positions):
    """Return queries or keys x [b, h, t, d] with plane c rotated by the angle position * FREQUENCIES[c]."""
    check(positions)
    if x.shape[-1] != HEAD_DIM:
        raise ValueError(f"the last axis must have {HEAD_DIM} channels, not {x.shape[-1]}")
    # Angles are float64, and only their waves are cast: in float32 a product of position and frequency is off by
    # position * 2**-24 radians, 0.06 at position 1,000,000.
    angles = $np.atleast_2d(positions)[:, None, :, None] * FREQUENCIES[:, None, :]
    angles = $repeat(angles, x.shape[1] // angles.shape[1], $axis=1)
    wide = x.$cast($np.promote_types(x.dtype, $np.float32))
    cos, sin = ((MAGNITUDE * wave(angles)).$cast(wide.dtype) for wave in ($np.cos, $np.sin))
    a, b = wide[..., :PLANES], wide[..., PLANES : 2 * PLANES]  #? half_split
    a, b = wide[..., 0 : 2 * PLANES : 2], wide[..., 1 : 2 * PLANES : 2]  #? interleaved
    pair = a * cos - b * sin, a * sin + b * cos
    rotated = $cat(pair, $axis=-1)  #? half_split
    rotated = $np.stack(pair, $axis=-1).reshape(*a.shape[:-1], -1)  #? interleaved
    return $cat((rotated, wide[..., 2 * PLANES :]), $axis=-1).$cast(x.dtype)
'''

BIAS = '''

def bias(q_pos, k_pos):
    """Return the bias of each pair in nats, [b or 1, h or 1, q, k]."""
    check(q_pos), check(k_pos)
    r = $np.atleast_2d(q_pos)[:, :, None] - $np.atleast_2d(k_pos)[:, None, :]
    return -SLOPES[:, :, None] * abs(r)[:, None]  #? slopes
    return $np.moveaxis(BIASES[:, $row], 0, 1)  #? biases
'''

SCALE = '''

def scale(positions):
    """Return the factor of products of queries at these positions, [b or 1, h or 1, q, 1]."""
    check(positions)
    return $np.moveaxis(SCALES[:, $np.atleast_2d(positions).clip(max=$last)], 0, 1)[..., None]
'''

ATTENTION = '''

def attention(q, k, v, q_pos, k_pos, visible):
    """Return outputs [b, h, q, d], 0 for a query that sees no key. visible: bool [q, k] or [b, 1, q, k]."""
    check(q_pos), check(k_pos)
    q, k = rotate(q, q_pos), rotate(k, k_pos)  #? frequencies
    k, v = ($repeat(x, q.shape[1] // x.shape[1], $axis=1) for x in (k, v))
    s = (q @ k.swapaxes(-1, -2)).$cast($np.promote_types(q.dtype, $np.float32)) / q.shape[-1] ** 0.5
    s = s * scale(q_pos)  #? scales
    s = s + bias(q_pos, k_pos)  #? slopes|biases
    s = $np.where(visible, s, -$np.inf)
    w = $np.exp(s - s.$max($axis=-1, $keepdims=True).clip($np.finfo(s.dtype).min))
    return (w / w.sum($axis=-1, $keepdims=True).clip(1e-30)).$cast(v.dtype) @ v
'''

FLEX = '''

def score_mod(score, b, h, q_idx, kv_idx):
    """Return the score of a pair with its scale and bias. Indices are positions; NaN from MAX_LENGTH on."""
    score = score * SCALES[$scale_head, q_idx.clip(max=$last)]  #? scales
    r = q_idx - kv_idx  #? slopes|biases
    score = score - SLOPES[$bias_head, 0] * abs(r)  #? slopes
    score = score + BIASES[$bias_head, $row]  #? biases
    return torch.where((q_idx < MAX_LENGTH) & (kv_idx < MAX_LENGTH), score, torch.nan)


def attention(q, k, v, block_mask):
    """Return outputs [b, h, t, d] of tokens at the positions 0 to t - 1."""
    q_pos, k_pos = (torch.arange(x.shape[2], device=x.device) for x in (q, k))
    check(q_pos), check(k_pos)
    q, k = rotate(q, q_pos), rotate(k, k_pos)  #? frequencies
    return flex_attention(q, k, v, score_mod, block_mask, enable_gqa=q.shape[1] != k.shape[1])
'''


def write_snippet(encoding: Encoding, params: Params, dims: Dims, *, form: str, length: int, arrays: str) -> str:
    """Return the source of a file that computes attention under an encoding without posx.

    Args:
      encoding: a value that is resolved for `dims`.
      params: its arrays in one layer.
      dims: the sizes of the model.
      form: a key of CODE_FORMS.
      length: tokens of the longest text.
      arrays: the origin of `params`, for the head of the file.

    Raises:
      ConfigError: a hook cannot be written, or the encoding is not defined for so many tokens.
    """
    words, tables = read_tables(encoding, params, dims, length)
    resolved, d = encoding.at_length(length), dims.head_dim
    facts = {
        "Encoding": str(resolved),
        "Source": encoding.about.paper or "none",
        "Shapes": f"q [b, h, t, {d}], k and v [b, g, t, {d}] with g dividing h.",
        "Positions": f"whole numbers from 0 to {length - 1}, [t] or [b, t]. Others raise ValueError.",
        "Frequencies": f"those of a text of {length} tokens." * (resolved != encoding.at_length(length - 1)),
        "Arrays": arrays if params else "",
        "Masks": "causal ones alone. No query may see a later key." if encoding.causal_only else "any.",
    }
    functions = {CHECK: True, ROTATE: "frequencies" in tables}
    if form == "torch-flex":
        facts["Positions"] += " Here they are the indices of q and k."
        functions[FLEX] = True
    else:
        functions |= {BIAS: bool(tables.keys() & {"slopes", "biases"}), SCALE: "scales" in tables, ATTENTION: True}
    words |= CODE_FORMS[form] | {
        "length": str(length),
        "title": _wrap(f"{spec_text(encoding)} for {CODE_FORMS[form]['library']}, written by posx {posx.__version__}."),
        "facts": "\n".join(_wrap(f"{name}: {text}") for name, text in facts.items() if text),
    }  # fmt: skip
    texts = [_table_text(encoding, name, table) for name, table in tables.items()]
    templates = [HEADER, *texts, *(function for function, is_needed in functions.items() if is_needed)]
    lines = [line.partition(TAG) for template in templates for line in template.splitlines()]
    tags = {form, words["layout"], *tables}
    kept = [line for line, _, needed in lines if not needed or tags & set(needed.split("|"))]
    return string.Template("\n".join(kept)).substitute(words) + "\n"


def read_tables(
    encoding: Encoding, params: Params, dims: Dims, length: int
) -> tuple[dict[str, str], dict[str, np.ndarray]]:
    """Return words and tables of an encoding for texts of up to `length` tokens. Arguments are of `write_snippet`.

    The words complete templates. The tables are float64: "frequencies" [1 or g, c] in radians per token, "slopes"
    [h or 1, 1] or "biases" [h or 1, n] in nats, and "scales" [h or 1, n].

    Raises:
      ConfigError: as `write_snippet`.
    """
    encoding = encoding.at_length(length)
    for part in walk_chain(encoding):
        if hook := refused_hook(part, dims):
            raise ConfigError(
                f"{encoding_name(part)}: its hook {hook} cannot be written as a table of numbers. Give rope, biases by "
                "distance, logit scales by position, or a chain of these. For a formula alone, give --as=latex."
            )
    most = min(MOST_TOKENS, MOST_TOKENS if encoding.max_position is None else encoding.max_position + 1)
    if not 2 <= length <= most:
        raise ConfigError(f"--length={length}: for {encoding_name(encoding)} it must be from 2 to {most:,}.")
    words, tables = _rotation(encoding, dims)
    with jax.enable_x64(True):
        wide = {name: jnp.asarray(np.asarray(array), jnp.float64) for name, array in params.items()}
        if encoding.acts_on("by_distance"):
            bias = encoding.by_distance(wide, jnp.arange(1 - length, length, dtype=jnp.int32)).bias
            words["row"], name, table = _shorten_bias(_finite(bias), encoding.causal_only)
            tables[name], words["bias_head"] = table, "h" if len(table) > 1 else "0"
        if encoding.acts_on("logit_scale"):
            table = _finite(encoding.logit_scale(wide, jnp.arange(length, dtype=jnp.int32), {}))
            words |= {"last": str(_first_constant(table)), "scale_head": "h" if len(table) > 1 else "0"}
            tables["scales"] = table[:, : _first_constant(table) + 1]
    if (size := max((table.size for table in tables.values()), default=0)) > MOST_NUMBERS:
        raise ConfigError(f"--length={length}: a table would have {size:,} numbers. Give a shorter length.")
    return words, tables


def refused_hook(part: Encoding, dims: Dims) -> str:
    """Return the first hook of a part that tables cannot hold, or "" if they can hold all."""
    hooks = acting_hooks(part)
    terms = distance_terms(part, abstract_params(part, dims)).keys() - {"bias"}
    return next(iter([
        *(hook for hook in hooks if hook not in WRITABLE),
        *(hook for hook in hooks if hook in ("query", "key") and not isinstance(part, Rope)),
        *(f"by_distance, term {name}," for name in sorted(terms)),
    ]), "")  # fmt: skip


def _rotation(encoding: Encoding, dims: Dims) -> tuple[dict[str, str], dict[str, np.ndarray]]:
    """Return words and table of a rotation, if there is one. Angles of several rotations of the same planes add up."""
    ropes: list[Any] = [part for part in walk_chain(encoding) if isinstance(part, Rope)]
    if not ropes:
        return {"layout": ""}, {}
    if len({(rope.layout, rope.rotary_dim) for rope in ropes}) > 1:
        raise ConfigError(f"{encoding_name(encoding)}: the hook query of two parts rotates different planes.")
    each = [np.atleast_2d(rope.frequencies.checked(rope.base, rope.rotary_dim)) for rope in ropes]
    table = functools.reduce(np.add, each)
    sizes = dims.head_dim, table.shape[1], math.prod(rope.frequencies.magnitude for rope in ropes)
    return {"layout": ropes[0].layout, "rotation": ", ".join(map(repr, sizes))}, {"frequencies": table}


def _finite(values: Any) -> np.ndarray:
    """Return numbers with a very low one for -inf, as `attend` reads it. Raises ConfigError for NaN.

    One row stands for all if they are equal.
    """
    table = np.maximum(np.asarray(values), np.finfo(np.float32).min / 2) + 0.0  # no -0
    if not np.isfinite(table).all():
        raise ConfigError("a hook returns NaN or infinity at these positions. Give a shorter --length.")
    return table[:1] if (table == table[:1]).all() else table


def _shorten_bias(bias: np.ndarray, causal_only: bool) -> tuple[str, str, np.ndarray]:
    """Return a bias [h, 2n - 1] at distances 1 - n to n - 1 in few numbers: expression of a column, name, table."""
    n = (bias.shape[1] + 1) // 2
    behind, ahead = bias[:, n - 1 :], bias[:, n - 1 :: -1]
    last, slopes = _first_constant(behind), -behind[:, 1:2]
    if not causal_only and not np.array_equal(ahead, behind):
        last = max(last, _first_constant(ahead))
        return f"r.clip({-last}, {last}) + {last}", "biases", bias[:, n - 1 - last : n + last]
    if np.allclose(behind, -slopes * np.arange(n), rtol=1e-12, atol=0):
        return "", "slopes", slopes
    return f"r.clip(0, {last})" if causal_only else f"abs(r).clip(max={last})", "biases", behind[:, : last + 1]


def _first_constant(table: np.ndarray) -> int:
    """Return the first column of a table [h, n] that equals all later ones."""
    other = np.flatnonzero((table != table[:, -1:]).any(axis=0))
    return int(other[-1]) + 1 if other.size else 0


#: The hook behind each table, its comment, and its digits.
TABLES = {
    "frequencies": ("query", "Radians per token of each plane, a row for each key head or one for all.", 17),
    "slopes": ("by_distance", "Nats per token, a row for each head or one for all.", 17),
    "biases": ("by_distance", "Nats by distance, a row for each head or one for all.", 10),
    "scales": ("logit_scale", "Factors by position, a row for each head or one for all.", 10),
}


def _table_text(encoding: Encoding, name: str, table: np.ndarray) -> str:
    """Return a table as a template of code, below the formulas of the parts that it is made of."""
    hook, comment, digits = TABLES[name]
    parts: list[Any] = [part for part in walk_chain(encoding) if part.acts_on(hook)]
    formulas = [_formula(part.frequencies if hook == "query" else part).replace("$", "$$") for part in parts]
    lines = [_wrap(text, "# ", "# ") for text in (comment, *formulas)]
    if hook == "query":
        lines = ["HEAD_DIM, PLANES, MAGNITUDE = $rotation", *lines]
    rows = [
        _wrap(", ".join(repr(float(f"{x:.{digits}g}")) for x in row), "        [", "         ") + "]," for row in table
    ]
    end = f"    dtype={'$wide' if hook == 'query' else '$narrow'},"
    return "\n".join([*lines, f"{name.upper()} = $array(", "    [", *rows, "    ],", end, ")  # fmt: skip"])


def _formula(value: Any) -> str:
    """Return the first paragraph of a class's docstring as one line, and a formula that it announces."""
    paragraphs = (inspect.getdoc(type(value)) or "").split("\n\n")
    return " ".join(" ".join(paragraphs[: 2 if paragraphs[0].endswith(":") else 1]).split())


def _wrap(text: str, first: str = "", later: str = "  ") -> str:
    wrapper = textwrap.TextWrapper(116, first, later, break_on_hyphens=False, break_long_words=False)
    return wrapper.fill(text)


def latex_text(encoding: Encoding) -> str:
    """Return the formula of each part of an encoding as LaTeX, with symbols and resolved fields in comments.

    Raises ConfigError for a class that is not posx's, whose formula only its docstring has.
    """
    package = Path(posx.__file__).parent  # a wheel has the file inside, a clone in docs/
    inside = package / "encodings.toml"
    file = inside if inside.is_file() else package.parent / "docs" / "encodings.toml"
    texts = tomllib.loads(file.read_text(encoding="utf-8"))
    blocks = [f"% {spec_text(encoding)} in LaTeX with amsmath, written by posx {posx.__version__}."]
    for part in walk_chain(encoding):
        if (name := encoding_name(part)) not in ENCODINGS:
            raise ConfigError(f"{name} has no formula in LaTeX, because it is a class of your own.")
        rules = [rule for rule in walk_values(part) if isinstance(rule, FrequencyRule) and rule != Geometric()]
        symbols = texts[name]["symbols"].strip().removeprefix("- ").split("\n- ")
        facts = [f"{texts[name]['title']}: {part}", f"Source: {part.about.paper}", *symbols]
        facts += [f"{encoding_name(rule)}: {_formula(rule)}" for rule in rules]
        comments = (_wrap(" ".join(fact.split()), "% ", "%   ") for fact in facts)
        blocks += ["\n".join([*comments, "\\[", texts[name]["formula"].strip(), "\\]"])]
    return "\n\n".join(blocks) + "\n"
