"""The masked objective: the law of hiding, the loss, and a run that trains, is measured, resumes and is refused."""

import json
import shutil

import jax
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import posx
from posx.evaluation.masked import PseudoPerplexity
from posx.lab.config import ModelConfig, RunConfig
from posx.lab.data.masking import Masked, mask_id, masked_batch, num_hidden
from posx.lab.model import make_model
from posx.lab.runs.folder import RunFolder
from posx.lab.runs.targets import run_stream
from posx.lab.runs.text import run_text
from posx.lab.training.step import loss
from tests import tiny
from tests.lab.commands import refused


class Text:
    """A text of 200 words whose token at place n of row r is a function of both."""

    class tokenizer:
        vocab_size = 200

    def batch(self, *, seed, step, batch_size, length, rows=slice(None)):
        return ((np.arange(batch_size)[:, None] * 7 + np.arange(length + 1)) % 200).astype(np.int32)[rows]


HOW = {"seed": 3, "step": 5, "batch_size": 400, "length": 40}


def test_shares_of_hidden_tokens_are_those_of_bert():
    inputs, targets, weights = masked_batch(Text(), **HOW)
    assert_array_equal(targets, Text().batch(**HOW)[:, :-1])
    hidden = weights > 0
    assert (hidden.sum(axis=1) == 6).all() and num_hidden(40) == 6
    assert_allclose(weights.mean(axis=1), 1, rtol=1e-6)
    assert_array_equal(inputs[~hidden], targets[~hidden])
    n, masked, kept = hidden.sum(), (inputs == mask_id(200))[hidden], (inputs == targets)[hidden]
    other = inputs[hidden][~masked & ~kept]
    for count, share in ((masked.sum(), 0.8), (kept.sum(), 0.1 + 0.1 / 200), (len(other), 0.1 * 199 / 200)):
        assert abs(count - n * share) < 4 * np.sqrt(n * share * (1 - share)), (count, n * share)
    assert other.min() >= 0 and other.max() < 200 and len(set(other.tolist())) > 100
    places = hidden.sum(axis=0)  # no place is preferred
    assert (np.abs(places - 60) < 5 * np.sqrt(60 * 0.85)).all()


def test_hidden_tokens_depend_on_seed_step_and_row_alone():
    whole = masked_batch(Text(), **HOW)
    for rows in (slice(0, 150), slice(150, 400), slice(399, 400)):
        for found, wanted in zip(masked_batch(Text(), **HOW, rows=rows), whole, strict=True):
            assert_array_equal(found, wanted[rows])
    fewer = masked_batch(Text(), **HOW | {"batch_size": 10})
    assert_array_equal(fewer.inputs, whole.inputs[:10])
    for other in (HOW | {"seed": 4}, HOW | {"step": 6}):
        assert (masked_batch(Text(), **other).weights != whole.weights).any()
    assert [num_hidden(n) for n in (1, 3, 10, 64, 100)] == [1, 1, 2, 10, 15]


def test_loss_is_the_mean_over_hidden_tokens():
    config = ModelConfig(num_layers=1, model_dim=16, num_heads=2, mask_policy=("full",))
    model = make_model(config, "t5(bidirectional=true)", 201, 40)
    params = model.init(jax.random.key(0))
    batch = masked_batch(Text(), **HOW | {"batch_size": 4})
    logits_of, pos = jax.jit(model), np.arange(40, dtype=np.int32)
    logits = np.float64(logits_of(params, batch.inputs, pos))
    log_probs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    of_targets = np.take_along_axis(log_probs, batch.targets[..., None], axis=-1)[..., 0]
    found = jax.jit(loss, static_argnums=(0, 4))(model, params, Masked(*batch), None, "auto")
    assert_allclose(found, -of_targets[batch.weights > 0].mean(), rtol=1e-5)
    moved = batch.inputs.copy()
    moved[:, -1] = (moved[:, -1] + 1) % 200
    assert np.abs(logits_of(params, moved, pos)[:, 0] - logits[:, 0]).max() > 1e-4


@pytest.fixture(scope="module")
def run_folder(site, tmp_path_factory):
    """A run of masked tokens, evaluated to four times its training length."""
    folder = tmp_path_factory.mktemp("masked") / "run"
    assert tiny.run(*words(site, folder))[0] == 0
    return folder


def words(site, folder, encoding="rope", objective="masked"):
    return [
        "train", f"--config={site / 'tiny.py'}:{encoding}", f"--workdir={folder}",
        f"--config.train.objective={objective}", "--config.train.steps=8", "--config.eval.lengths=16,64",
    ]  # fmt: skip


@pytest.mark.slow
def test_run_of_masked_tokens_is_measured_by_pseudo_perplexity(run_folder):
    """The row at 4 L is the mean of -log p at hidden tokens, from the logits of the loaded model."""
    folder = RunFolder(run_folder)
    rows, run = folder.measured_rows(), folder.read_config()
    assert [(row["protocol"], row["eval_len"], row["status"]) for row in rows] == [
        ("pseudo_perplexity", 16, "ok"), ("pseudo_perplexity", 64, "ok")
    ]  # fmt: skip
    assert len({row["targets"] for row in rows}) == 1 and rows[0]["num_targets"] == 256 // 20 * 3
    assert run.model.mask_policy == ("full",) and rows[0]["settings"]["train.objective"] == "masked"
    apply, params, tokenizer = posx.load(run_folder)
    assert params["embedding"].shape[0] == tokenizer.vocab_size + 1
    stream, documents = run_stream(run_text(folder, run, {}))
    targets = PseudoPerplexity(rows[1]["num_targets"], 64).targets(stream, [64], documents)
    hidden, losses = targets.hidden_places(len(stream)), []
    for start, size in zip(targets.starts + 1, targets.sizes, strict=True):
        for at in range(start, start + size, 64):
            first = min(at, start + size - 64)
            text, places = stream[first : first + 64], hidden[first : first + 64].copy()
            logits = np.float64(apply(params, np.where(places, tokenizer.vocab_size, text)[None].astype(np.int32)))[0]
            log_probs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
            places[: at - first] = False  # scored by the window before
            losses += [-log_probs[n, text[n]] for n in np.flatnonzero(places)]
    assert len(losses) == rows[1]["num_targets"]
    assert_allclose(np.mean(losses), rows[1]["nll"], rtol=1e-4)


@pytest.mark.slow
def test_run_of_masked_tokens_resumes_bit_for_bit(run_folder, tmp_path, site, capsys):
    again = tmp_path / "run"
    shutil.copytree(run_folder, again)
    for path in (again / "checkpoints").glob("8*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    (again / "DONE").unlink()
    code, _, err = tiny.call(capsys, *words(site, again))
    assert code == 0 and "resuming run at step 4" in err, err
    assert tiny.digests(again, 8) == tiny.digests(run_folder, 8)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "wanted"),
    [
        (["evaluate", "--protocol=sliding"], ["sliding measures next tokens", "Name pseudo_perplexity"]),
        (["evaluate", "--masks=causal"], ["model.mask_policy=causal hides later tokens"]),
        (["evaluate", "--encoding=rope+log_length"], ["log_length is for causal masks"]),
        (["generate", "--prompt=ka"], ["posx generate needs a model of next tokens"]),
        (["export", "--to=elsewhere"], ["it predicts masked tokens from both sides"]),
    ],
)
def test_masked_models_refuse_what_needs_next_tokens(run_folder, capsys, command, wanted):
    line = refused(capsys, 2, [*command, f"--workdir={run_folder}"], *wanted)
    assert "masked" in line


@pytest.mark.parametrize(
    ("encoding", "more", "wanted"),
    [
        ("t5", [], ["t5 is for causal masks", "Write t5(bidirectional=true)"]),
        ("rope+fox", [], ["fox is for causal masks", "Choose another encoding"]),
        ("dape(base=cope)", [], ["cope is for causal masks"]),
        ("rope", ["--config.model.mask_policy=window(size=8)"], ["window(size=8) hides later tokens", "Leave it out"]),
        (
            "rope",
            ["--config.model.mask_policy=full,causal", "--config.model.num_layers=2"],
            ["full,causal hides later tokens"],
        ),
        (
            "rope",
            ["--config.data.source=task:parity"],
            ["task:parity, whose items have next tokens", "or another task or text"],
        ),
        ("rope", ["--config.eval.protocols=per_position,answers"], ["per_position measures", "answers measures"]),
        ("rope", ["--config.model.vocab_size=257"], ["257 ids and <mask>"]),
    ],
)
def test_settings_that_do_not_fit_the_objective_are_one_line(site, tmp_path, capsys, encoding, more, wanted):
    refused(capsys, 2, [*words(site, tmp_path / "run", encoding), *more], *wanted)
    assert not (tmp_path / "run" / "config.json").exists()


@pytest.mark.parametrize(
    ("objective", "more", "wanted"),
    [
        ("next_token", ["--config.model.mask_policy=full"], "full shows each token the next one"),
        ("next_token", ["--config.data.source=task:dead_leaves"], "whose items have hidden tokens to predict"),
        ("mask", [], "train.objective"),
    ],
)
def test_other_objectives_refuse_what_is_of_masked_runs(site, tmp_path, capsys, objective, more, wanted):
    refused(capsys, 2, [*words(site, tmp_path / "run", objective=objective), *more], wanted, "masked")


@pytest.mark.slow
def test_settings_of_masked_runs_are_resolved_and_read_back(run_folder):
    values = json.loads((run_folder / "config.json").read_text())
    assert values["asked"]["model"]["mask_policy"] == [] and values["model"]["mask_policy"] == ["full"]
    assert values["eval"]["protocols"] == ["pseudo_perplexity"]
    assert RunConfig.from_json(values).hash == values["hash"]
