"""lm-evaluation-harness on a run of posx: its numbers are those of the model's logits and of the protocol."""

import json
import math
import subprocess
import sys

import jax
import numpy as np
import pytest

import posx
import posx.lm_eval
from posx.errors import ConfigError
from posx.generate import Sampling, generate
from tests import tiny

#: Texts of many lengths, for windows of 16: shorter, equal, longer.
TEXTS = ["kara", "losto ka", "minen losto nera.", "ka", "a b c d e" * 6, "losto nevi kara mi lo ne ka ra sto"]
COMMON = """
dataset_path: json
dataset_kwargs:
  data_files: {{test: {data}}}
test_split: test
"""
TASKS = {
    "rolling": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: bits_per_byte}, {metric: byte_perplexity}, {metric: word_perplexity}]
""",
    "choice": """
output_type: multiple_choice
doc_to_text: "{{text}}"
doc_to_choice: ["kara", "losto ka"]
doc_to_target: 1
""",
    "write": """
output_type: generate_until
doc_to_text: "{{text}}"
doc_to_target: "{{text}}"
generation_kwargs: {until: ["zz"], max_gen_toks: 5}
metric_list: [{metric: exact_match}]
""",
}


@pytest.fixture
def tasks(tmp_path):
    """A folder with the tasks on the texts."""
    data = tmp_path / "texts.jsonl"
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    for name, text in TASKS.items():
        (tmp_path / f"{name}.yaml").write_text(f"task: tiny_{name}" + COMMON.format(data=data) + text)
    return tmp_path


def answers(results, task):
    """Return what the model answered to each document."""
    return [sample["filtered_resps"] for sample in sorted(results["samples"][task], key=lambda one: one["doc_id"])]


def log_probs_of(run):
    apply, params, tokenizer = posx.load(run)
    return lambda tokens: jax.nn.log_softmax(apply(params, tokens[:, :-1])), tokenizer


@pytest.mark.peers
@pytest.mark.parametrize("batch_size", [3, "auto"])
def test_the_harness_measures_a_run(whole, tasks, monkeypatch, batch_size):
    import lm_eval

    monkeypatch.setenv("HF_HOME", str(tasks / "cache"))
    posx.lm_eval.register()
    results = lm_eval.simple_evaluate(
        model="posx", model_args={"run": str(whole)}, tasks=[f"tiny_{name}" for name in TASKS], batch_size=batch_size,
        task_manager=lm_eval.tasks.TaskManager(include_path=str(tasks), include_defaults=False), bootstrap_iters=0,
    )  # fmt: skip
    log_probs, tokenizer = log_probs_of(whole)
    ids = tokenizer.encode_batch(TEXTS)
    # The rolling log-likelihood is that of the protocol.
    stream = np.concatenate([[tokenizer.eos], *(np.append(one, tokenizer.eos) for one in ids)]).astype(int)
    documents = 1 + np.cumsum([0, *(len(one) + 1 for one in ids[:-1])])
    sizes = (stream != tokenizer.eos).astype(int)
    (row,) = posx.evaluate(
        log_probs, stream, "lm_eval_rolling", [16], documents=documents, token_bytes=sizes, separators=[tokenizer.eos]
    )
    found = results["results"]["tiny_rolling"]
    assert found["bits_per_byte,none"] == pytest.approx(row["bpb"], rel=1e-5)
    assert found["byte_perplexity,none"] == pytest.approx(2 ** row["bpb"], rel=1e-5)
    words = sum(len(text.split(" ")) for text in TEXTS)
    assert found["word_perplexity,none"] == pytest.approx(math.exp(row["nll"] * row["num_targets"] / words), rel=1e-5)
    # Log-likelihoods of continuations, without padding or batches. The harness puts a space before a choice.
    for text, choices in zip(TEXTS, answers(results, "tiny_choice"), strict=True):
        for choice, (total, greedy) in zip((" kara", " losto ka"), choices, strict=True):
            rest = tokenizer.encode(choice)
            tokens = np.append(tokenizer.encode(text), rest)[-17:].astype(np.int32)
            every = np.asarray(log_probs(tokens[None]))[0]
            own = every[np.arange(len(tokens) - 1), tokens[1:]][-len(rest) :]
            assert total == pytest.approx(own.sum(), abs=1e-4)
            assert greedy == bool((every.argmax(axis=-1) == tokens[1:])[-len(rest) :].all())
    # Greedy text.
    apply, params, _ = posx.load(whole)
    for text, (written,) in zip(TEXTS, answers(results, "tiny_write"), strict=True):
        prompt, sampling = tokenizer.encode(text)[-11:], Sampling(temperature=0, vocab_size=tokenizer.vocab_size)
        new = [int(step[0]) for step in generate(apply.model, params, [prompt], 5, sampling=sampling)]
        end = new.index(tokenizer.eos) if tokenizer.eos in new else 5
        assert written == tokenizer.decode(new[:end])


def answer(kind, model, *requests):
    from lm_eval.api.instance import Instance

    return getattr(model, kind)([Instance(kind, {}, one, n) for n, one in enumerate(requests)])


@pytest.mark.peers
def test_generation_stops_at_stop_sequences_and_the_end(whole, monkeypatch):
    model = posx.lm_eval.register()(run=str(whole), max_length=64)
    steps = [list(text.encode()) for text in ("ab.cd", "xyzzy", "lmnop")]
    steps[2][2] = model.eot_token_id
    script = lambda *_, **__: (np.array(column) for column in zip(*steps, strict=True))  # noqa: E731
    monkeypatch.setattr(posx.lm_eval, "generate", script)
    settings = {"until": [".", "zz"], "max_gen_toks": 5}
    asked = [("one", settings), ("two2", settings), ("three", settings)]
    assert answer("generate_until", model, *asked) == ["ab", "xy", "lm"]
    for bad in ({"top_p": 0.5}, {"max_gen_toks": 64}):
        with pytest.raises(ConfigError, match=r"top_p: posx samples|max_gen_toks=64 must be between 1 and 63"):
            answer("generate_until", model, ("one", settings | bad))


@pytest.mark.peers
def test_longer_windows_and_empty_contexts(whole):
    """The context is the end-of-text token if there is none, and the last `max_length` tokens if there are more."""
    log_probs, tokenizer = log_probs_of(whole)
    for length in (16, 24):
        model = posx.lm_eval.register()(run=str(whole), max_length=length)
        found = answer("loglikelihood", model, ("", "kara"), ("losto" * 9, "kara"))
        long = [*tokenizer.encode("losto" * 9), *tokenizer.encode("kara")][-length - 1 :]
        for (total, _), tokens in zip(found, ([tokenizer.eos, *b"kara"], long), strict=True):
            own = np.asarray(log_probs(np.array([tokens], np.int32)))[0, range(len(tokens) - 1), tokens[1:]]
            assert total == pytest.approx(own[-4:].sum(), abs=1e-4)
    with pytest.raises(ConfigError, match="max_length=24, but a continuation has 30 tokens"):
        answer("loglikelihood", model, ("a", "b" * 30))


@pytest.mark.peers
def test_the_command_of_the_harness_knows_posx(whole, tasks):
    command = [sys.executable, "-m", "posx.lm_eval", "--model", "posx", "--model_args", f"run={whole},max_length=16"]
    command += ["--tasks", "tiny_rolling", "--include_path", str(tasks), "--batch_size", "auto"]
    done = subprocess.run(command, capture_output=True, text=True, env=tiny.environment(HF_HOME=str(tasks / "cache")))
    assert done.returncode == 0 and "bits_per_byte" in done.stdout, done.stderr
    command[5:7] = ["--model_args", f"run={tasks}"]
    done = subprocess.run(command, capture_output=True, text=True, env=tiny.environment(HF_HOME=str(tasks / "cache")))
    assert done.returncode == 4 and "Traceback" not in done.stderr, done.stderr


def test_without_the_harness_one_line_says_so(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "lm_eval.api.model", None)
    assert posx.lm_eval.main() == 2
    assert "Install it: pip install 'posx[lm-eval]'" in capsys.readouterr().err
