"""The encodings with vectors: a name, its settings, the source of its formula, and the learned arrays of its cases."""

import dataclasses
from typing import Any

import numpy as np

#: Channels of a head and of a token, and query heads, in all families but those of ALiBi.
HEAD_DIM, MODEL_DIM, NUM_HEADS = 8, 16, 2


def value(name, **fields):
    """Return an object of a class with this name that has these attributes, as the references read an encoding."""
    return type(name.replace("_", ""), (), {"name": name, "fields": fields, **fields})()


def spec(given):
    """Return a value as text: rope(base=10000.0, frequencies=yarn(factor=4.0))."""
    if hasattr(given, "fields"):
        return f"{given.name}({', '.join(f'{name}={spec(each)}' for name, each in given.fields.items())})"
    if isinstance(given, tuple):
        return f"({', '.join(map(spec, given))})"
    return f"'{given}'" if isinstance(given, str) and not given.isidentifier() else str(given)


@dataclasses.dataclass(frozen=True)
class Family:
    """One encoding with all its settings.

    Attributes:
      encoding: the settings, see `value`.
      formula: the logits s_ij of query i and key j, or the vectors.
      source: the paper and its equation.
      catches: the faults that only this family shows.
      differs: released code that computes something else.
      arrays: shapes of learned arrays by name.
      heads: query heads.
      without: kinds of case that this family lacks.
      bidirectional: whether queries see later keys, in all cases without a window.
    """

    encoding: Any
    formula: str
    source: str
    catches: str
    differs: str = ""
    arrays: dict[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    heads: int = NUM_HEADS
    without: tuple[str, ...] = ("both_sides",)
    bidirectional: bool = False

    @property
    def head_dim(self):
        """The channels of a head."""
        return HEAD_DIM if self.heads == NUM_HEADS else 4


def rope(catches, rule=None, source="Su et al. 2021, arXiv 2104.09864, equations 15 and 34", differs="", **fields):
    """Return RoPE as a family, with other fields or another rule of frequencies."""
    rule = rule or value("geometric")
    settings = {"base": 10000.0, "layout": "half_split", "rotary_dim": HEAD_DIM, **fields, "frequencies": rule}
    planes = "(2c, 2c+1)" if settings["layout"] == "interleaved" else f"(c, c+{settings['rotary_dim'] // 2})"
    formula = (
        "s_ij = (R_i q_i) . (R_j k_j) / sqrt(d). R_p rotates plane c by p theta_c, and multiplies it by the attention "
        f"factor. Plane c has channels {planes}. See `constants`."
    )
    differs = differs or "x-transformers rotates only half of the head by default."
    return Family(value("rope", **settings), formula, source, catches, differs, without=())


def alibi(heads):
    """Return ALiBi with a number of heads as a family."""
    power = heads & (heads - 1) == 0
    return Family(
        value("alibi", num_heads=heads),
        "s_ij = q_i . k_j / sqrt(d) - slope_h |i - j|. See `constants`.",
        "Press, Smith and Lewis 2022, arXiv 2108.12409, section 3; fairseq `get_slopes`",
        "slopes off by one exponent, or divided by sqrt(d)" if power else "slopes of a number that is no power of two",
        "attention-gym has 2^(-8(h+1)/H) for every number of heads H. Falcon adds before the scale. BLOOM adds slope "
        "times the key's index: equal after softmax, imprecise in bfloat16.",
        heads=heads,
        without=(),
    )


def t5(catches, bidirectional=False):
    """Return T5's bias as a family."""
    fields = {"num_buckets": 32, "max_distance": 128, "bidirectional": bidirectional, "scaled": True}
    return Family(
        value("t5", **fields),
        "s_ij = q_i . k_j / sqrt(d) + table[bucket(i - j), h].",
        "Raffel et al. 2020, arXiv 1910.10683, section 2.1; buckets of Mesh TensorFlow",
        catches,
        "T5 itself has no 1/sqrt(d). GPT-NeoX and x-transformers multiply the table by sqrt(d).",
        {"table": (32, NUM_HEADS)},
        without=() if bidirectional else ("both_sides",),
        bidirectional=bidirectional,
    )


PENG, HF = "Peng et al. 2023, arXiv 2309.00071", "of Hugging Face transformers"
LONGROPE = {
    "short_factors": (1.0, 1.0, 1.25, 1.5), "long_factors": (1.0, 1.5, 3.0, 6.0), "factor": 4.0,
}  # fmt: skip
TRANSFORMER_XL = {"u": (NUM_HEADS, HEAD_DIM), "v": (NUM_HEADS, HEAD_DIM), "w_r": (MODEL_DIM, NUM_HEADS, HEAD_DIM)}
FIRE = {"c": (), "multiplier": (), "w0": (1, 4), "b0": (4,), "w1": (4, NUM_HEADS)}
ROPE = value("rope", base=10000.0, layout="half_split", rotary_dim=HEAD_DIM)
CONTENT = ("offset_4096", "offset_2_24", "far", "both_sides")  # kinds of case about positions, which it does not read
EMBEDDED = ("window", "window_sinks", "grouped", "both_sides", "packed")


def sinusoidal(layout, exponent):
    """Return sinusoidal vectors as a family."""
    power = "c/(m/2-1)" if exponent == "c/(m/2-1)" else "2c/m"
    order = "(2c, 2c+1)" if layout == "interleaved" else "(c, c + m/2)"
    return Family(
        value("sinusoidal", base=10000.0, layout=layout, exponent=exponent),
        f"outputs = x + PE(p), PE has sin(p w_c) and cos(p w_c) in channels {order}, w_c = base^(-{power}).",
        "Vaswani et al. 2017, arXiv 1706.03762, section 3.5; the other exponent is that of tensor2tensor",
        "the other layout, or the other exponent",
        "fairseq and XGLM start at position padding_idx + 1.",
        without=EMBEDDED,
    )


FAMILIES = {
    "rope": rope("planes of interleaved channels; the sign of the distance"),
    "rope_interleaved": rope("planes of split halves", layout="interleaved"),
    "rope_partial": rope("all channels rotated; the exponent counts all channels", rotary_dim=4),
    "rope_base": rope("the base reset to 10,000", base=500000.0),
    "rope_linear": rope(
        "positions not divided by the factor", value("linear", factor=4.0), "Chen et al. 2023, arXiv 2306.15595"
    ),
    "rope_ntk": rope(
        "the exponent d/(d-2) left out", value("ntk", factor=4.0), f'bloc97 2023, "NTK-aware scaled RoPE"; {PENG}, 3.1'
    ),
    "rope_dynamic_ntk": rope(
        "the factor not that of the text's length, 16",
        value("dynamic_ntk", factor=2.0, original_len=8, length=16),
        f'emozilla 2023; "dynamic" {HF}',
        "Hugging Face caches keys that were rotated at shorter lengths.",
    ),
    "rope_yarn": rope(
        "the attention factor lost; it acts on queries and on keys",
        value("yarn", factor=4.0, original_len=64, slow=1.0, fast=32.0),
        f'{PENG}, sections 3.3 and 3.4; "yarn" {HF}, whose ramp counts planes',
        "The paper's ramp counts turns. Levanter divides twice. MaxText leaves the attention factor off by default.",
    ),
    "rope_llama3": rope(
        "the smooth part between the two wavelengths",
        value("llama3", factor=8.0, original_len=64, low_freq_factor=1.0, high_freq_factor=4.0),
        f'Llama 3 team 2024, arXiv 2407.21783; "llama3" {HF}',
        base=500000.0,
    ),
    "rope_longrope_short": rope(
        "the long factors in a short text",
        value("longrope", **LONGROPE, original_len=16, length=16),
        f'Ding et al. 2024, arXiv 2402.13753; "longrope" {HF}',
    ),
    "rope_longrope_long": rope(
        "the short factors in a long text",
        value("longrope", **LONGROPE, original_len=16, length=17),
        f'Ding et al. 2024, arXiv 2402.13753; "longrope" {HF}',
        "Hugging Face caches keys that were rotated with the short factors.",
    ),
    "mrope": Family(
        value("mrope", base=16.0, sections=(2, 1, 1), order="contiguous", layout="half_split"),
        "As rope, half split. The planes of each section read one of the positions (time, height, width).",
        "Qwen2-VL, Wang et al. 2024, arXiv 2409.12191, section 2.1",
        "one position for all three; sections in another order",
        "Qwen3-VL interleaves the sections.",
        without=("left_padding", "padded_step", "window", "window_sinks", "packed", *CONTENT),
    ),
    "sinusoidal": sinusoidal("interleaved", "2c/m"),
    "sinusoidal_concatenated": sinusoidal("concatenated", "c/(m/2-1)"),
    **{f"alibi_{heads}": alibi(heads) for heads in (4, 6, 8, 12)},
    "t5": t5("later keys not in bucket 0; edges of the logarithmic buckets"),
    "t5_bidirectional": t5("sides exchanged; edges of the logarithmic buckets", bidirectional=True),
    "shaw": Family(
        value("shaw", max_distance=4, values=True),
        "s_ij = q_i . (k_j + keys[m]) / sqrt(d), o_i = sum_j w_ij (v_j + values[m]), m = clip(j - i, -4, 4) + 4.",
        "Shaw, Uszkoreit and Vaswani 2018, arXiv 1803.02155, equations 3 and 4",
        "i - j in place of j - i; no clip; values without their vectors",
        arrays={"keys": (9, HEAD_DIM), "values": (9, HEAD_DIM)},
        without=(),
    ),
    "transformer_xl": Family(
        value("transformer_xl", base=10000.0, clamp_len=0),
        "s_ij = ((q_i + u) . k_j + (q_i + v) . (w_r R_{i-j})) / sqrt(d), R_r = [sin r w | cos r w], "
        "w_c = base^(-2c/m).",
        "Dai et al. 2019, arXiv 1901.02860, section 3.3",
        "u and v exchanged; sines and cosines interleaved; the shift of the table off by one",
        "DeepMind's causal version reads the table in the wrong order. McGill's lacks 1/sqrt(d).",
        TRANSFORMER_XL,
        without=(),
    ),
    "kerple_log": Family(
        value("kerple", form="log"),
        "s_ij = q_i . k_j / sqrt(d) - p_h ln(1 + a_h |i - j|).",
        "Chi et al. 2022, arXiv 2205.09921",
        "p and a exchanged",
        "NeMo learns -b ln(1 + a |r|^p).",
        {"p": (NUM_HEADS,), "a": (NUM_HEADS,)},
    ),
    "kerple_power": Family(
        value("kerple", form="power"),
        "s_ij = q_i . k_j / sqrt(d) - a_h |i - j|^p_h.",
        "Chi et al. 2022, arXiv 2205.09921",
        "p and a exchanged",
        arrays={"p": (NUM_HEADS,), "a": (NUM_HEADS,)},
    ),
    "fire": Family(
        value("fire", threshold=4.0, width=4),
        "s_ij = q_i . k_j / sqrt(d) + f(psi(i - j) / (psi(max(i, T)) + 1e-6))_h, psi(x) = ln(1 + |c| x), "
        "T = max(1, |multiplier| threshold), f(y) = relu(y w0 + b0) w1.",
        "Li et al. 2024, arXiv 2310.04418; the 1e-6 as in the code of its appendix",
        "the key's position, or the length of the text, in place of the query's",
        "DAPE's port needs all queries at once to score one.",
        FIRE,
    ),
    "xpos": Family(
        value("xpos", rope=ROPE, scale_base=8.0),
        "As rope, plane c times zeta_c^((i - j) / scale_base), zeta_c = (2c/d + 0.4) / 1.4.",
        "Sun et al. 2022, arXiv 2212.10554, section 3.2",
        "the inverse power on the wrong side; overflow far from the centre",
        "Other code takes powers about the middle of the current text. A cache with another centre is wrong.",
    ),
    "fox": Family(
        value("fox", gate="forget", gate_scale=1.0),
        "s_ij = q_i . k_j / sqrt(d) + sum of log sigmoid(x_l w + b)_h over visible tokens l = j+1 .. i.",
        "Lin et al. 2025, arXiv 2503.02130, section 3",
        "the gate of the key itself counted, or that of the query left out",
        "x-transformers sums the gates of new tokens only when it decodes with a cache.",
        {"w": (MODEL_DIM, NUM_HEADS), "b": (NUM_HEADS,)},
        without=("window_sinks", *CONTENT),
    ),
    "cope": Family(
        value("cope", num_positions=4, scaled=True),
        "s_ij = q_i . (k_j + e[p_ij]) / sqrt(d), p_ij = min(3, sum of sigmoid(q_i . k_l / sqrt(d)) over l = j .. i); "
        "e between whole positions is interpolated linearly.",
        "Golovneva et al. 2024, arXiv 2405.18719, section 4; q . e divided as in the release",
        "gates summed from the first key; the gate of key j left out",
        "The listing in the paper's appendix and x-transformers do not divide q . e by sqrt(d).",
        {"table": (4, HEAD_DIM)},
        without=CONTENT,
    ),
    "sandwich": Family(
        value("sandwich", width=16, first=0, base=10000.0, num_heads=NUM_HEADS),
        "s_ij = q_i . k_j / sqrt(d) + H / (8 h) sum_c (cos((i - j) w_c) - 1), w_c = base^(-2c/16), heads h = 1 .. H.",
        "Chi et al. 2023, arXiv 2212.10356, code of appendix E",
        "frequencies counted from 1; heads counted from 0",
        "NeMo counts frequencies from 1.",
        without=(),
    ),
    "deberta": Family(
        value("deberta", max_distance=4, terms=("c2p", "p2c"), release_index=False, log_buckets=0),
        "s_ij = (q_i . k_j + q_i . (table[D(i - j)] w_k) + k_j . (table[D(j - i)] w_q)) / sqrt(3 d), "
        "D(r) = min(max(r + 4, 0), 7).",
        "He et al. 2021, arXiv 2006.03654, equations 2 to 4",
        "the scale of three terms; D(i - j) for keys too",
        "The authors' code and Hugging Face read D(i - j) for keys too.",
        {"table": (8, MODEL_DIM), "w_k": (MODEL_DIM, NUM_HEADS, HEAD_DIM), "w_q": (MODEL_DIM, NUM_HEADS, HEAD_DIM)},
        without=(),
    ),
    "learned_sinks": Family(
        value("learned_sinks"),
        "w_ij = exp(s_ij) / (exp(z_h) + sum_j exp(s_ij)), s_ij = q_i . k_j / sqrt(d).",
        "gpt-oss, OpenAI 2025, arXiv 2508.10925",
        "the sink left out; z divided by sqrt(d); a value for it",
        arrays={"z": (NUM_HEADS,)},
        without=CONTENT,
    ),
    "llama4_temperature": Family(
        value("llama4_temperature", attn_scale=0.1, floor_scale=4),
        "s_ij = (1 + 0.1 ln(1 + floor((i + 1) / 4))) q_i . k_j / sqrt(d).",
        "Llama 4 in Hugging Face transformers, layers without RoPE",
        "the step one token late",
        "Ministral 3 has floor(i / 4).",
    ),
    "log_length": Family(
        value("log_length", train_len=4),
        "s_ij = max(1, ln(i + 1) / ln 4) q_i . k_j / sqrt(d).",
        "Chiang and Cholak 2022, arXiv 2202.12172; Qwen's use_logn_attn",
        "the length of the text, or of the cache, in place of i + 1",
    ),
}


def draw(family, rng):
    """Return the learned arrays of a family: multiples of 1/32, which bfloat16 holds exactly."""
    arrays = {name: grid(rng, *shape) for name, shape in family.arrays.items()}
    if family.encoding.name in ("kerple", "fire"):
        return {name: np.abs(array) + 0.25 if name in ("p", "a", "c", "multiplier") else array
                for name, array in arrays.items()}  # fmt: skip
    return arrays


def grid(rng, *shape):
    """Return normal numbers, rounded to multiples of 1/32 below 4."""
    return np.clip(np.round(rng.standard_normal(shape) * 32), -127, 127) / 32
