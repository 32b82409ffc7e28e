"""Encodings as code for other libraries: the same attention as posx's, and refusals in one line."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import posx
from posx.attention import causal, full
from posx.conformance import DIMS
from posx.lab.commands import SNIPPETS
from posx.lab.config import base_config, run_config
from posx.lab.runs.snippets import CODE_FORMS, write_snippet
from tests import made_rows, tiny
from tests.lab.commands import refused

#: Together they have each layout, tables of one and of several rows, and each form of a bias and of a scale.
SPECS = (
    "rope(layout=interleaved, rotary_dim=4, frequencies=yarn(factor=4))",
    "rope(frequencies=mobius)+llama4_temperature(floor_scale=4)",
    "rope(frequencies=dynamic_ntk(factor=2))+rope(base=50)",
    "alibi",
    "t5(num_buckets=8, max_distance=12)",
    "t5(bidirectional=true, num_buckets=8, max_distance=12, scaled=false)",
    "rope+kerple+ssmax",
    "bam+sandwich",
)
LENGTH, TOKENS = 64, 13


@functools.cache
def case(spec):
    """Return a value, its arrays moved off their start, and inputs [b, h, t, d] with increasing positions [b, t]."""
    encoding = posx.build(spec, DIMS)
    arrays = encoding.init(jax.random.key(0), DIMS)
    params = {name: x + 0.3 * jax.random.normal(jax.random.key(1), x.shape) for name, x in arrays.items()}
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, heads, TOKENS, DIMS.head_dim)) for heads in (4, 2, 2))
    pos = np.stack([np.arange(TOKENS), np.sort(rng.choice(LENGTH, TOKENS, replace=False))])
    return encoding, params, (q, k, v), pos


def attend(encoding, params, vectors, pos):
    """Return what posx computes in float64, [b, h, t, d]."""
    with jax.enable_x64(True):
        wide = {name: jnp.asarray(np.asarray(x), jnp.float64) for name, x in params.items()}
        q, k, v = (jnp.asarray(x).swapaxes(1, 2) for x in vectors)
        mask, slots = causal() if encoding.causal_only else full(), jnp.asarray(pos, jnp.int32)
        run = functools.partial(posx.attend, encoding.at_length(LENGTH), mask=mask, executor="dense")
        return np.asarray(jax.jit(run)(wide, q, k, v, slots).swapaxes(1, 2))


def load_code(spec, form):
    encoding, params, *_ = case(spec)
    source = write_snippet(encoding, params, DIMS, form=form, length=LENGTH, arrays="drawn.")
    compile(source, form, "exec")
    return source


def see(encoding):
    return np.tri(TOKENS, dtype=bool) if encoding.causal_only else np.ones((TOKENS, TOKENS), bool)


@pytest.mark.parametrize("spec", SPECS)
def test_numpy_snippets_compute_what_attend_does(spec):
    encoding, params, vectors, pos = case(spec)
    source, code = load_code(spec, "numpy"), {}
    exec(source, code)
    wanted = attend(encoding, params, vectors, pos)
    np.testing.assert_allclose(code["attention"](*vectors, pos, pos, see(encoding)), wanted, atol=1e-6)
    narrow = code["attention"](*(x.astype(np.float32) for x in vectors), pos, pos, see(encoding))
    np.testing.assert_allclose(narrow, wanted, atol=1e-5)
    assert narrow.dtype == np.float32
    hidden = code["attention"](*vectors, pos, pos, see(encoding) & (np.arange(TOKENS) > 0)[:, None])
    assert not hidden[:, :, 0].any() and hidden[:, :, 1:].all()
    for wrong in (pos - 1, pos + LENGTH):
        with pytest.raises(ValueError, match=f"from 0 to {LENGTH - 1}: .* --length"):
            code["attention"](*vectors, pos, wrong, see(encoding))
    words = " ".join(code["__doc__"].split())
    paper, version = encoding.about.paper, f"posx {posx.__version__}"
    facts = (posx.encodings.spec_text(encoding), version, paper, f"0 to {LENGTH - 1}", "[b, h, t, 6]", "attention(q, k")
    assert [fact for fact in facts if fact not in words] == []
    assert ("a text of 64 tokens" in words) == ("dynamic" in spec) and ("Arrays: drawn." in words) == bool(params)


@pytest.mark.parametrize("form", ["torch", "torch-flex"])
def test_torch_snippets_are_python_and_name_no_numpy(form):
    for source in (load_code(spec, form) for spec in SPECS):
        assert "np." not in source and "$" not in source and "#?" not in source
        assert ("def score_mod(score, b, h, q_idx, kv_idx):" in source) == (form == "torch-flex")


@pytest.mark.peers
@pytest.mark.parametrize("spec", SPECS)
def test_torch_snippets_compute_what_attend_does(spec):
    import torch

    encoding, params, vectors, pos = case(spec)
    q, k, v = (torch.from_numpy(x).float() for x in vectors)
    at, code, flex = torch.from_numpy(pos), {}, {}
    exec(load_code(spec, "torch"), code)
    wanted = attend(encoding, params, vectors, pos)
    np.testing.assert_allclose(code["attention"](q, k, v, at, at, torch.from_numpy(see(encoding))), wanted, atol=1e-5)
    assert (
        code["attention"](*(x.bfloat16() for x in (q, k, v)), at, at, torch.ones(1, dtype=bool)).dtype
        == q.bfloat16().dtype
    )
    # FlexAttention takes indices for positions: they are those of the first row.
    exec(load_code(spec, "torch-flex"), flex)
    seen = (lambda b, h, i, j: i >= j) if encoding.causal_only else (lambda b, h, i, j: i >= 0)
    mask = flex["create_block_mask"](seen, None, None, TOKENS, TOKENS, "cpu")
    np.testing.assert_allclose(flex["attention"](q[:1], k[:1], v[:1], mask), wanted[:1], atol=1e-5)
    far = torch.tensor(LENGTH)
    assert flex["score_mod"](torch.tensor(0.0), torch.tensor(0), torch.tensor(0), far, far).isnan()
    for attention in (lambda x: flex["attention"](x, x, x, mask), lambda x: code["check"](torch.arange(x.shape[2]))):
        with pytest.raises(ValueError, match="--length"):
            attention(torch.zeros(1, 4, LENGTH + 1, DIMS.head_dim))


def test_export_refuses_what_no_table_holds(capsys):
    assert SNIPPETS == (*CODE_FORMS, "latex")
    for spec, hook in (("cope", "score"), ("rope+path", "features"), ("shaw", "by_distance, term query")):
        for form in ("numpy", "torch-flex"):
            name, words = spec.rpartition("+")[2], ["export", f"--encoding={spec}", f"--as={form}"]
            refused(capsys, 2, words, f"{name}: its hook {hook}", "--as=latex")
    refused(capsys, 2, ["export", "--encoding=rope", "--to=x"], "--encoding goes with --as", "torch-flex")
    refused(capsys, 2, ["export", "--as=nump", "--encoding=rope"], "Did you mean 'numpy'?")
    refused(capsys, 2, ["export", "--as=numpy", "--encoding=alibi", "--length=1048577"], "from 2 to 1,048,576")


def test_export_writes_the_formula_as_latex(capsys):
    """Encodings that no table holds have one too."""
    code, out, err = tiny.call(capsys, "export", "--encoding=cope+alibi(num_heads=8)", "--as=latex", "--num_heads=8")
    assert code == 0 and out.count("\\[\n") == out.count("\n\\]") == 2, err
    assert r"\operatorname{slope}_h" in out and "Alibi(num_heads=8, scale=" in out and "arXiv 2108.12409" in out


def test_export_writes_the_trained_arrays_of_a_run(capsys, whole, tmp_path):
    words = ["export", "--as=numpy", f"--workdir={whole}", "--length=40"]
    code, out, err = tiny.call(capsys, *words, f"--out={tmp_path / 't5.py'}", "--encoding=t5")
    assert code == 0 and out.startswith(f"{tmp_path / 't5.py'}  t5("), err
    snippet = {}
    exec((tmp_path / "t5.py").read_text(), snippet)
    assert f"Arrays: of whole at step {tiny.STEPS}, layer 1 of 1." in snippet["__doc__"]
    _, params, _ = posx.load(whole)
    dims = posx.Dims(model_dim=32, num_heads=2, head_dim=16, num_layers=1, train_len=16)
    wanted = posx.build("t5", dims).by_distance(params["shared"]["encoding_0"], jnp.arange(40)).bias
    np.testing.assert_allclose(snippet["bias"](np.array([39]), np.arange(40))[0, :, 0, ::-1], wanted, rtol=1e-6)
    refused(capsys, 2, [*words, "--encoding=alibi"], "has no layer with alibi. Its layers are 1: t5")
    refused(capsys, 2, [*words, "--layer=0"], "has no layer 0")
    refused(capsys, 2, [*words, "--num_heads=8"], "sizes of its own")


def test_export_writes_one_of_several_layers(capsys, tmp_path):
    settings = base_config("rope(base=500)")
    settings.model.update({"num_layers": 2, "layer_policy": ("encoding", "rope(base=20)")})
    made_rows.start(tmp_path / "run", run_config(settings))
    words = ["export", "--as=numpy", f"--workdir={tmp_path / 'run'}"]
    refused(capsys, 2, words, "layers 1, 2 differ in encoding or learned arrays. Name one by --layer")
    for layer in (["--layer=2"], ["--encoding=rope(base=20)"]):
        code, out, err = tiny.call(capsys, *words, *layer)
        assert code == 0 and out.startswith('"""rope(base=20, rotary_dim='), err
