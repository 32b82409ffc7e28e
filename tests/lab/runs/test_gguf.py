"""Each key of GGUF metadata gives the logits that transformers has with it in its config, or is refused by name."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import posx
from posx.errors import ConfigError
from posx.lab.data.tokenizers import BpeTokenizer
from posx.lab.runs.foreign import read_model
from posx.lab.runs.gguf_keys import ARCHITECTURES, check_keys, key_kind
from tests import tiny
from tests.lab.commands import refused
from tests.lab.runs import gguf_table
from tests.lab.runs.gguf_files import VOCAB, write

PAGE = Path(posx.__file__).parent.parent / "docs/guides/models.md"
TOKENS = np.random.default_rng(1).integers(0, VOCAB, (2, 50))
BASE = {"rope_theta": 5e4}
THETA = 5e4 ** (-np.arange(0, 8, 2) / 8)
#: Llama 3.1's factors as llama.cpp's converter computes them, for heads of 8, a first length of 256 and a factor of 8.
TURNS = 256 * THETA / (2 * np.pi)
LLAMA3 = 1 / (np.clip((TURNS - 1) / 3, 0, 1) * (1 - 1 / 8) + 1 / 8)
LONG = {"rope_factors_long.weight": [1, 2, 4, 8], "rope_factors_short.weight": [1, 1, 2, 2]}
LONGROPE = [("rope_scaling_type", "longrope"), ("rope_scaling_orig_ctx_len", 16), ("rope_scaling_attn_factors", 1.25)]
PLANES = [1.5, 1, 3, 2]


def scaled(kind, factor=4.0):
    return [("rope_scaling_type", kind), ("rope_scaling_factor", factor)]


def planes(factors, **more):
    return {"rope_type": "longrope", "short_factor": factors, "long_factor": factors, "attention_factor": 1.0} | more


#: {case: (architecture, keys, arrays, the rope_parameters of transformers without the base)}
RULES = {
    "linear": ("llama", scaled("linear"), {}, {"rope_type": "linear", "factor": 4.0}),
    "factor-alone": ("qwen3", scaled("linear")[1:], {}, {"rope_type": "linear", "factor": 4.0}),
    "scale_linear": (
        "llama", [("float32", "llama.rope.scale_linear", 4.0)], {}, {"rope_type": "linear", "factor": 4.0}
    ),
    "none": ("llama", scaled("none"), {}, {"rope_type": "default"}),
    "yarn": ("qwen2", scaled("yarn"), {}, {"rope_type": "yarn", "factor": 4.0}),
    "yarn-original": (
        "llama", [*scaled("yarn"), ("rope_scaling_orig_ctx_len", 16)], {},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    ),
    "freqs-constant": ("llama", [], {"rope_freqs.weight": [4] * 4}, {"rope_type": "linear", "factor": 4.0}),
    "freqs-llama3": (
        "llama", [], {"rope_freqs.weight": LLAMA3},
        {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 256,
        },
    ),
    "freqs-planes": ("llama", [], {"rope_freqs.weight": PLANES}, planes(PLANES)),
    "freqs-scaled": (
        "llama", scaled("linear", 2.0), {"rope_freqs.weight": PLANES}, planes([2 * one for one in PLANES])
    ),
    "longrope": (
        "llama", LONGROPE, LONG,
        {
            "rope_type": "longrope", "long_factor": [1, 2, 4, 8], "short_factor": [1, 1, 2, 2], "factor": 4.0,
            "attention_factor": 1.25, "original_max_position_embeddings": 16,
        },
    ),
}  # fmt: skip


def test_every_gguf_key_has_a_kind():
    """The counts are those of gguf 0.19.0: a change of the table that loses a key changes one."""
    counts = gguf_table.counts()
    assert gguf_table.NAMED <= {*gguf_table.known(), *gguf_table.MORE}
    assert [counts["llama"][kind] for kind in gguf_table.KINDS] == [33, 27, 80, 133]
    assert [counts["gemma3"][kind] for kind in gguf_table.KINDS] == [36, 26, 80, 131]
    assert key_kind("llama.twirl", "llama") == key_kind("qwen2.block_count", "llama") == "refused"


def test_gguf_table_of_the_guide_is_the_code():
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    assert [line for line in gguf_table.table() if line not in lines] == []


@pytest.mark.parametrize("key, value", [("llama.expert_count", 8), ("llama.rope.scaling.alpha", 2.0)])
def test_gguf_keys_are_refused_by_name(key, value):
    with pytest.raises(ConfigError, match=rf"^{key}={value}: posx "):
        check_keys({"llama.block_count": 2, key: value}, "llama")


@pytest.mark.peers
def test_names_of_gguf_keys_are_those_of_the_package():
    assert gguf_table.known() == gguf_table.installed()


def theirs(path, **changed):
    """The logits of transformers, with the weights of a file and other settings in its config."""
    import torch
    import transformers

    plain = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    model = transformers.AutoModelForCausalLM.from_config(type(plain.config)(**{**plain.config.to_dict(), **changed}))
    model.load_state_dict(plain.state_dict())
    with torch.no_grad():
        return model.eval()(torch.from_numpy(TOKENS)).logits.numpy()


def ours(capsys, path):
    """The logits of posx after an import."""
    code, _, err = tiny.call(capsys, "import", f"--from={path}", f"--to={path.parent / 'run'}")
    assert code == 0, err
    apply, params, _ = posx.load(path.parent / "run")
    return apply(params, jnp.asarray(TOKENS))


@pytest.mark.peers
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_gguf_files_have_the_logits_of_transformers(capsys, tmp_path, architecture):
    path = tmp_path / "small.gguf"
    write(path, architecture)
    np.testing.assert_allclose(ours(capsys, path), theirs(path), atol=1e-4, rtol=1e-4)
    path.write_bytes(path.read_bytes()[:5000])
    refused(capsys, 4, ["import", f"--from={path}", f"--to={tmp_path / 'b'}"], "cannot be read")


@pytest.mark.peers
@pytest.mark.parametrize("case", RULES)
def test_gguf_rules_of_rope_have_the_logits_of_transformers(capsys, tmp_path, case):
    architecture, keys, arrays, rule = RULES[case]
    path = tmp_path / "small.gguf"
    write(path, architecture, add=keys, arrays=arrays)
    wanted, plain = theirs(path, rope_parameters=BASE | rule), theirs(path)
    np.testing.assert_allclose(ours(capsys, path), wanted, atol=1e-4, rtol=1e-4)
    assert (np.abs(wanted - plain).max() > 0.01) == (case != "none")


@pytest.mark.peers
def test_gguf_layers_of_gemma3_have_two_bases(capsys, tmp_path):
    path = tmp_path / "small.gguf"
    local, rest = {"rope_type": "default", "rope_theta": 500.0}, BASE | {"rope_type": "linear", "factor": 8.0}
    write(path, "gemma3", add=[*scaled("linear", 8.0), ("rope_freq_base_swa", 500.0)])
    both = {"sliding_attention": local, "full_attention": rest}
    np.testing.assert_allclose(ours(capsys, path), theirs(path, rope_parameters=both), atol=1e-4, rtol=1e-4)
    assert read_model(path).config["rope_parameters"] == both


#: {the key in the message: (architecture, what is added, what is left out)}
REFUSED = {
    "llama.rope.scaling.type='spiral'": ("llama", [("string", "llama.rope.scaling.type", "spiral")], ()),
    "llama.rope.scaling.alpha": ("llama", [("float32", "llama.rope.scaling.alpha", 2.0)], ()),
    "llama.rope.scaling.attn_factor": ("llama", [*scaled("yarn"), ("rope_scaling_attn_factors", 1.5)], ()),
    "qwen2.rope.scaling.yarn_log_multiplier": ("qwen2", [("rope_scaling_yarn_log_mul", 0.1)], ()),
    "qwen2.rope.scaling.yarn_beta_fast": ("qwen2", [("rope_scaling_yarn_beta_fast", 16.0)], ()),
    "llama.rope.freq_base_swa": ("llama", [("rope_freq_base_swa", 100.0)], ()),
    "llama.rope.dimension_count=4": ("llama", [("rope_dimension_count", 4)], ["rope_dimension_count"]),
    "qwen3.attention.value_length=64": ("qwen3", [("value_length", 64)], ["value_length"]),
    "llama.attention.sliding_window": ("llama", [("sliding_window", 8)], ()),
    "gemma3.attention.sliding_window_pattern": ("gemma3", [("sliding_window_pattern", 3)], ()),
    "gemma3.rope.freq_base is missing": ("gemma3", [], ["rope_freq_base"]),
    "gemma3.attention.key_length=128": ("gemma3", [("key_length", 128), ("value_length", 128),
        ("rope_dimension_count", 128)], ["key_length", "value_length", "rope_dimension_count"]),
    "llama.attention.scale": ("llama", [("attention_scale", 0.5)], ()),
    "llama.attention.clamp_kqv": ("llama", [("clamp_kqv", 8.0)], ()),
    "bloom.attention.max_alibi_bias": ("bloom", [("max_alibi_bias", 4.0)], ()),
    "llama.attention.causal": ("llama", [("causal_attention", False)], ()),
    "llama.expert_count": ("llama", [("expert_count", 8)], ()),
    "llama.expert_feed_forward_length": ("llama", [("expert_feed_forward_length", 8)], ()),
    "llama.logit_scale": ("llama", [("logit_scale", 2.0)], ()),
    "llama.embedding_scale": ("llama", [("embedding_scale", 2.0)], ()),
    "llama.residual_scale": ("llama", [("residual_scale", 2.0)], ()),
    "gemma3.final_logit_softcapping": ("gemma3", [("final_logit_softcapping", 30.0)], ()),
    "gemma3.attn_logit_softcapping": ("gemma3", [("attn_logit_softcapping", 50.0)], ()),
    "llama.use_parallel_residual": ("llama", [("parallel_residual", True)], ()),
    "llama.attention.head_count=[4, 2]": ("llama", [("head_count", [4, 2])], ["head_count"]),
    "llama.feed_forward_length=[48, 24]": ("llama", [("feed_forward_length", [48, 24])], ["feed_forward_length"]),
    "bloom.feed_forward_length=48": ("bloom", [("feed_forward_length", 48)], ["feed_forward_length"]),
    "llama.block_count is missing": ("llama", [], ["block_count"]),
    "llama.attention.layer_norm_rms_epsilon is missing": ("llama", [], ["layer_norm_rms_eps"]),
    "llama.twirl": ("llama", [("float32", "llama.twirl", 1.0)], ()),
    "qwen2.rope.freq_base": ("llama", [("float32", "qwen2.rope.freq_base", 1.0)], ()),
    "general.type": ("llama", [("type", "adapter")], ()),
    "split.count=2": ("llama", [("uint16", "split.count", 2)], ()),
    "tokenizer.ggml.pre='viking'": ("llama", [("tokenizer_pre", "viking")], ["tokenizer_pre"]),
    "tokenizer.ggml.pre='default'": ("llama", [("tokenizer_pre", "default")], ["tokenizer_pre"]),
    "tokenizer.ggml.pre is missing": ("qwen2", [], ["tokenizer_pre"]),
    "tokenizer.ggml.model='t5'": ("llama", [("tokenizer_model", "t5")], ["tokenizer_model"]),
    "tokenizer.ggml.add_space_prefix": ("llama", [("add_space_prefix", True)], ()),
    "general.architecture='gptneox'": ("gptneox", [], ()),
    "general.architecture='mpt'": ("mpt", [], ()),
}  # fmt: skip
REFUSED_ARRAYS = {
    "rope_freqs.weight": ("qwen2", [], {"rope_freqs.weight": [4] * 4}),
    "of 4 numbers": ("llama", [], {"rope_freqs.weight": [4] * 3}),
    "type=yarn does not go": ("llama", scaled("yarn"), {"rope_freqs.weight": [4] * 4}),
    "type=longrope does not go": ("llama", LONGROPE, {}),
    "type=linear does not go": ("llama", [], LONG),
    "attn_factor is missing": ("llama", LONGROPE[:2], LONG),
    "rope.scaling.factor=2": ("llama", [*LONGROPE, ("rope_scaling_factor", 2.0)], LONG),
    "output.weight differs": ("bloom", [], {"output.weight": np.zeros((VOCAB, 32))}),
}


@pytest.mark.peers
@pytest.mark.parametrize("words", REFUSED)
def test_gguf_keys_that_posx_lacks_are_refused(tmp_path, words):
    architecture, keys, without = REFUSED[words]
    write(tmp_path / "small.gguf", architecture, add=keys, drop=without)
    with pytest.raises(ConfigError) as error:
        read_model(tmp_path / "small.gguf")
    assert words in str(error.value) and str(error.value).startswith("small.gguf: ")


@pytest.mark.peers
@pytest.mark.parametrize("words", REFUSED_ARRAYS)
def test_gguf_arrays_of_rope_that_differ_are_refused(tmp_path, words):
    architecture, keys, arrays = REFUSED_ARRAYS[words]
    write(tmp_path / "small.gguf", architecture, add=keys, arrays=arrays)
    with pytest.raises(ConfigError, match=words):
        read_model(tmp_path / "small.gguf")


@pytest.mark.peers
def test_gguf_arrays_without_a_place_are_refused(capsys, tmp_path):
    """transformers drops them."""
    for number, name in enumerate(("blk.0.attn_q.bias", "blk.1.ffn_gate_inp.weight")):
        path = tmp_path / f"{number}.gguf"
        write(path, arrays={name: np.ones(32)})
        place = "model.layers.0.self_attn.q_proj.bias" if number == 0 else name
        refused(capsys, 2, ["import", f"--from={path}", f"--to={tmp_path / 'run'}"], place, "no place")


@pytest.mark.peers
def test_gguf_keys_without_effect_are_accepted(capsys, tmp_path):
    path, odd = tmp_path / "small.gguf", tmp_path / "odd.gguf"
    write(path)
    keys = [("logit_scale", 1.0), ("clamp_kqv", 0.0), ("expert_count", 0), ("sliding_window", 0)]
    keys += [("rope_scaling_finetuned", True), ("tensor_data_layout", "Meta AI original pth"), ("name", "mistral")]
    keys += [("layer_norm_eps", 0.1), ("chat_template", "{{ messages }}"), ("add_eos_token", True)]
    keys += [("uint32", "tokenizer.ggml.fim_pre_token_id", 7)]
    keys += [("head_count", [4, 4]), ("type", "model"), ("quantization_version", 2)]
    write(odd, add=keys, drop=["head_count"])
    first, second = read_model(path), read_model(odd)
    assert second.config == first.config and second.tokenizer == first.tokenizer and second.names == first.names


@pytest.mark.peers
def test_gguf_files_without_optional_keys_are_read(tmp_path):
    """llama.cpp then takes as many key heads as heads, their share of the width, and the base 10000."""
    drop = ["head_count_kv", "key_length", "value_length", "rope_dimension_count", "rope_freq_base", "vocab_size"]
    write(tmp_path / "small.gguf", drop=drop)
    config = read_model(tmp_path / "small.gguf").config
    assert (config["num_key_value_heads"], config["head_dim"], config["vocab_size"]) == (4, 8, VOCAB)
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 1e4}


@pytest.mark.peers
def test_gguf_begin_and_end_tokens_are_read(tmp_path):
    """The begin token is that of the file if its flag is on, which pre-tokenizers of Llama 3 have as default."""
    path = tmp_path / "small.gguf"
    for pre, flag, begins in (
        ("gpt-2", None, False),
        ("gpt-2", True, True),
        ("llama-bpe", None, True),
        ("llama-bpe", False, False),
    ):
        keys = [("tokenizer_pre", pre)] + ([] if flag is None else [("add_bos_token", flag)])
        write(path, add=keys, drop=["tokenizer_pre"])
        found = read_model(path)
        assert (found.config["bos_token_id"], found.config["eos_token_id"]) == (4, 5)
        assert (json.loads(found.tokenizer)["post_processor"] is not None) == begins
        tokenizer = BpeTokenizer(found.tokenizer)
        assert (tokenizer.begin, tokenizer.eos, tokenizer.ends) == (4, 5, (5,))
        assert tokenizer.template == ((4,) if begins else ())
    write(path, drop=["bos_token_id"], add=[("add_bos_token", True)])
    found = read_model(path)
    assert "bos_token_id" not in found.config and json.loads(found.tokenizer)["post_processor"] is None
    assert BpeTokenizer(found.tokenizer).begin == 5
    write(path, add=[("eom_token_id", 9), ("eot_token_id", 7)])  # as in llama.cpp, a turn and a message end a text too
    assert BpeTokenizer(read_model(path).tokenizer).ends == (5, 7, 9)


@pytest.mark.peers
def test_gguf_splits_are_those_of_llama_cpp(tmp_path):
    path, text = tmp_path / "small.gguf", "some words 12345, words"

    def pieces(pre):
        from tokenizers import Tokenizer

        write(path, add=[("tokenizer_pre", pre)], drop=["tokenizer_pre"])
        tokenizer = Tokenizer.from_str(BpeTokenizer(read_model(path).tokenizer).plain)
        return [text[first:last] for _, (first, last) in tokenizer.pre_tokenizer.pre_tokenize_str(text)]

    assert pieces("gpt-2") == ["some", " words", " 12345", ",", " words"]
    assert pieces("smollm") == ["some", " words", " ", "1", "2", "3", "4", "5", ",", " words"]
    assert pieces("llama-bpe") == ["some", " words", " ", "123", "45", ",", " words"]
    assert pieces("bloom") == ["some", " words", " 12345", ",", " words"]
    assert json.loads(read_model(path).tokenizer)["model"]["ignore_merges"] is False
    pieces("llama-bpe")
    assert json.loads(read_model(path).tokenizer)["model"]["ignore_merges"] is True


@pytest.mark.peers
def test_gguf_sentencepiece_adds_its_space_by_the_flag(tmp_path):
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{n:02X}>" for n in range(256)), "\u2581", "a", "\u2581a", "b"]
    tokens += [f"<pad{n}>" for n in range(VOCAB - len(tokens))]
    types = ("token_types", [2, 3, 3, *[6] * 256, *[1] * (VOCAB - 259)])
    for flag in (None, True, False):
        path = tmp_path / f"{flag}.gguf"
        keys = [types, ("bos_token_id", 1)] + ([] if flag is None else [("add_space_prefix", flag)])
        write(path, tokens=tokens, add=keys, drop=["bos_token_id"])
        tokenizer = BpeTokenizer(read_model(path).tokenizer)
        found = [tokens[one] for one in tokenizer.encode("a")]
        assert found == (["a"] if flag is False else ["\u2581a"]) and tokenizer.begin == 1
