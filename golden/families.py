"""The encodings with vectors: a name, its settings, the source of its formula, and the learned arrays of its cases."""

from golden import families_content, families_rotary
from golden.family import CONTENT, FAR, HEAD_DIM, MODEL_DIM, NUM_HEADS, TEXT, Family, value


def alibi(heads):
    """Return ALiBi with a number of heads as a family."""
    power = heads & (heads - 1) == 0
    return Family(
        value("alibi", num_heads=heads, scale="linear"),
        "s_ij = q_i . k_j / sqrt(d) - slope_h |i - j|. See `constants`.",
        "Press, Smith and Lewis 2022, arXiv 2108.12409, section 3; fairseq `get_slopes`",
        "slopes off by one exponent, or divided by sqrt(d)" if power else "slopes of a number that is no power of two",
        "attention-gym has 2^(-8(h+1)/H) for every number of heads H. Falcon adds before the scale. BLOOM adds slope "
        "times the key's index: equal after softmax, imprecise in bfloat16.",
        heads=heads,
        head_dim=4,
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


TRANSFORMER_XL = {"u": (NUM_HEADS, HEAD_DIM), "v": (NUM_HEADS, HEAD_DIM), "w_r": (MODEL_DIM, NUM_HEADS, HEAD_DIM)}
FIRE = {"c": (), "multiplier": (), "w0": (1, 4), "b0": (4,), "w1": (4, NUM_HEADS)}
TUPE = {
    "table": (16, MODEL_DIM), "norm_scale": (MODEL_DIM,), "norm_bias": (MODEL_DIM,), "theta": (2, NUM_HEADS),
    "u_q": (MODEL_DIM, NUM_HEADS, HEAD_DIM), "u_k": (MODEL_DIM, NUM_HEADS, HEAD_DIM),
}  # fmt: skip
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
        reads="x",
        without=EMBEDDED,
    )


FAMILIES = {
    **families_rotary.FAMILIES,
    **families_content.FAMILIES,
    "nope": Family(
        value("nope"),
        "s_ij = q_i . k_j / sqrt(d).",
        "Haviv et al. 2022, arXiv 2203.16634; Kazemnejad et al. 2023, arXiv 2305.19466",
        "no division by sqrt(d)",
        without=FAR,
    ),
    "sinusoidal": sinusoidal("interleaved", "2c/m"),
    "sinusoidal_concatenated": sinusoidal("concatenated", "c/(m/2-1)"),
    "learned": Family(
        value("learned", num_positions=16, beyond="error"),
        "outputs = x + table[p].",
        "Gehring et al. 2017, arXiv 1705.03122; Radford et al. 2019 (GPT-2)",
        "rows counted from 1, or from padding_idx + 1",
        "BART and OPT have two rows before that of position 0. RoBERTa counts from padding_idx + 1.",
        {"table": (16, MODEL_DIM)},
        reads="x",
        without=(*EMBEDDED, *FAR),
    ),
    "tupe": Family(
        value("tupe", num_positions=16, beyond="error", untied=(0,)),
        "s_ij = (q_i . k_j + (a_i u_q) . (a_j u_k)) / sqrt(2 d), a_p = norm_scale LayerNorm(table[p]) + norm_bias, "
        "with 1e-5 added to the variance. theta[0, h] stands for the second product and its scale if i = 0, else "
        "theta[1, h] if j = 0.",
        "Ke, He and Liu 2021, arXiv 2006.15595, equations 7, 8 and 10",
        "the scale of one product; theta scaled too; theta of queries and keys exchanged",
        "The released code gives u_q and u_k bias vectors, and takes theta from two spare rows of the table.",
        TUPE,
        scale=0.5,
        without=(*FAR, "grouped"),
    ),
    **{f"alibi_{heads}": alibi(heads) for heads in (4, 6, 8, 12)},
    "alibi_log": Family(
        value("alibi", num_heads=4, scale="log"),
        "s_ij = q_i . k_j / sqrt(d) - slope_h ln(1 + |i - j|). See `constants`.",
        "arXiv 2608.03994",
        "ln |i - j|, which is infinite at a token's own key; log2",
        "KERPLE learns p and a of -p ln(1 + a |i - j|).",
        heads=4,
        head_dim=4,
        without=(),
    ),
    "axial_alibi": Family(
        value("axial", inner=value("alibi", num_heads=NUM_HEADS, scale="linear"), num_axes=2),
        "s_ij = q_i . k_j / sqrt(d) - slope_h (|row_i - row_j| + |column_i - column_j|), with slopes 1/16 and 1/256.",
        "Press, Smith and Lewis 2022, arXiv 2108.12409, section 3, on each axis",
        "the distance of one axis; the Euclidean distance",
        "CROMA's ALiBi of images has Euclidean distances.",
        without=TEXT,
        axes=2,
    ),
    "axial_sinusoidal": Family(
        value("axial", inner=sinusoidal("concatenated", "2c/m").encoding, num_axes=2),
        "As sinusoidal_concatenated in each half of the channels, with the exponent 2c/m and the m of a half. The "
        "first half reads the row of a position, the second the column.",
        "He et al. 2022, arXiv 2111.06377 (MAE), `get_2d_sincos_pos_embed`",
        "one position for both halves; frequencies of the whole width",
        "MAE's first half has the column.",
        reads="x",
        without=(*TEXT, *EMBEDDED[2:4]),
        axes=2,
    ),
    "axial_learned": Family(
        value("axial", inner=value("learned", num_positions=4, beyond="error"), num_axes=2),
        "outputs = x + [table_0[row], table_1[column]], half of the channels each.",
        "Dosovitskiy et al. 2021, arXiv 2010.11929, appendix D.4",
        "one table for both axes",
        "Released vision transformers have a table of all patches.",
        {"0.table": (4, MODEL_DIM // 2), "1.table": (4, MODEL_DIM // 2)},
        reads="x",
        without=(*TEXT, *EMBEDDED[2:4]),
        axes=2,
    ),
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
        positive=("p", "a"),
    ),
    "kerple_power": Family(
        value("kerple", form="power"),
        "s_ij = q_i . k_j / sqrt(d) - a_h |i - j|^p_h.",
        "Chi et al. 2022, arXiv 2205.09921",
        "p and a exchanged",
        "The authors' code clips the stored p and a to their bounds before each step.",
        {"p": (NUM_HEADS,), "a": (NUM_HEADS,)},
        positive=("p", "a"),
    ),
    "fire": Family(
        value("fire", threshold=4.0, width=4),
        "s_ij = q_i . k_j / sqrt(d) + f(psi(i - j) / (psi(max(i, T)) + 1e-6))_h, psi(x) = ln(1 + |c| x), "
        "T = max(1, |multiplier| threshold), f(y) = relu(y w0 + b0) w1.",
        "Li et al. 2024, arXiv 2310.04418; the 1e-6 as in the code of its appendix",
        "the key's position, or the length of the text, in place of the query's",
        "DAPE's port needs all queries at once to score one.",
        FIRE,
        positive=("c", "multiplier"),
    ),
    "bam": Family(
        value("bam", learned=("shape", "scale", "loc"), shapes=(1.0, 1.0), initial_scale=0.0, num_heads=NUM_HEADS),
        "s_ij = q_i . k_j / sqrt(d) - e^scale_h (|i - j + c_h| + 1e-5)^shape_h, c_h = e^loc_h - e^-loc_h.",
        "Bianchessi et al. 2025, arXiv 2505.22842, GGD-BAM; models/bam.py as released in May 2025",
        "the sign of c; scale in place of e^scale; the 1e-5 left out",
        "Revisions of the code until March 2025 have scale in place of e^scale, inside the power.",
        dict.fromkeys(("shape", "scale", "loc"), (NUM_HEADS,)),
        positive=("shape",),
        without=(),
    ),
    "dynamic_bias": Family(
        value("dynamic_bias", width=4, depth=2, log_distance=True),
        "s_ij = q_i . k_j / sqrt(d) + f(sign(i - j) ln(1 + |i - j|))_h, f(y) = silu(silu(y w0 + b0) w1 + b1) w2.",
        "Wang et al. 2022 (CrossFormer), arXiv 2108.00154; the logarithm is Swin V2's, arXiv 2111.09883",
        "j - i in place of i - j; no logarithm; relu in place of silu",
        "x-transformers reads i - j by default. Its last layer has a bias, which changes no softmax. CrossFormer "
        "normalises hidden layers.",
        {"w0": (1, 4), "b0": (4,), "w1": (4, 4), "b1": (4,), "w2": (4, NUM_HEADS)},
        without=(),
    ),
    "nape": Family(
        value("nape", slopes="linear", alibi_heads=1),
        "s_ij = q_i . k_j / sqrt(d) - m_h |i - j|, m_h = 1, 1/2, 1/3 ... in the first half of the heads, else 0.",
        "Vasylenko et al. 2025, arXiv 2506.16640; the released sparse_gemma.py",
        "ALiBi's slopes; slopes in the last heads",
        without=(),
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
        "Ministral 3 has floor(i / 4). transformers 5.24.0 counts padding, and counts on in packed documents.",
    ),
    "log_length": Family(
        value("log_length", train_len=4),
        "s_ij = max(1, ln(i + 1) / ln 4) q_i . k_j / sqrt(d).",
        "Chiang and Cholak 2022, arXiv 2202.12172; Qwen's use_logn_attn",
        "the length of the text, or of the cache, in place of i + 1",
    ),
    "ssmax": Family(
        value("ssmax", plain_heads=0),
        "s_ij = s_h ln(i + 1) q_i . k_j / sqrt(d).",
        "Nakanishi 2025, arXiv 2501.19399",
        "the length of the text, or of the cache, in place of i + 1; ln(i)",
        "deep-spin/asentmax reads ln(i + 2).",
        {"s": (NUM_HEADS,)},
    ),
}
