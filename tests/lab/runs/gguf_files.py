"""Small random GGUF files of each architecture that posx reads, for the tests of imports."""

import json

import numpy as np

from posx.lab.data import train_bpe

VOCAB, LAYERS, MODEL, HEADS, KV_HEADS, MLP, CONTEXT = 300, 2, 32, 4, 2, 48, 64
ROPE = ("llama", "qwen2", "qwen3", "gemma3")
#: The width of a head, which transformers does not read from files of Qwen 3.
WIDTHS = {"qwen3": 128, "gemma3": 256}


def write(path, architecture="llama", *, add=(), drop=(), arrays=None, tokens=None, skip=()):
    """Write a file.

    Args:
      add: pairs of a method of `gguf.GGUFWriter` without "add_" and its arguments, after the usual ones.
      drop: the usual methods that are left out.
      arrays: {name: array} beside the usual ones.
      tokens: the tokens, of a sentencepiece model; by default a byte-level one is written.
      skip: names of arrays that are left out.
    """
    import gguf

    file = gguf.GGUFWriter(path, architecture)
    for name, value in _keys(architecture, tokens).items():
        if name not in drop:
            getattr(file, f"add_{name}")(value)
    for name, *values in add:
        values = map(gguf.RopeScalingType, values) if name == "rope_scaling_type" else values
        getattr(file, f"add_{name}")(*values)
    rng = np.random.default_rng(0)
    for name, shape in _shapes(architecture).items():
        array = 0.3 * rng.standard_normal(shape) + (architecture == "gemma3" and "norm" in name)
        if name not in skip:
            file.add_tensor(name, array.astype(np.float32))
    for name, array in (arrays or {}).items():
        file.add_tensor(name, np.asarray(array, np.float32))
    for step in (file.write_header_to_file, file.write_kv_data_to_file, file.write_tensors_to_file, file.close):
        step()


def _keys(architecture, tokens):
    made = json.loads(train_bpe(["some words and other words " * 9], 270).text)["model"]
    vocab = sorted(made["vocab"], key=made["vocab"].get)
    width = WIDTHS.get(architecture, MODEL // HEADS)
    keys = {
        "block_count": LAYERS, "context_length": 1024 if architecture == "gpt2" else CONTEXT, "head_count": HEADS,
        "embedding_length": MODEL, "feed_forward_length": 4 * MODEL if architecture in ("gpt2", "bloom") else MLP,
        "vocab_size": VOCAB, "eos_token_id": 5, "bos_token_id": 4,
    }  # fmt: skip
    if architecture in ROPE:
        keys |= {"head_count_kv": KV_HEADS, "layer_norm_rms_eps": 1e-5, "rope_freq_base": 5e4}
        keys |= {"key_length": width, "value_length": width, "rope_dimension_count": width}
        keys |= {"sliding_window": 8} if architecture == "gemma3" else {}
    else:
        keys["layer_norm_eps"] = 1e-5
    if tokens:
        scores = [-float(n) for n in range(len(tokens))]
        return keys | {"tokenizer_model": "llama", "token_list": tokens, "token_scores": scores}
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in made["merges"]]
    padded = vocab + [f"<pad{n}>" for n in range(VOCAB - len(vocab))]
    types = [3, *[1] * (VOCAB - 1)]
    keys |= {"tokenizer_model": "gpt2", "tokenizer_pre": "gpt-2", "token_list": padded, "token_types": types}
    return keys | {"token_merges": merges}


def _shapes(architecture):
    m, width, v = MODEL, WIDTHS.get(architecture, MODEL // HEADS), VOCAB
    if architecture in ROPE:
        q, k = HEADS * width, KV_HEADS * width
        ends = {"token_embd": (v, m), "output_norm": (m,)} | ({} if architecture == "gemma3" else {"output": (v, m)})
        layer = {"attn_norm": (m,), "ffn_norm": (m,), "attn_q": (q, m), "attn_k": (k, m), "attn_v": (k, m)}
        layer |= {"attn_output": (m, q), "ffn_up": (MLP, m), "ffn_gate": (MLP, m), "ffn_down": (m, MLP)}
        layer |= {} if architecture in ("llama", "qwen2") else {"attn_q_norm": (width,), "attn_k_norm": (width,)}
        layer |= {"post_attention_norm": (m,), "post_ffw_norm": (m,)} if architecture == "gemma3" else {}
        biased = ("attn_q", "attn_k", "attn_v") if architecture == "qwen2" else ()
    else:
        ends = {"token_embd": (v, m), "output_norm": (m,)}
        ends |= {"position_embd": (1024, m)} if architecture == "gpt2" else {"token_embd_norm": (m,)}
        layer = {"attn_norm": (m,), "ffn_norm": (m,), "attn_qkv": (3 * m, m), "attn_output": (m, m)}
        layer |= {"ffn_up": (4 * m, m), "ffn_down": (m, 4 * m)}
        biased = tuple(layer)
    shapes = {f"{name}.weight": shape for name, shape in ends.items()}
    if biased == tuple(layer):
        shapes |= {f"{name}.bias": (m,) for name in ends if name.endswith("norm")}
    for n in range(LAYERS):
        shapes |= {f"blk.{n}.{name}.weight": shape for name, shape in layer.items()}
        shapes |= {f"blk.{n}.{name}.bias": layer[name][:1] for name in biased}
    return shapes
