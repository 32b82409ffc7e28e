"""Models of transformers as runs: the same logits, tokens and text; what does not fit is one line."""

import json
import shutil
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import posx
from posx.lab.config import base_config, run_config
from posx.lab.data import BpeTokenizer, train_bpe
from posx.lab.generate import Sampling, generate
from posx.lab.runs import exchange
from posx.lab.runs.changes import change_run
from posx.lab.runs.describe import count, make_run_model
from posx.lab.runs.exchange import export_model, read_run
from posx.lab.runs.folder import RunFolder
from posx.lab.runs.foreign import read_model
from posx.lab.runs.load import load_model
from tests import tiny
from tests.lab.commands import refused
from tests.lab.runs import oracle

SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "vocab_size": 300, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
GPT_SIZES = {"vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
GPT_SIZES |= {"bos_token_id": 0, "eos_token_id": 0}
GEMMA = ["sliding_attention", "sliding_attention", "full_attention"]
#: The config class, and what differs from its defaults.
MODELS = {
    "llama": ("LlamaConfig", {"rms_norm_eps": 1e-5}),
    "llama-tied": ("LlamaConfig", {"tie_word_embeddings": True, "rope_parameters": LLAMA3}),
    "llama-wide": ("LlamaConfig", {"head_dim": 16}),
    "mistral": ("MistralConfig", {"sliding_window": None}),
    "mistral-window": ("MistralConfig", {"sliding_window": 8}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 16}),
    "gemma3": ("Gemma3TextConfig", {"head_dim": 16, "num_hidden_layers": 3, "sliding_window": 8, "layer_types": GEMMA}),
    "gpt_neox": ("GPTNeoXConfig", {"intermediate_size": 48, "max_position_embeddings": 64}),
    "gpt_neox-in-turn": ("GPTNeoXConfig", {"use_parallel_residual": False, "max_position_embeddings": 64}),
    "gpt2": ("GPT2Config", {"n_positions": 64}),
    "gpt2-untied": ("GPT2Config", {"n_positions": 64, "tie_word_embeddings": False, "activation_function": "gelu"}),
    "bloom": ("BloomConfig", {"num_attention_heads": 6, "hidden_size": 48, "seq_length": 64}),
    "mpt": ("MptConfig", {"num_attention_heads": 6, "hidden_size": 48, "max_seq_len": 64}),
}
#: Families that have Llama's shape, so that they are written too.
LLAMAS = ("llama", "mistral", "qwen")


def model_of(name):
    """A random model of transformers, every array of which changes the logits."""
    import torch
    import transformers

    cls, own = MODELS[name]
    torch.manual_seed(0)
    sizes = SIZES if name.startswith((*LLAMAS, "gemma3")) else GPT_SIZES
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, cls)(**(sizes | own))).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


@pytest.fixture
def folder(tmp_path):
    """A function that makes a folder of Hugging Face."""

    def make(name, **options):
        model_of(name).save_pretrained(tmp_path / "hf", **options)
        train_bpe(["some words and other words " * 9], 270).save(tmp_path / "hf" / "tokenizer.json")
        return tmp_path / "hf"

    return make


@pytest.mark.peers
@pytest.mark.parametrize("name", MODELS)
def test_imported_models_have_the_logits_of_transformers(capsys, folder, tmp_path, name):
    import torch
    import transformers

    shards = {"max_shard_size": "20kB"} if name == "llama" else {}
    code, _, err = tiny.call(capsys, "import", f"--from={folder(name, **shards)}", f"--to={tmp_path / 'run'}")
    assert code == 0, err
    theirs, tokens = model_of(name), np.random.default_rng(0).integers(0, 300, (2, 50))
    with torch.no_grad():
        wanted = theirs(torch.from_numpy(tokens)).logits.numpy()
    apply, params, _ = posx.load(tmp_path / "run")
    np.testing.assert_allclose(apply(params, jnp.asarray(tokens)), wanted, atol=1e-4, rtol=1e-4)
    back = ["export", f"--workdir={tmp_path / 'run'}", f"--to={tmp_path / 'back'}"]
    if name.startswith(LLAMAS):
        code, _, err = tiny.call(capsys, *back)
        assert code == 0, err
        again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back").eval()
        with torch.no_grad():
            np.testing.assert_allclose(again(torch.from_numpy(tokens)).logits.numpy(), wanted, atol=1e-4, rtol=1e-4)
    else:
        refused(capsys, 2, back, "does not have Llama's shape")
    # A cache, and prompts of unequal length: padding comes first.
    prompts = [tokens[0, :9], tokens[1, :4]]
    found = list(generate(apply.model, params, prompts, 12, sampling=Sampling(temperature=0)))
    for row, prompt in enumerate(prompts):
        with torch.no_grad():
            ids = theirs.generate(torch.from_numpy(prompt[None]), max_new_tokens=12, do_sample=False, eos_token_id=None)
        assert [new[row] for new in found] == ids[0, len(prompt) :].tolist()


@pytest.mark.peers
def test_files_of_headless_models_are_read(capsys, folder, tmp_path):
    """Files of GPT2Model leave "transformer." out, and older ones hold the causal mask."""
    import torch
    from safetensors.torch import load_file, save_file

    source = folder("gpt2")
    arrays = load_file(source / "model.safetensors")
    bare = {name.removeprefix("transformer."): array for name, array in arrays.items()}
    bare |= {f"h.{n}.attn.bias": torch.ones(1, 1, 64, 64) for n in range(2)}
    for number, held in enumerate((arrays, bare)):
        save_file(held, source / "model.safetensors")
        code, _, err = tiny.call(capsys, "import", f"--from={source}", f"--to={tmp_path / str(number)}")
        assert code == 0, err
    one, other = (posx.load(tmp_path / str(number))[1] for number in range(2))
    jax.tree.map(np.testing.assert_array_equal, one, other)


@pytest.mark.peers
def test_special_tokens_without_a_row_are_left_out(capsys, folder, tmp_path):
    """As the token of images in the tokenizer of Gemma 3's text models."""
    source = folder("llama")
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    image = tokenizer["added_tokens"][0] | {"id": 300, "content": "<image_soft_token>"}
    (source / "tokenizer.json").write_text(
        json.dumps(tokenizer | {"added_tokens": [*tokenizer["added_tokens"], image]})
    )
    code, _, err = tiny.call(capsys, "import", f"--from={source}", f"--to={tmp_path / 'run'}")
    assert code == 0, err
    assert posx.load(tmp_path / "run")[2].vocab_size <= 300


@pytest.mark.peers
def test_an_imported_run_is_a_run(capsys, folder, site, tmp_path):
    """It evaluates, under another encoding too, generates, is exported, and is trained on."""
    source, run = folder("llama-tied"), tmp_path / "runs" / "small"
    assert tiny.call(capsys, "import", f"--from={source}", f"--to={run}")[0] == 0
    text = f"--config.data.source={site / 'text'}"
    refused(capsys, 4, ["evaluate", f"--workdir={run}"], "was imported", "Name a text")
    words = ["evaluate", text, f"--config.data.cache_dir={tmp_path / 'cache'}", "--lengths=16,64", "--num_targets=256"]
    code, out, err = tiny.call(capsys, *words, f"--workdir={run}", "--protocol=nonoverlapping")
    assert code == 0, err
    asked = "--encoding=rope(frequencies=linear(factor=2)), rope(frequencies=yarn(factor=2))"
    code, out, err = tiny.call(capsys, *words, f"--workdir={run}", "--protocol=nonoverlapping", asked)
    assert code == 0 and "rope(frequencies=yarn(factor=2, original_len=16))" in out, err
    assert tiny.call(capsys, "import", f"--from={source}", f"--to={tmp_path / 'twin'}")[0] == 0
    one, other = (json.loads((folder / "config.json").read_text())["hash"] for folder in (run, tmp_path / "twin"))
    assert one == other
    code, out, err = tiny.call(capsys, "generate", f"--workdir={run}", "--prompt=some words", "--num_tokens=3")
    assert code == 0, err
    file = tmp_path / "run.safetensors"
    code, out, err = tiny.call(capsys, "export", f"--workdir={run}", f"--to={file}")
    assert code == 0, err
    words = ["train", f"--config_json={run / 'config.json'}", text, f"--from={run}", f"--workdir={tmp_path / 'more'}"]
    words += [
        "--config.train.length=16",
        "--config.train.steps=2",
        "--config.eval.lengths=16,",
        "--config.train.warmup_steps=1",
    ]
    words += [f"--config.data.cache_dir={tmp_path / 'cache'}", "--config.eval.num_targets=64"]
    code, out, err = tiny.call(capsys, *words)
    assert code == 0 and "20 of 20 arrays kept" in err, err


@pytest.mark.peers
def test_window_layers_keep_a_rope_that_all_layers_have(tmp_path):
    """A rule that is put on Gemma 3 acts on its layers without a window, even if both kinds have one base."""
    oracle.write(tmp_path / "hf", "gemma3_text", oracle.BASES["gemma3_text"] | {"rope_theta": 1e4})
    run, _ = oracle.imported(tmp_path / "hf")
    assert run.layers[0] == run.layers[1]
    window, full = change_run(run, "frequencies=yarn(factor=4)").layers
    assert window == run.layers[0] != full


@pytest.mark.peers
def test_models_that_do_not_fit_are_refused(capsys, folder, tmp_path):
    source = folder("llama")
    config = json.loads((source / "config.json").read_text())
    words = ["import", f"--from={source}", f"--to={tmp_path / 'run'}"]

    def changed(**values):
        (source / "config.json").write_text(json.dumps(config | values))

    for values, problem in (
        ({"model_type": "gemma2"}, "model_type='gemma2' is unknown to posx"),
        ({"attention_bias": True}, "attention_bias=True, but posx has False"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"vocab_size": 260}, "the model 260 rows"),
        ({"rope_parameters": {"rope_type": "spiral"}}, "rope_type='spiral' is unknown"),
        ({"num_hidden_layers": 3}, "model.layers.2.self_attn.k_proj.weight is missing"),
        ({"num_hidden_layers": 1}, "no place"),
        ({"vocab_size": None}, "vocab_size=None: not a whole number"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, "not of llama"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_scaling": {"type": "llama3"}, "original_max_position_embeddings": 0}, "division by zero"),
        ({"hidden_size": 1 << 19, "head_dim": 1 << 17}, "of memory"),
    ):
        changed(**values)
        code, _, err = tiny.call(capsys, *words)
        assert code in (2, 3, 4, 6) and problem in err and err.count("\n") == 1, err
        assert not (tmp_path / "run").exists()
    changed()
    weights = source / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    refused(capsys, 4, words, "is damaged")
    weights.unlink()
    refused(capsys, 4, words, "holds no model.safetensors")
    shutil.rmtree(source)
    refused(capsys, 4, words, "there is no such folder")
    refused(capsys, 2, ["import", f"--to={tmp_path / 'run'}"], "--from is missing")


def test_an_import_needs_the_disk_of_its_checkpoint(capsys, tmp_path, monkeypatch):
    """It needs 4 bytes a parameter, and the advice is a flag of the command."""
    source = tiny.write_model(tmp_path / "hf")
    need = 4 * count(make_run_model(read_run(read_model(source), "hf", RunFolder(tmp_path / "run")), 1))
    words = ["import", f"--from={source}", f"--to={tmp_path / 'run'}"]
    for free, code, said in ((need - 1, 6, "or name a folder on another disk with --to"), (need, 4, "is missing")):
        monkeypatch.setattr(shutil, "disk_usage", lambda _, free=free: SimpleNamespace(free=free))
        refused(capsys, code, words, said)


def test_other_shapes_are_not_exported_to_hugging_face(capsys, whole, tmp_path):
    words = ["export", f"--workdir={whole}"]
    refused(capsys, 2, [*words, f"--to={tmp_path / 'out'}"], "does not have Llama's shape", "model.mlp=gelu")
    refused(capsys, 2, [*words, f"--to={tmp_path / 'out.bin'}"], "must end with .safetensors")


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_an_export_as_qwen_names_another_split(capsys, tmp_path, monkeypatch, family):
    """transformers' AutoTokenizer splits texts by the model's family. For Llama and Mistral it reads the file."""
    settings = base_config("rope")
    settings.model.update({"num_layers": 1, "model_dim": 16, "num_heads": 2, "mlp": "swiglu"})
    settings.model.update({"biases": "qkv" if family == "qwen2" else "none", "qk_norm": family == "qwen3"})
    settings.model.mask_policy = ("window(size=8)",) if family == "mistral" else ("causal",)
    run, own = run_config(settings), train_bpe(["some words"], 270)
    model = make_run_model(run, own.vocab_size)
    params = jax.tree.map(lambda leaf: np.zeros(leaf.shape, np.float32), model.abstract())
    split = {"type": "Split", "pattern": {"Regex": exchange.QWEN_SPLIT}, "behavior": "Isolated", "invert": False}
    theirs = BpeTokenizer(json.dumps(json.loads(own.text) | {"pre_tokenizer": split}))
    for name, tokenizer in {"own": own, "theirs": theirs}.items():
        monkeypatch.setattr(exchange, "load_model", lambda folder, held=tokenizer: (model, params, held, 1))
        export_model(SimpleNamespace(read_config=lambda: run), tmp_path / name)
        assert json.loads((tmp_path / name / "config.json").read_text())["model_type"] == family
        warned = "PreTrainedTokenizerFast" in capsys.readouterr().err
        assert warned == (name == "own" and family.startswith("qwen"))


@pytest.mark.slow
def test_training_starts_from_the_weights_of_another_run(capsys, site, tmp_path):
    """Arrays of equal name and shape are kept, others are fresh or dropped; the same command resumes."""
    words = ["train", f"--config={site / 'tiny.py'}:nope", f"--from={site / 'whole'}", f"--workdir={tmp_path / 'run'}"]
    words += ["--config.train.steps=4", "--config.train.learning_rate=1e-9", "--config.train.final_learning_rate=0"]
    code, _, err = tiny.call(capsys, *words)
    assert code == 0, err
    assert "dropped: params.shared" in err or "dropped: shared" in err
    _, trained, _, _ = load_model(RunFolder(site / "whole"))
    _, params, _, _ = load_model(RunFolder(tmp_path / "run"))
    trained.pop("shared")  # T5's table
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), params, trained)
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["parent"]["encoding"] == "t5"
    assert tiny.call(capsys, *words)[0] == 0
    without = [word for word in words if not word.startswith("--from")]
    refused(capsys, 4, without, "parent.hash")
    again = ["train", f"--config_json={tmp_path / 'run' / 'config.json'}", f"--workdir={tmp_path / 'again'}"]
    refused(capsys, 2, again, "starts from the weights", "Name that run with --from")
    # Before its first checkpoint the run has no weights, not those of the other.
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    refused(capsys, 4, ["evaluate", f"--workdir={tmp_path / 'run'}", "--lengths=16,64"], "no checkpoint")
