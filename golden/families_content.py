"""The families of encodings that read tokens, or whose logits need more than one query and one key."""

from golden.family import CONTENT, FAR, HEAD_DIM, MODEL_DIM, NUM_HEADS, Family, value


def dape(kernel, source, catches, differs):
    """Return DAPE over KERPLE as a family, with windows of some keys."""
    taps = "one key" if kernel == 1 else "key j - 1, j and j + 1, with 0 for keys that are not seen"
    return Family(
        value("dape", base=value("kerple", form="log"), kernel=kernel, width=4),
        "s_ij = A_ij + B_ij + f([A; B])_ij, A = q_i . k_j / sqrt(d), B = -p_h ln(1 + a_h |i - j|), f(y) = "
        f"leaky_relu(y w_1 + b_1, 0.01) w_2, over the heads. w_1 and w_2 are [tap, in, out]. They read {taps}.",
        source,
        catches,
        differs,
        {"w_1": (kernel, 2 * NUM_HEADS, 4), "b_1": (4,), "w_2": (kernel, 4, NUM_HEADS)}
        | {"base.p": (NUM_HEADS,), "base.a": (NUM_HEADS,)},
        scale=0.5,
        positive=("base.p", "base.a"),
        mixes=True,
        without=(),
    )


CANON = dict.fromkeys(("query", "key", "value"), (3, NUM_HEADS, HEAD_DIM))
PATH = {
    "down": (MODEL_DIM, 4), "up": (4, NUM_HEADS, HEAD_DIM), "kernel": (3, NUM_HEADS, HEAD_DIM),
    "u": (MODEL_DIM, NUM_HEADS), "b": (NUM_HEADS,),
}  # fmt: skip
GAPE = {"w_g": (NUM_HEADS, HEAD_DIM), "w_l": (NUM_HEADS, HEAD_DIM)}

FAMILIES = {
    "fox": Family(
        value("fox", gate="forget", gate_scale=1.0),
        "s_ij = q_i . k_j / sqrt(d) + sum of log sigmoid(x_l w + b)_h over visible tokens l = j+1 .. i.",
        "Lin et al. 2025, arXiv 2503.02130, section 3",
        "the gate of the key itself counted, or that of the query left out",
        "x-transformers sums the gates of new tokens only when it decodes with a cache.",
        {"w": (MODEL_DIM, NUM_HEADS), "b": (NUM_HEADS,)},
        reads="xqkv",
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
    "dape": dape(
        1,
        "Zheng et al. 2024, arXiv 2405.14722",
        "the bias, or the product, not added to the network",
        "The release gives the second layer a bias vector, which changes no weight.",
    ),
    "dape_v2": dape(
        3,
        "Zheng et al. 2024, arXiv 2410.04798",
        "the taps in reverse; a hidden layer at keys that are not seen",
        "The release hides later keys from the first convolution alone.",
    ),
    "inkling": Family(
        value("inkling", extent=5, rank=4),
        "s_ij = q_i . k_j / sqrt(d) + (x_i w_h) . bank[:, i - j] if i - j < 5.",
        "Thinking Machines 2026, huggingface.co/thinkingmachines/Inkling; InklingRelativeLogits of transformers",
        "the key's token read; the last column repeated beyond the extent",
        "x-transformers gives w a bias vector. The model normalises q and k, and divides their product by d.",
        {"w": (MODEL_DIM, NUM_HEADS, 4), "bank": (4, 5)},
        scale=0.5,
        reads="xqkv",
    ),
    "grape_a": Family(
        value("grape_a", gates=("query", "key"), unit=True, num_heads=NUM_HEADS),
        "s_ij = q_i . k_j / sqrt(d) - |i - j| softplus(omega_h) slope_h (softplus(v_h . q_i / sqrt(d)) + "
        "softplus(u_h . k_j / sqrt(d))), u_h and v_h divided by their lengths, ALiBi's slopes.",
        "Zhang et al. 2025, arXiv 2512.07805, the query- and key-gated form of GRAPE-A",
        "u and v exchanged, or not divided by their lengths",
        "The released code gives keys after the query 0, and normalises q and k of each head.",
        {"omega": (NUM_HEADS,), "u": (NUM_HEADS, HEAD_DIM), "v": (NUM_HEADS, HEAD_DIM)},
        without=(),
    ),
    "gape": Family(
        value("gape", original_len=4),
        "s_ij = q_i . k_j / sqrt(d) - softplus(gamma_h) softplus(w_g . q_i + b_g) (1 - sigmoid(w_l . k_j + b_l)) "
        "(i - j) / 4.",
        "Ali et al. 2026, arXiv 2605.10414, read in the blog of an author",
        "sigmoid in place of 1 - sigmoid; gates of query and key exchanged",
        "The paper adds a number to all keys of a query, which no weight shows.",
        GAPE | dict.fromkeys(("b_g", "b_l", "gamma"), (NUM_HEADS,)),
    ),
    "path": Family(
        value("path", rank=4, kernel=3),
        "s_ij = q_i H_i H_{i-1} .. H_{j+1} k_j / sqrt(d), H_t = I - beta_t w_t w_t^T, w_t = unit(silu(sum_n kernel[n] "
        "((x_{t-n} down) up))) with n = 0 .. 2, beta_t = 2 sigmoid(x_t u + b).",
        "Yang et al. 2025, arXiv 2505.16381, sections 2.2 and 3.2; silu as in flash-linear-attention",
        "H_j counted, H_i left out; the product in reverse; the kernel in reverse; beta of at most 1",
        "flash-linear-attention adds 1e-6 to the squared length of w.",
        PATH,
        scale=0.25,
        reads="xqkv",
        without=(*CONTENT, "window_sinks", "grouped"),
    ),
    "key_offset": Family(
        value("key_offset", share=0.5),
        "s_ij = q_i . k'_j / sqrt(d), k' has the first 4 channels of k_j and the last 4 of k_{j-1}, 0 for the first.",
        "modded-nanogpt, github.com/KellerJordan/modded-nanogpt/pull/169",
        "the first channels moved; the key after taken",
        "In modded-nanogpt the first token of a document gets channels of the document before.",
        without=FAR,
    ),
    "canon": Family(
        value("canon", kernel=3),
        "As nope for y_t = x_t + sum_n a[n] x_{t-n}, n = 0 .. 2, of queries, keys and values x, with a of each.",
        "Allen-Zhu 2025, arXiv 2512.17351, Canon-B; github.com/facebookresearch/PhysicsLM4, canon_helper.py",
        "the kernel in reverse; no residual x_t; later tokens read",
        "In PhysicsLM4 a document sees the last tokens of the document before.",
        CANON,
        scale=0.5,
        mixes=True,
        without=(*FAR, "step", "padded_step", "grouped"),
    ),
    "adaptive_temperature": Family(
        value("adaptive_temperature", delta=1.0, gamma_range=2.0, plain_heads=0),
        "s_ij = (1 + softplus(x_i w_beta) ln(i + 2)^(2 tanh(x_i w_gamma))) q_i . k_j / sqrt(d).",
        "Vasylenko et al. 2025, arXiv 2506.16640, ASEntmax; the released sparse_gemma.py",
        "the length of the text in place of i + 2; the key's token read",
        "The source has entmax in place of softmax.",
        {"w_beta": (MODEL_DIM, NUM_HEADS), "w_gamma": (MODEL_DIM, NUM_HEADS)},
        scale=0.25,
        reads="xqkv",
    ),
}
