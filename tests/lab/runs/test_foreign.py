"""The files of a folder of Hugging Face: those that transformers reads are read, and no array is dropped unseen."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from posx.errors import ConfigError, WorkdirError
from posx.lab.runs.exchange import read_params, read_run
from posx.lab.runs.folder import RunFolder
from posx.lab.runs.foreign import read_model
from tests import tiny

NORM = "model.norm.weight"


def norm(number):
    return {NORM: np.full(32, number, np.float32)}


@pytest.fixture
def folder(tmp_path):
    return tiny.write_model(tmp_path / "hf")


def index(folder, **files):
    text = json.dumps({"weight_map": files})
    (folder / "model.safetensors.index.json").write_text(text)


def test_model_safetensors_goes_before_an_index(capsys, folder):
    """As transformers has it. A notice names the file whose shards are not read."""
    save_file(norm(2), folder / "model-00001-of-00001.safetensors")
    index(folder, **{NORM: "model.safetensors"})
    assert read_model(folder).arrays(NORM)[0] == 1 and capsys.readouterr().err == ""
    index(folder, **{NORM: "model-00001-of-00001.safetensors"})
    assert read_model(folder).arrays(NORM)[0] == 1
    assert "model.safetensors is read" in capsys.readouterr().err
    (folder / "model.safetensors").unlink()
    assert read_model(folder).arrays(NORM)[0] == 2


def test_other_safetensors_beside_the_model_are_not_read(folder):
    before = read_model(folder)
    for name in ("adapter_model", "consolidated", "model.fp16", "model-00001-of-00002", "zzz"):
        save_file(norm(3) | {name: np.ones(1, np.float32)}, folder / f"{name}.safetensors")
    found = read_model(folder)
    assert found.names == {NORM} and found.arrays(NORM)[0] == 1 and found.digest == before.digest
    (folder / "model.safetensors").unlink()
    with pytest.raises(WorkdirError, match=r"holds no model\.safetensors and no model\.safetensors\.index\.json"):
        read_model(folder)
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(WorkdirError, match=r"holds an adapter, adapter_config\.json"):
        read_model(folder)


def test_shards_hold_each_array_once_and_all_are_read(folder):
    """An index that leaves an array out does not hide it."""
    (folder / "model.safetensors").unlink()
    save_file(norm(4) | {"spare": np.ones(2, np.float32)}, folder / "a.safetensors")
    save_file({"other": np.ones(2, np.float32)}, folder / "b.safetensors")
    index(folder, **{NORM: "a.safetensors", "other": "b.safetensors"})
    assert read_model(folder).names == {NORM, "spare", "other"}
    save_file(norm(5), folder / "b.safetensors")
    with pytest.raises(
        WorkdirError, match=r"b\.safetensors and a\.safetensors both hold the array model\.norm\.weight"
    ):
        read_model(folder)


def whole(folder, **extra):
    """Write all arrays of the small model, with others, and return what an import makes of them."""
    m, f = 32, 48
    shapes = {"input_layernorm": (m,), "post_attention_layernorm": (m,), "mlp.up_proj": (f, m), "mlp.gate_proj": (f, m)}
    shapes |= {"mlp.down_proj": (m, f)} | {f"self_attn.{name}_proj": (m, m) for name in "qkvo"}
    shapes = {f"layers.0.{name}": shape for name, shape in shapes.items()} | {"embed_tokens": (300, m), "norm": (m,)}
    rng = np.random.default_rng(0)
    arrays = {f"model.{name}.weight": rng.standard_normal(shape) for name, shape in shapes.items()}
    arrays |= {"lm_head.weight": rng.standard_normal((300, m))} | extra
    arrays = {name: array.astype(np.float32) for name, array in arrays.items() if array is not None}
    save_file(arrays, folder / "model.safetensors")
    source = read_model(folder)
    run = read_run(source, "hf", RunFolder(folder / "run"))
    return arrays, run, read_params(source, run, "hf")


def test_arrays_without_a_place_are_refused_by_name(folder):
    """Biases, a layer more, another head, adapters. Frequencies of RoPE are computed anew by every model."""
    whole(folder, **{"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4)})
    for name in (
        "model.layers.0.self_attn.q_proj.bias",
        "model.layers.0.self_attn.bias",
        "model.layers.0.mlp.up_proj.lora_A.weight",
        "model.layers.1.input_layernorm.weight",
        "lm_head.bias",
        "score.weight",
        "rope_freqs.weight",
    ):
        with pytest.raises(ConfigError, match=f"the array {name}, for which posx has no place"):
            whole(folder, **{name: np.ones(32)})


def test_a_tied_flag_beside_another_head_is_untied(capsys, folder):
    """As transformers has it: the head in the files is read. Equal matrices are one."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tie_word_embeddings": True}))
    arrays, run, params = whole(folder)
    assert not run.model.tied and "another lm_head.weight" in capsys.readouterr().err
    np.testing.assert_array_equal(params["unembedding"], arrays["lm_head.weight"].T)
    np.testing.assert_array_equal(params["final_norm"], arrays["model.norm.weight"])
    for head in (arrays["model.embed_tokens.weight"], None):
        _, run, params = whole(folder, **{"lm_head.weight": head})
        assert run.model.tied and "unembedding" not in params and capsys.readouterr().err == ""


@pytest.mark.parametrize("kind", ["F8_E4M3", "F8_E5M2", "C64"])
def test_arrays_of_other_types_are_refused_by_name(folder, kind):
    """transformers reads float8, the format's reader for JAX raises."""
    numbers = np.zeros(32, np.complex64 if kind == "C64" else np.uint8)
    header = {NORM: {"dtype": kind, "shape": [32], "data_offsets": [0, numbers.nbytes]}}
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + numbers.tobytes())
    with pytest.raises(WorkdirError, match=f"the array {NORM} has the type {kind}. Save the model in float32"):
        read_model(folder).arrays(NORM)
