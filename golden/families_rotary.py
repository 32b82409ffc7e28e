"""The families of RoPE, of the rules for its frequencies, and of other encodings that rotate."""

from golden.family import CONTENT, HEAD_DIM, MODEL_DIM, NUM_HEADS, TEXT, Family, value

SU = "Su et al. 2021, arXiv 2104.09864, equations 15 and 34"
PENG, HF = "Peng et al. 2023, arXiv 2309.00071", "of Hugging Face transformers"
LONGROPE = {
    "short_factors": (1.0, 1.0, 1.25, 1.5), "long_factors": (1.0, 1.5, 3.0, 6.0), "factor": 4.0,
}  # fmt: skip
ROPE = value("rope", base=10000.0, layout="half_split", rotary_dim=HEAD_DIM, frequencies=value("geometric"))


def rope(catches, rule=None, source=SU, differs="", without=(), **fields):
    """Return RoPE as a family, with other fields or another rule of frequencies."""
    rule = rule or value("geometric")
    settings = {"base": 10000.0, "layout": "half_split", "rotary_dim": HEAD_DIM, **fields, "frequencies": rule}
    planes = "(2c, 2c+1)" if settings["layout"] == "interleaved" else f"(c, c+{settings['rotary_dim'] // 2})"
    formula = (
        "s_ij = (R_i q_i) . (R_j k_j) / sqrt(d). R_p rotates plane c by p theta_c, and multiplies it by the attention "
        f"factor. Plane c has channels {planes}. See `constants`."
    )
    differs = differs or "x-transformers rotates only half of the head by default."
    return Family(value("rope", **settings), formula, source, catches, differs, without=without)


def fope(dropped, differs):
    """Return FoPE with matrices that are inputs as a family, with one or another form of the last plane."""
    last = "1" if dropped == "doubled" else "0 and 1"
    return Family(
        value("fope", base=50.0, original_len=64, dropped=dropped, learned=True, num_kv_heads=4),
        "As rope, half split, with sin_f(p) = sum_n sin(p theta_n) sin[h, n, f] and cos_f(p) = sum_n cos(p theta_n) "
        f"cos[h, n, f] in the first three planes, and {last} in the last, whose theta is below 2 pi / 64.",
        "Hua et al. 2025, arXiv 2412.17739; github.com/TsinghuaC3I/Fourier-Position-Embedding",
        "the transposed matrices; the last plane rotated",
        differs,
        {"sin": (4, 3, 3), "cos": (4, 3, 3)},
        scale=0.5,
        heads=4,
        without=("grouped",),
    )


def self_extend(group, source, catches):
    """Return Self-Extend with groups of some tokens as a family, or ReRoPE for 0."""
    far = "floor(i / 2) - floor(j / 2) + 2" if group else "3"
    return Family(
        value("self_extend", rope=ROPE, window=3, group=group),
        f"As rope at the distance i - j if it is below 3, else {far}.",
        source,
        f"{catches}; the window off by one",
        "Leaky ReRoPE has fractions in place of groups.",
        without=(),
    )


FAMILIES = {
    "rope": rope(
        "planes of interleaved channels; the sign of the distance",
        differs="x-transformers rotates only half of the head by default. rotary-embedding-torch 0.9.1 counts "
        "positions in the type of its input.",
    ),
    "rope_interleaved": rope("planes of split halves", layout="interleaved"),
    "rope_partial": rope("all channels rotated; the exponent counts all channels", rotary_dim=4),
    "rope_base": rope(
        "the base reset to 10,000",
        differs="Equinox 0.13.8 gives all modules of one width the base of the first.",
        base=500000.0,
    ),
    "rope_linear": rope(
        "positions not divided by the factor", value("linear", factor=4.0), "Chen et al. 2023, arXiv 2306.15595"
    ),
    "rope_ntk": rope(
        "the exponent d/(d-2) left out",
        value("ntk", factor=4.0),
        f'bloc97 2023, "NTK-aware scaled RoPE"; {PENG}, 3.1',
        "KerasHub 0.32.0 divides all frequencies by factor^(d/(d-2)).",
    ),
    "rope_ntk_by_parts": rope(
        "turns in the original length not counted, or counted in radians",
        value("ntk_by_parts", factor=4.0, original_len=64, slow=0.5, fast=8.0),
        f"{PENG}, section 3.2",
        base=100.0,
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
        "The paper's ramp counts turns. LitGPT 0.5.13 inverts the ramp. Levanter divides twice. MaxText leaves the "
        "attention factor off by default.",
    ),
    "rope_llama3": rope(
        "the smooth part between the two wavelengths",
        value("llama3", factor=8.0, original_len=512, low_freq_factor=1.0, high_freq_factor=4.0),
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
    "rope_proportional": rope(
        "frequencies spaced over the rotated planes alone, as in `rope_partial`",
        value("proportional", share=0.5, factor=2.0),
        f'p-RoPE, Barbero et al. 2024, arXiv 2410.06205; "proportional" {HF}',
        base=100.0,
    ),
    "rope_whole_turns": rope(
        "slow planes rotated",
        value("whole_turns", original_len=64),
        "HoPE, Chen et al. 2024, arXiv 2410.21216",
        base=100.0,
    ),
    "rope_clip": rope(
        "slow planes stopped at once in place of a fall along half a cosine",
        value("clip", planes=3, hard=False),
        "Li et al. 2026, arXiv 2602.05258; github.com/hrlics/CoPE",
    ),
    "rope_resonance": rope(
        "wavelengths that are no whole number of tokens",
        value("resonance", of=value("linear", factor=1.5)),
        "Wang et al. 2024, arXiv 2403.00071",
    ),
    "rope_mobius": rope(
        "all heads rotated alike",
        value("mobius", share=0.5, original_len=16, num_kv_heads=NUM_HEADS),
        "Möbius RoPE 2026, arXiv 2607.21405, read second hand",
        without=("grouped",),
    ),
    "rope_periodic": rope(
        "periods not taken in turn by the planes",
        value("periodic", periods=(5, 7, 3)),
        "Jerad et al. 2026, arXiv 2608.11909, definition 2.1",
        "The authors read rotations from a table at i mod m.",
    ),
    "mrope": Family(
        value("mrope", base=16.0, sections=(2, 1, 1), order="contiguous", layout="half_split"),
        "As rope, half split. The planes of each section read one of the positions (time, height, width).",
        "Qwen2-VL, Wang et al. 2024, arXiv 2409.12191, section 2.1",
        "one position for all three; sections in another order",
        "Qwen3-VL interleaves the sections.",
        without=(*TEXT, "both_sides"),
        axes=3,
    ),
    "axial_rope": Family(
        value("axial", inner=value("rope", **ROPE.fields | {"base": 100.0, "rotary_dim": HEAD_DIM // 2}), num_axes=2),
        "As rope in each half of the head. The first half reads the row of a position, the second the column.",
        "Heo et al. 2024, arXiv 2403.13298, section 3.2",
        "one position for both halves; the halves swapped",
        "Released vision transformers pair neighbouring channels.",
        without=TEXT,
        axes=2,
    ),
    "xpos": Family(
        value("xpos", rope=ROPE, scale_base=8.0),
        "As rope, plane c times zeta_c^((i - j) / scale_base), zeta_c = (2c/d + 0.4) / 1.4.",
        "Sun et al. 2022, arXiv 2212.10554, section 3.2",
        "the inverse power on the wrong side; overflow far from the centre",
        "Other code takes powers about the middle of the current text. With cached keys, rotary-embedding-torch 0.9.1 "
        "has two such centres.",
    ),
    "pope": Family(
        value("pope", base=10000.0),
        "s_ij = sum_c mu(q_ic) mu(k_jc) cos((j - i) base^(-c/d) + delta_hc) / sqrt(d), mu = softplus, delta clipped to "
        "[-2 pi, 0].",
        "Gopalakrishnan, Csordas, Schmidhuber and Mozer 2025, arXiv 2509.10534",
        "a frequency for each pair of channels; the sign of delta; no clip",
        "PoPE-pytorch can leave channels out, which then keep their sign and are not rotated.",
        {"delta": (NUM_HEADS, HEAD_DIM)},
        without=(),
    ),
    "fope": fope("doubled", "The release leaves at most d/4 planes. vLLM has sin = 0 and cos = 1 in the last plane."),
    "fope_plain": fope("plain", "The release has sin = cos = 1 in the last plane, which its authors confirm."),
    "self_extend": self_extend(2, "Jin et al. 2024, arXiv 2401.01325", "floor((i - j) / 2) in place of two floors"),
    "rerope": self_extend(0, "Su 2023, kexue.fm/archives/9708", "keys beyond the window left out"),
    "dual_chunk": Family(
        value("dual_chunk", rope=ROPE, chunk=3, window=5),
        "As rope at the distance P - j mod 3. P = i mod 3 if i and j are in one chunk of 3 tokens, min(i mod 3 + 3, 4) "
        "if j is in the chunk before, else 4. Keys after the query have i - j if they are in a later chunk.",
        "An et al. 2024, arXiv 2402.17463, section 3",
        "the chunk before as earlier ones; the bound of 4 left out",
        "The released code ends at 3/4 of the training length in place of the last position, with chunks of 11/16.",
        without=(),
    ),
    "darope": Family(
        value("darope", base=10000.0, original_len=8),
        "As rope, half split. Planes with theta_c below 2 pi / 8 rotate by theta_c 8 sigmoid(x_p w_h + alpha_h "
        "logit((p + 1/2) / 8)), with p + 1/2 clipped to 8e-6 and 8 - 8e-6.",
        "Lévy et al. 2026, arXiv 2609.34556, equations 2 to 6",
        "fast planes rotated by the token too; the half of p + 1/2 left out",
        "No released code was found.",
        {"w": (MODEL_DIM, NUM_HEADS), "alpha": (NUM_HEADS,)},
        scale=0.25,
        reads="xqkv",
        without=("grouped",),
    ),
    "selective_rope": Family(
        value("selective_rope", base=10.0, rank=4, kernel=3, drift=True, gated=True, num_heads=NUM_HEADS),
        "As rope, half split, with theta_c = base^(-2c/d) times the sum of phi_lc over l <= p in place of p theta_c. "
        "phi_l = sigmoid(x^_l gate + gate_bias) (sum_n kernel[n] ((x^_{l-n} down) up) + exp(drift)), n = 0 .. 2. Each "
        "of 2 halves of x^ is that of x divided by the root of its squared length + 1e-6.",
        "Movahedi et al. 2026, arXiv 2511.17388; github.com/timurcarstensen/selective-rope",
        "the step of the key counted, that of the query left out; the kernel in reverse; drift not gated",
        "The code needs as many key heads as query heads.",
        {
            "down": (MODEL_DIM, 4), "up": (4, NUM_HEADS, HEAD_DIM // 2), "kernel": (3, NUM_HEADS, HEAD_DIM // 2),
            "drift": (NUM_HEADS, HEAD_DIM // 2), "gate": (MODEL_DIM, NUM_HEADS), "gate_bias": (NUM_HEADS,),
        },
        scale=0.5,
        reads="xqkv",
        without=(*CONTENT, "window_sinks", "grouped"),
    ),
    "accumulated_rope": Family(
        value("accumulated_rope", base=10.0),
        "As rope, half split, with theta_c times the sum of (x_l steps)_hc over l <= p in place of p theta_c.",
        "Godavarti 2026, arXiv 2606.24975, of which the abstract was read; the linear map is posx's",
        "the step of the key counted, that of the query left out",
        "Earlier code of the author has a table of angles by token, or a network, without theta.",
        {"steps": (MODEL_DIM, NUM_HEADS, HEAD_DIM // 2)},
        scale=0.25,
        reads="xqkv",
        without=(*CONTENT, "window_sinks", "grouped"),
    ),
    "rotated_values": Family(
        value("rotated_values", base=ROPE),
        "w_ij as in rope, o_i = sum_j w_ij R_{j-i} v_j.",
        "Godavarti 2025, arXiv 2506.08652, with RoPE; 2026, arXiv 2606.24975",
        "outputs not rotated back; the sign of the distance in values",
        "RoFormer in transformers can rotate values, but does not rotate outputs back.",
        without=(),
    ),
}  # fmt: skip
