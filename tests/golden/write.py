"""Writes tests/golden/*.npz: what other libraries compute for the encodings of posx, for tests without those libraries.

    python -m tests.golden.write            # needs the `peers` extra; writes only what changed, prints a line per file

Made with torch 2.13.0 (CPU), transformers 5.23.0, x-transformers 2.31.10 and attn-gym 0.0.17. Inputs come from seeded
NumPy generators, so a second run writes the same arrays; tests marked `peers` recompute them and compare. Every oracle
returns its inputs and its results as plain arrays, vectors in the layout [t, h, d] of posx.
"""

import pathlib
from collections.abc import Callable

import numpy as np
import torch
from attn_gym.mods.sandwich import generate_sandwich_bias
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.deberta import modeling_deberta as deberta_v1
from transformers.models.deberta_v2 import modeling_deberta_v2 as deberta_v2
from transformers.models.gpt_neox import modeling_gpt_neox as neox
from transformers.models.gptj import modeling_gptj as gptj
from transformers.models.llama import modeling_llama as llama
from transformers.models.llama4 import modeling_llama4 as llama4_text
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor
from transformers.models.roformer.modeling_roformer import RoFormerSinusoidalPositionalEmbedding
from transformers.models.t5 import modeling_t5 as t5
from transformers.models.wav2vec2_bert import modeling_wav2vec2_bert as wav2vec2_bert
from transformers.models.xglm.modeling_xglm import XGLMSinusoidalPositionalEmbedding
from transformers.models.xlnet import modeling_xlnet as xlnet
from x_transformers import x_transformers

FOLDER = pathlib.Path(__file__).parent
Arrays = dict[str, np.ndarray]

#: Positions for rotary oracles: the first ones, a gap, and far ones.
POSITIONS = np.array([0, 1, 2, 3, 7, 50, 1023, 4096])


def random(seed: int, **shapes: tuple[int, ...]) -> Arrays:
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def heads_first(x: np.ndarray) -> torch.Tensor:
    """[t, h, d] -> [1, h, t, d]."""
    return torch.from_numpy(x).transpose(0, 1)[None]


def tokens_first(x: torch.Tensor) -> np.ndarray:
    """[1, h, t, d] -> [t, h, d]."""
    return x[0].transpose(0, 1).numpy()


def set_linear(linear: torch.nn.Linear, weight: np.ndarray) -> None:
    """weight [m, h, d] as a torch Linear from m to h * d; a bias, where there is one, is zero."""
    linear.weight.copy_(torch.from_numpy(weight.reshape(len(weight), -1).T))
    if linear.bias is not None:
        linear.bias.zero_()


def sinusoidal() -> Arrays:
    roformer = RoFormerSinusoidalPositionalEmbedding(64, 16)
    return {
        # XGLM counts from padding_idx + 1 = 2.
        "xglm": XGLMSinusoidalPositionalEmbedding(64, 16).forward(torch.arange(60)[None])[0].numpy(),
        "roformer": roformer.create_weight().numpy(),
    }


def rotary() -> Arrays:
    arrays = random(0, q=(len(POSITIONS), 2, 8), k=(len(POSITIONS), 2, 8)) | {"pos": POSITIONS}
    q, k, pos = heads_first(arrays["q"]), heads_first(arrays["k"]), torch.from_numpy(POSITIONS)[None]

    config = llama.LlamaConfig(hidden_size=16, num_attention_heads=2)
    config.rope_parameters = {"rope_type": "default", "rope_theta": 10000.0}
    turned = llama.apply_rotary_pos_emb(q, k, *llama.LlamaRotaryEmbedding(config)(q, pos))
    arrays |= {"llama_q": tokens_first(turned[0]), "llama_k": tokens_first(turned[1])}

    config = neox.GPTNeoXConfig(hidden_size=16, num_attention_heads=2)
    config.rope_parameters = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    turned = neox.apply_rotary_pos_emb(q, k, *neox.GPTNeoXRotaryEmbedding(config)(q, pos))
    arrays |= {"neox_q": tokens_first(turned[0]), "neox_k": tokens_first(turned[1])}

    sin, cos = gptj.create_sinusoidal_positions(int(POSITIONS.max()) + 1, 8)[pos[0]].chunk(2, dim=-1)
    for name, x in (("q", q), ("k", k)):
        turned = gptj.apply_rotary_pos_emb(x.transpose(1, 2), sin[None], cos[None])
        arrays[f"gptj_{name}"] = turned[0].numpy()
        angles, scale = x_transformers.RotaryEmbedding(4)(pos[0])
        arrays[f"x_transformers_{name}"] = tokens_first(x_transformers.apply_rotary_pos_emb(x, angles, scale))
    return arrays


def alibi() -> Arrays:
    arrays = {}
    for num_heads in (1, 4, 6, 8, 12):
        arrays[f"bloom_{num_heads}"] = build_alibi_tensor(torch.ones(1, 20), num_heads, torch.float32)[:, 0].numpy()
        arrays[f"mpt_{num_heads}"] = build_mpt_alibi_tensor(num_heads, 20)[:, 0].numpy()
        symmetric = x_transformers.AlibiPositionalBias(num_heads)(20, 20)
        arrays[f"x_transformers_{num_heads}"] = symmetric.reshape(num_heads, 20, 20).numpy()
    return arrays


def sandwich() -> Arrays:
    """Biases [h, q, k] of 24 tokens, by heads and width."""
    arrays, place = {}, torch.arange(24)
    for num_heads, width in ((4, 128), (6, 16)):
        add, heads = generate_sandwich_bias(num_heads, 24, width), torch.arange(num_heads)[:, None, None]
        arrays[f"{num_heads}_{width}"] = add(torch.zeros(()), None, heads, place[:, None], place[None]).numpy()
    return arrays


#: (num_buckets, max_distance) for which the buckets of all distances are kept.
T5_SIZES = ((32, 128), (32, 64), (16, 64), (8, 20), (64, 512))
T5_DISTANCES = np.arange(-700, 701)


def t5_bias() -> Arrays:
    arrays = random(1, table=(32, 4))
    for num_buckets, max_distance in T5_SIZES:
        for bidirectional in (False, True):
            buckets = t5.T5Attention._relative_position_bucket(
                torch.from_numpy(-T5_DISTANCES), bidirectional, num_buckets, max_distance
            )
            name = f"{'both' if bidirectional else 'causal'}_{num_buckets}_{max_distance}"
            arrays[name] = buckets.numpy().astype(np.int8)
    config = t5.T5Config(d_model=16, d_kv=4, num_heads=4, is_decoder=True)
    module = t5.T5Attention(config, has_relative_attention_bias=True, layer_idx=0)
    module.relative_attention_bias.weight.copy_(torch.from_numpy(arrays["table"]))
    return arrays | {"bias": module.compute_bias(12, 12)[0].numpy()}


def deberta() -> Arrays:
    """Attention weights of v1 (k = 8), and v2's position bias with log buckets; 14 and 40 tokens."""
    t, m, h, d = 14, 12, 2, 6
    arrays = random(2, q=(t, h, d), k=(t, h, d), table=(16, m), w_k=(m, h, d), w_q=(m, h, d))
    arrays |= random(3, q_v2=(40, h, d), k_v2=(40, h, d), table_v2=(16, m))
    config = deberta_v1.DebertaConfig(
        hidden_size=m, num_attention_heads=h, relative_attention=True, pos_att_type=["c2p", "p2c"],
        max_relative_positions=8,
    )  # fmt: skip
    module = deberta_v1.DisentangledSelfAttention(config).eval()
    set_linear(module.pos_proj, arrays["w_k"])
    set_linear(module.pos_q_proj, arrays["w_q"])
    scaled_q, k = heads_first(arrays["q"]) / (3 * d) ** 0.5, heads_first(arrays["k"])
    bias = module.disentangled_att_bias(
        scaled_q, k, deberta_v1.build_relative_position(scaled_q, k), torch.from_numpy(arrays["table"]), 3
    )
    arrays["weights"] = (scaled_q @ k.transpose(-1, -2) + bias).softmax(dim=-1)[0].numpy()

    config = deberta_v2.DebertaV2Config(
        hidden_size=m, num_attention_heads=h, relative_attention=True, pos_att_type=["c2p", "p2c"],
        max_relative_positions=64, position_buckets=8,
    )  # fmt: skip
    module = deberta_v2.DisentangledSelfAttention(config).eval()
    set_linear(module.pos_key_proj, arrays["w_k"])
    set_linear(module.pos_query_proj, arrays["w_q"])
    q, k = heads_first(arrays["q_v2"])[0], heads_first(arrays["k_v2"])[0]
    arrays["bias_v2"] = module.disentangled_attention_bias(q, k, None, torch.from_numpy(arrays["table_v2"]), 3).numpy()
    distances = torch.arange(-511, 512)
    arrays["log_buckets"] = deberta_v2.make_log_bucket_position(distances, 256, 512).numpy().astype(np.int16)
    return arrays


def transformer_xl() -> Arrays:
    """XLNet's relative attention, both directions, 5 queries over 9 keys of which the first 4 are memory."""
    queries, keys, m, h, d = 5, 9, 12, 2, 6
    arrays = random(4, q=(queries, h, d), k=(keys, h, d), v=(keys, h, d), w_r=(m, h, d), u=(h, d), v_bias=(h, d))
    module = xlnet.XLNetRelativeAttention(xlnet.XLNetConfig(d_model=m, n_head=h)).eval()
    module.r_w_bias.copy_(torch.from_numpy(arrays["u"]))
    module.r_r_bias.copy_(torch.from_numpy(arrays["v_bias"]))
    model = xlnet.XLNetModel(xlnet.XLNetConfig(d_model=m, n_head=h, n_layer=1, d_inner=4, vocab_size=8))
    wave = model.relative_positional_encoding(queries, keys, bsz=1)
    rows = torch.einsum("ibh,hnd->ibnd", wave, torch.from_numpy(arrays["w_r"]))
    q, k, v = (torch.from_numpy(arrays[name])[:, None] for name in "qkv")
    return arrays | {"o": module.rel_attn_core(q, k, v, rows)[:, 0].numpy()}


def shaw_keys() -> Arrays:
    """Wav2Vec2-BERT's "relative_key" attention with equal reach to both sides, identity projections."""
    t, h, d, reach = 12, 2, 4, 3
    arrays = random(5, x=(t, h * d), keys=(2 * reach + 1, d))
    config = wav2vec2_bert.Wav2Vec2BertConfig(
        hidden_size=h * d, num_attention_heads=h, position_embeddings_type="relative_key",
        left_max_position_embeddings=reach, right_max_position_embeddings=reach, attn_implementation="eager",
    )  # fmt: skip
    module = wav2vec2_bert.Wav2Vec2BertSelfAttention(config).eval()
    for linear in (module.linear_q, module.linear_k, module.linear_v, module.linear_out):
        set_linear(linear, np.eye(h * d, dtype=np.float32)[:, None])
    module.distance_embedding.weight.copy_(torch.from_numpy(arrays["keys"]))
    return arrays | {"o": module(torch.from_numpy(arrays["x"])[None])[0][0].reshape(t, h, d).numpy()}


def dynamic_bias() -> Arrays:
    """Biases [h, q, k] of a network of two hidden layers, of distances and of their logarithms, keys on both sides."""
    t, h, width = 20, 3, 8
    arrays = random(6, w0=(1, width), b0=(width,), w1=(width, width), b1=(width,), w2=(width, h), b2=(h,))
    for name, log_distance in (("linear", False), ("log", True)):
        module = x_transformers.DynamicPositionBias(width, heads=h, depth=2, log_distance=log_distance)
        linears = [layer for layer in module.modules() if isinstance(layer, torch.nn.Linear)]
        for n, linear in enumerate(linears):
            linear.weight.copy_(torch.from_numpy(arrays[f"w{n}"].T))
            linear.bias.copy_(torch.from_numpy(arrays[f"b{n}"]))
        arrays[name] = module(t, t).numpy()
    return arrays


def llama4() -> Arrays:
    """Causal attention of a layer without RoPE, identity projections. Its logit scale steps at every 3rd token."""
    t, h, d = 12, 2, 4
    arrays = random(7, x=(t, h * d))
    config = llama4_text.Llama4TextConfig(
        hidden_size=h * d, num_attention_heads=h, num_key_value_heads=h, head_dim=d, num_hidden_layers=1,
        no_rope_layers=[0], attn_temperature_tuning=True, floor_scale=3, attn_scale=0.5, use_qk_norm=False,
        attn_implementation="eager",
    )  # fmt: skip
    module = llama4_text.Llama4TextAttention(config, 0).eval()
    for linear in (module.q_proj, module.k_proj, module.v_proj, module.o_proj):
        set_linear(linear, np.eye(h * d, dtype=np.float32)[:, None])
    hidden = torch.full((t, t), -torch.inf).triu(1)[None, None]
    o, _ = module(torch.from_numpy(arrays["x"])[None], None, hidden)
    return arrays | {"o": o[0].reshape(t, h, d).numpy()}


ORACLES: dict[str, Callable[[], Arrays]] = {
    oracle.__name__: oracle
    for oracle in (
        sinusoidal,
        rotary,
        alibi,
        sandwich,
        t5_bias,
        deberta,
        transformer_xl,
        shaw_keys,
        dynamic_bias,
        llama4,
    )
}


def compute(name: str) -> Arrays:
    with torch.no_grad():
        return ORACLES[name]()


def main() -> None:
    for name in ORACLES:
        path, arrays = FOLDER / f"{name}.npz", compute(name)
        if path.exists():
            with np.load(path) as old:
                if old.files == list(arrays) and all(np.array_equal(old[n], arrays[n]) for n in arrays):
                    print(f"{path.name}: unchanged")
                    continue
        np.savez_compressed(path, **arrays)
        print(f"{path.name}: written, {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
