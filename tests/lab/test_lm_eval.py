"""lm-evaluation-harness on a run of posx: its numbers are those of the model's logits and of the protocol."""

import json
import math
import subprocess
import sys
import types

import jax
import numpy as np
import pytest

import posx
import posx.lab.lm_eval
from posx.errors import ConfigError
from posx.lab.generate import Sampling, generate
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
    posx.lab.lm_eval.register()
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
    model = posx.lab.lm_eval.register()(run=str(whole), max_length=64)
    steps = [list(text.encode()) for text in ("ab.cd", "xyzzy", "lmnop")]
    steps[2][2] = model.eot_token_id
    script = lambda *_, **__: (np.array(column) for column in zip(*steps, strict=True))  # noqa: E731
    monkeypatch.setattr(posx.lab.lm_eval, "generate", script)
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
        model = posx.lab.lm_eval.register()(run=str(whole), max_length=length)
        found = answer("loglikelihood", model, ("", "kara"), ("losto" * 9, "kara"))
        long = [*tokenizer.encode("losto" * 9), *tokenizer.encode("kara")][-length - 1 :]
        for (total, _), tokens in zip(found, ([tokenizer.eos, *b"kara"], long), strict=True):
            own = np.asarray(log_probs(np.array([tokens], np.int32)))[0, range(len(tokens) - 1), tokens[1:]]
            assert total == pytest.approx(own[-4:].sum(), abs=1e-4)
    with pytest.raises(ConfigError, match="max_length=24, but a continuation has 30 tokens"):
        answer("loglikelihood", model, ("a", "b" * 30))


@pytest.mark.peers
def test_the_command_of_the_harness_knows_posx(whole, tasks):
    command = [
        sys.executable,
        "-m",
        "posx.lab.lm_eval",
        "--model",
        "posx",
        "--model_args",
        f"run={whole},max_length=16",
    ]
    command += ["--tasks", "tiny_rolling", "--include_path", str(tasks), "--batch_size", "auto"]
    done = subprocess.run(command, capture_output=True, text=True, env=tiny.environment(HF_HOME=str(tasks / "cache")))
    assert done.returncode == 0 and "bits_per_byte" in done.stdout, done.stderr
    command[5:7] = ["--model_args", f"run={tasks}"]
    done = subprocess.run(command, capture_output=True, text=True, env=tiny.environment(HF_HOME=str(tasks / "cache")))
    assert done.returncode == 4 and "Traceback" not in done.stderr, done.stderr


LLAMA = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 64, "vocab_size": 258, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
GEMMA = LLAMA | {"head_dim": 16, "num_key_value_heads": 2, "sliding_window": 8}
FOREIGN = {"plain": ("LlamaConfig", LLAMA), "begin": ("LlamaConfig", LLAMA), "gemma": ("Gemma3TextConfig", GEMMA)}


@pytest.fixture(scope="module", params=FOREIGN)
def imported(request, tmp_path_factory):
    """A random model of transformers and its run; "begin" and "gemma" have a tokenizer that puts <bos> before texts."""
    import tokenizers as hf
    import torch
    import transformers

    cls, sizes = FOREIGN[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, cls)(**sizes))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(folder / "hf")
    letters = hf.pre_tokenizers.ByteLevel.alphabet()
    made = hf.Tokenizer(hf.models.BPE({one: n for n, one in enumerate(["<bos>", "<eos>", *letters])}, []))
    made.pre_tokenizer = hf.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = hf.decoders.ByteLevel()
    made.add_special_tokens(["<bos>", "<eos>"])
    if request.param != "plain":
        made.post_processor = hf.processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 0)])
    transformers.PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<bos>", eos_token="<eos>").save_pretrained(
        folder / "hf"
    )
    code, _, err = tiny.run("import", f"--from={folder / 'hf'}", f"--to={folder / 'run'}")
    assert code == 0, err
    return folder


@pytest.mark.peers
@pytest.mark.parametrize("add_bos_token", [None, True, False])
def test_first_tokens_are_those_of_transformers_in_lm_eval(imported, add_bos_token):
    """Contexts, empty contexts, rolled documents and generated text, under each value of add_bos_token."""
    from lm_eval.models.huggingface import HFLM

    settings = {"add_bos_token": add_bos_token, "max_length": 16, "batch_size": 2}
    theirs = HFLM(pretrained=str(imported / "hf"), device="cpu", dtype="float32", **settings)
    ours = posx.lab.lm_eval.register()(run=str(imported / "run"), **settings)
    assert (ours.prefix_token_id, ours.eot_token_id) == (theirs.prefix_token_id, theirs.eot_token_id) == (0, 1)
    pairs = [("", "kara"), ("kara", " losto"), ("<bos>kara", " mi"), ("losto " * 5, "nevi"), ("", "<bos>ka")]
    for text, _ in pairs:
        assert ours.tok_encode(text) == theirs.tok_encode(text)
    for one, other in zip(answer("loglikelihood", ours, *pairs), answer("loglikelihood", theirs, *pairs), strict=True):
        assert one[0] == pytest.approx(other[0], abs=1e-3) and one[1] == other[1]
    texts = [(text,) for text in [*TEXTS, "<bos>kara losto"]]
    found, wanted = (answer("loglikelihood_rolling", model, *texts) for model in (ours, theirs))
    assert found == pytest.approx(wanted, abs=1e-3)
    asked = [(text, {"until": [], "max_gen_toks": 5}) for text in TEXTS[:3]]
    assert answer("generate_until", ours, *asked) == answer("generate_until", theirs, *asked)


@pytest.mark.peers
@pytest.mark.parametrize("scored", [False, True])
def test_rolling_with_a_begin_token_equals_lm_eval(imported, scored):
    """With add_bos_token=False on texts alone. The template's own begin token is scored if documents begin with it."""
    from lm_eval.models.huggingface import HFLM

    log_probs, tokenizer = log_probs_of(imported / "run")
    begins = list(tokenizer.template) if scored else []
    documents, stream = [], [tokenizer.begin]
    for text in TEXTS:
        documents.append(len(stream))
        stream += [*begins, *tokenizer.encode(text).tolist(), tokenizer.eos]
    (row,) = posx.evaluate(
        log_probs, np.array(stream), "lm_eval_rolling", [16], documents=documents, separators=[tokenizer.eos]
    )
    settings = {"max_length": 16, "batch_size": 2, "add_bos_token": None if scored else False}
    theirs = HFLM(pretrained=str(imported / "hf"), device="cpu", dtype="float32", **settings)
    wanted = answer("loglikelihood_rolling", theirs, *((text,) for text in TEXTS))
    assert row["nll"] * row["num_targets"] == pytest.approx(-sum(wanted), rel=1e-5)


@pytest.fixture
def harness(whole, monkeypatch):
    """A function that makes the model without the library, two of whose helpers are replaced."""
    utils = types.ModuleType("lm_eval.models.utils")
    utils.normalize_gen_kwargs = lambda settings, default: {"max_gen_toks": default, "until": []} | settings
    utils.postprocess_generated_text = lambda text, stop, think: text
    for name in ("lm_eval", "lm_eval.models"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "lm_eval.models.utils", utils)

    def make(**settings):
        model = posx.lab.lm_eval.Harness(str(whole), **settings)
        model.cache_hook = types.SimpleNamespace(add_partial=lambda *_: None)
        return model

    return make


def written(model, prompts, **settings):
    settings = {"temperature": 1.0, "max_gen_toks": 6} | settings
    return model.generate_until([types.SimpleNamespace(args=(prompt, settings)) for prompt in prompts])


@pytest.mark.slow
def test_repeated_samples_differ_at_every_batch_size(harness):
    prompts = ["kara"] * 6 + ["losto"] * 2
    found = [written(harness(batch_size=rows), prompts) for rows in (8, 3)]
    assert len(set(found[0][:6])) == 6 and found[0][6] != found[0][7]
    assert found[0] == found[1]  # the draws of a request do not depend on its batch
    again, other = (written(harness(batch_size=8, seed=seed), prompts) for seed in (0, 1))
    assert again == found[0] and not set(other) & set(again)
    assert len(set(written(harness(), ["kara"] * 3, temperature=0.0))) == 1


def test_cut_contexts_are_counted_and_said(harness, capsys):
    model = harness(max_length=16)
    written(model, ["abcdefgh", "a" * 12, "a" * 30])  # 6 new tokens leave room for 10
    assert "2 of 3 contexts do not fit. They lost 22 tokens at their start, at most 20 each" in capsys.readouterr().err
    model._loglikelihood_tokens([(None, [1] * 15, [2] * 2), (None, [1] * 20, [2] * 2)])
    assert "1 of 2 contexts do not fit. They lost 5 tokens" in capsys.readouterr().err
    model._loglikelihood_tokens([(None, [1] * 15, [2] * 2)])
    assert capsys.readouterr().err == ""


def test_prefix_token_outside_the_model_is_refused(harness):
    assert harness(prefix_token_id=5).prefix_token_id == 5
    with pytest.raises(ConfigError, match="prefix_token_id=999: the model has ids 0 to"):
        harness(prefix_token_id=999)


def test_generation_ends_at_each_end_token(harness, monkeypatch):
    model = harness(max_length=64)
    given = {name: getattr(model._tokenizer, name) for name in ("begin", "encode_whole", "spell", "decode", "template")}
    model._tokenizer = types.SimpleNamespace(**given, vocab_size=257, eos=256, ends=(256, 122))
    steps = [list(b"abzde"), [97, 98, 99, 256, 100], list(b"lmnop")]
    monkeypatch.setattr(posx.lab.lm_eval, "generate", lambda *_, **__: map(np.array, zip(*steps, strict=True)))
    assert written(model, ["one", "two", "six"], max_gen_toks=5) == ["ab", "abc", "lmnop"]


def test_without_the_harness_one_line_says_so(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "lm_eval.api.model", None)
    assert posx.lab.lm_eval.run_harness() == 2
    assert "Install it: pip install 'posx[lm-eval]'" in capsys.readouterr().err
