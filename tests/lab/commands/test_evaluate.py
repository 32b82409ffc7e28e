"""`posx evaluate`: rows that are missing are computed, and wrong questions are one line."""

import json
import math
import re
import shutil

import jax
import numpy as np
import pytest
import tokenizers as hf

import posx
import posx.lab.runs.evaluate
from posx.evaluation.masked import PseudoPerplexity
from posx.evaluation.protocols import Nonoverlapping
from posx.evaluation.targets import Documents
from posx.lab.config import EvalConfig, base_config, run_config
from posx.lab.data import ByteTokenizer, DataConfig, prepare
from posx.lab.files.rows import ROW_VERSION
from posx.lab.results.table import read_results
from posx.lab.runs.folder import RunFolder
from posx.lab.runs.targets import Asked, EvaluationPlan, few_documents
from tests import tiny
from tests.lab.commands import refused, watched
from tests.made_rows import as_lines

BAD_QUESTIONS = {
    "lengths": (["evaluate", "--lengths=64,16"], ["(64, 16)", "increase"]),
    "not numbers": (["evaluate", "--lengths=16,b"], ["--lengths=16,b: b is not a whole number"]),
    "protocol": (["evaluate", "--protocol=slidin"], ["'slidin' is unknown", "sliding"]),
    "stride": (["evaluate", "--protocol=sliding", "--lengths=16,32", "--stride=20"], ["stride=20", "16"]),
    "stride of sliding": (["evaluate", "--protocol=sliding", "--lengths=16,32", "--stride=20"], ["stride=20", "16"]),
    "less than a window": (["evaluate", "--lengths=16,512"], ["eval.num_targets=256", "512 tokens"]),
    "default stride": (["evaluate", "--protocol=sliding", "--lengths=2,32"], ["stride=4", "2 tokens"]),
    "executor": (["evaluate", "--executor=fast"], ["'fast' is unknown"]),
    "a flag and its setting": (
        ["evaluate", "--lengths=16", "--config.eval.lengths=32"],
        ["--lengths and --config.eval.lengths are about the same setting"],
    ),
    "config": (["evaluate", "--config=x.py"], ["takes no config"]),
    "override": (["generate", "--config.train.steps=3"], ["takes no config"]),
    "what": (["plot", "--what=lenghts"], ["'lenghts' is unknown"]),
    "temperature": (["generate", "--temperature=-1"], ["temperature=-1"]),
    "top_k": (["generate", "--top_k=-1"], ["top_k=-1"]),
    "num_tokens": (["generate", "--num_tokens=0"], ["--num_tokens=0"]),
    "number": (["generate", "--num_tokens=ten"], ["num_tokens", "ten"]),
    "seed": (["generate", f"--seed={2**70}"], ["--seed=", "beyond all range"]),
}


@pytest.mark.parametrize(("words", "wanted"), BAD_QUESTIONS.values(), ids=BAD_QUESTIONS.keys())
def test_wrong_questions_about_a_run(capsys, whole, words, wanted):
    before = (whole / "eval.jsonl").read_bytes()
    refused(capsys, 2, [*words, f"--workdir={whole}"], *wanted)
    assert (whole / "eval.jsonl").read_bytes() == before


def test_evaluate_takes_a_folder_of_sweeps_as_plot_does(capsys, sweeps):
    """Runs are named by their paths, which tell those of one name apart."""
    code, out, err = tiny.call(capsys, "evaluate", f"--workdir={sweeps}", "--lengths=16,32", "--dry_run")
    asked = "a/t5: nonoverlapping, per_position at (16, 32)\n"
    assert code == 7 and out.startswith(asked)
    assert "posx: b/t5: " in err and "config.json cannot be read" in err
    words = ["--lengths=16, 32", "--protocol=nonoverlapping, per_position,", "--dry_run"]  # with spaces
    assert tiny.call(capsys, "evaluate", f"--workdir={sweeps / 'a'}", *words)[1].startswith(asked.removeprefix("a/"))
    code, out, err = tiny.call(capsys, "evaluate", f"--workdir={sweeps}", "--print_config")
    assert code == 0 and "has these settings" in err and "the first of 2 runs" in err


@pytest.mark.parametrize("protocol", [Nonoverlapping, PseudoPerplexity])
@pytest.mark.parametrize(("longest", "stretch"), [(32, 256), (300, 512)])
def test_the_named_number_of_targets_gives_8_places(protocol, longest, stretch):
    stream, documents = np.arange(20_001) % 7, Documents(np.arange(0, 20_000, 2000), np.arange(2000, 22_000, 2000))

    def few(num_targets):
        one = protocol.from_run(EvalConfig(num_targets=num_targets), 16, longest)
        plan = EvaluationPlan(one, longest, (longest,), (), {}, ())
        return few_documents(Asked(plan, longest, one.targets(stream, [longest], documents), None, None, None), 10)

    said = few(stretch)
    assert f"each stretch of {stretch} tokens is one place" in said
    number = int(said.rpartition("=")[2])
    assert not few(number) and few(number // 2)


@pytest.mark.slow
def test_bits_per_byte_of_a_stored_tokenizer_are_of_the_text(capsys, site, tmp_path):
    """Byte fallback, and no token for a space: each of them is three tokens and one byte."""
    pieces = [("<unk>", 0.0), ("</s>", 0.0), *((f"<0x{byte:02X}>", -9.0) for byte in range(256))]
    made = hf.Tokenizer(
        hf.models.Unigram(pieces + [(letter, -3.0) for letter in "aeiou"], unk_id=0, byte_fallback=True)
    )
    made.pre_tokenizer = hf.pre_tokenizers.Metaspace(prepend_scheme="always")
    made.decoder = hf.decoders.Sequence([hf.decoders.ByteFallback(), hf.decoders.Metaspace(prepend_scheme="always")])
    made.add_special_tokens(["</s>"])
    made.save(str(tmp_path / "tok.json"))
    words = [
        "train", f"--config={site / 'tiny.py'}", f"--workdir={tmp_path / 'run'}", "--config.eval.num_targets=0",
        f"--config.data.tokenizer={tmp_path / 'tok.json'}", "--config.train.steps=3",
        "--config.eval.protocols=nonoverlapping", "--config.eval.lengths=16,",
    ]  # fmt: skip
    code, _, err = tiny.call(capsys, *words)
    assert code == 0, err
    held_out, eos = (
        prepare(
            DataConfig(str(site / "text"), tokenizer=str(tmp_path / "tok.json"), cache_dir=str(site / "cache"))
        ).validation,
        1,
    )
    apply, params, tokenizer = posx.load(tmp_path / "run")
    ends = zip(held_out.offsets[:-1], held_out.offsets[1:], strict=True)
    documents = [tokenizer.decode(held_out.tokens[start:end]) for start, end in ends]
    assert set(documents) <= {path.read_text(encoding="utf-8") for path in (site / "text").iterdir()}
    size = sum(len(document.encode()) for document in documents)
    assert len(re.findall(rf"{size:,} bytes in \d documents? \(.* held out; unigram .* [\d,]+ parameters", err)) == 1
    assert tiny.call(capsys, "evaluate", f"--workdir={tmp_path / 'run'}", "--lengths=32")[0] == 0
    stream = np.concatenate([[eos], held_out.tokens]).astype(int)
    sizes = np.concatenate([[0], held_out.token_bytes])
    log_probs = lambda tokens: jax.nn.log_softmax(apply(params, tokens[:, :-1]))  # noqa: E731
    rows = tiny.rows(tmp_path / "run" / "eval.jsonl")
    assert [row["eval_len"] for row in rows] == [16, 32]
    assert all(row["num_bytes"] == size and row["num_separators"] == held_out.num_documents for row in rows)
    (same,) = posx.evaluate(log_probs, stream, "nonoverlapping", [32], token_bytes=sizes, separators=[eos])
    assert rows[1]["bpb"] == pytest.approx(same["bpb"], rel=1e-5)
    assert same["bpb"] < same["nll"] * same["num_targets"] / size / math.log(2), "separators cost something"


def test_rows_have_the_perplexity_of_token_frequencies(whole):
    """It is that of a model of counts in the training text plus one, on the targets of the row."""
    run = RunFolder(whole).read_config()
    text = prepare(run.data)
    counts = 1 + np.bincount(text.train.tokens, minlength=text.tokenizer.vocab_size)
    log_probs = np.log(counts / counts.sum())
    stream, protocol = (
        np.insert(text.validation.tokens, 0, text.tokenizer.eos),
        Nonoverlapping.from_run(run.eval, 16, 32),
    )
    documents = 1 + text.validation.offsets[:-1]
    same = posx.evaluate(lambda tokens: log_probs[tokens[:, 1:]], stream, protocol, [16, 32], documents=documents)
    rows = [row for row in tiny.rows(whole / "eval.jsonl") if row["protocol"] == "nonoverlapping"]
    assert [row["targets"] for row in rows] == [row["targets"] for row in same]
    assert [row["unigram_ppl"] for row in rows] == pytest.approx([row["ppl"] for row in same])
    assert set(read_results(whole).unigram_ppl) == {rows[0]["unigram_ppl"]}


def test_evaluate_computes_only_what_is_missing(capsys, workdir):
    words = ["evaluate", f"--workdir={workdir}"]
    before = (workdir / "eval.jsonl").read_bytes()
    code, out, _ = tiny.call(capsys, *words)
    assert code == 0 and (workdir / "eval.jsonl").read_bytes() == before and "| t5 |" in out
    asked = [*words, "--lengths=16,32,64", "--protocol=nonoverlapping,sliding"]
    assert tiny.call(capsys, *asked)[0] == 0
    rows = tiny.rows(workdir / "eval.jsonl")
    new = [(row["protocol"], row["eval_len"]) for row in rows[3:]]
    assert sorted(new) == [("nonoverlapping", 64), ("sliding", 16), ("sliding", 32), ("sliding", 64)]
    assert {row["num_targets"] for row in rows if row["protocol"] == "sliding"} == {64}
    assert {row["stride"] for row in rows if row["protocol"] == "sliding"} == {4}
    after = (workdir / "eval.jsonl").read_bytes()
    assert tiny.call(capsys, *asked)[0] == 0
    assert (workdir / "eval.jsonl").read_bytes() == after


@pytest.mark.slow
def test_evaluate_under_the_protocols_of_other_libraries(capsys, workdir):
    """Each keeps its rows. Windows without overlap score other tokens, and no table has both."""
    words = ["evaluate", f"--workdir={workdir}", "--protocol=lm_eval_rolling,hf_strided", "--num_targets=400"]
    code, out, err = tiny.call(capsys, *words, "--lengths=16,32")
    assert code == 0, err
    rows = tiny.rows(workdir / "eval.jsonl")[3:]
    assert [(row["protocol"], row["eval_len"], row["stride"]) for row in rows] == [
        ("lm_eval_rolling", 16, 16), ("lm_eval_rolling", 32, 32), ("hf_strided", 16, 8), ("hf_strided", 32, 16),
    ]  # fmt: skip
    assert {row["num_targets"] for row in rows} == {400} and rows[2]["targets"] == rows[3]["targets"]
    assert "rolling log-likelihood" in out.lower() and "strided perplexity" in out.lower() and "stride 8 to 16" in out
    after = (workdir / "eval.jsonl").read_bytes()
    assert tiny.call(capsys, *words)[0] == 0 and (workdir / "eval.jsonl").read_bytes() == after
    code, out, err = tiny.call(capsys, *words, "--lengths=16,32", "--stride=16")
    assert code == 0 and "1 row left out, scored on other targets" in out, err
    refused(capsys, 2, [*words, "--stride=20"], "eval.stride=20", "shortest window, 16")


def test_windows_without_the_begin_token_are_said(capsys, workdir, monkeypatch):
    """The tokenizer's template has one. The named protocol puts it before each window, on the same targets."""
    monkeypatch.setattr(ByteTokenizer, "template", (256,))
    words = ["--num_targets=192", "--lengths=16", "--protocol=nonoverlapping,begin_every_window"]
    code, _, err = tiny.call(capsys, "evaluate", f"--workdir={workdir}", *words)
    assert code == 0 and "puts the begin token 256 () before every text, but not every window begins with it: " in err
    assert " of 12 of nonoverlapping. --protocol begin_every_window puts it before each" in err
    rows = [row for row in tiny.rows(workdir / "eval.jsonl") if row["num_targets"] == 192]
    assert [row["protocol"] for row in rows] == ["nonoverlapping", "begin_every_window"]
    assert rows[0]["targets"] == rows[1]["targets"] and rows[0]["nll"] != rows[1]["nll"]


def test_no_targets_are_all_targets_as_in_the_settings(capsys, workdir):
    words = ["evaluate", f"--workdir={workdir}", "--lengths=32,320"]
    refused(capsys, 2, [*words, "--num_targets=300"], "at least as many targets, or 0 for all")
    code, _, err = tiny.call(capsys, *words, "--num_targets=0", "--protocol=nonoverlapping")
    assert code == 0, err
    (row,) = [row for row in tiny.rows(workdir / "eval.jsonl") if row["eval_len"] == 320]
    assert row["num_targets"] > 300
    code, out, _ = tiny.call(capsys, "evaluate", f"--workdir={workdir}", "--dry_run")
    assert code == 0 and "(16, 32)" in out


def test_lists_of_flags_may_have_spaces_and_quotes(capsys, workdir):
    words = ["evaluate", f"--workdir={workdir}", "--dry_run", "--lengths= 16, '32'"]
    code, out, _ = tiny.call(capsys, *words, "--protocol=nonoverlapping, sliding")
    assert code == 0 and "nonoverlapping, sliding at (16, 32)" in out


def test_a_lost_sliding_row_is_measured_on_the_same_targets(capsys, workdir):
    asked = ["evaluate", f"--workdir={workdir}", "--lengths=16,32,64", "--protocol=sliding"]
    assert tiny.call(capsys, *asked)[0] == 0
    path = workdir / "eval.jsonl"
    rows = tiny.rows(path)
    lost = next(row for row in rows if row["protocol"] == "sliding" and row["eval_len"] == 32)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows if row != lost))
    assert tiny.call(capsys, *asked)[0] == 0
    again = tiny.rows(path)
    assert len(again) == len(rows) and again[-1] == lost


def test_rows_of_other_targets_or_blocks_stay_out_of_a_curve(capsys, workdir):
    """Rows of a version before digests, and of other blocks, as an old folder holds them."""
    path = workdir / "eval.jsonl"
    new = [row | {"run_id": "run"} for row in tiny.rows(path)]
    assert all(
        row["schema_version"] == ROW_VERSION and row["num_documents"] and row["num_stretches"] == 1 for row in new
    )
    first = {key: value for key, value in new[0].items() if key not in ("targets", "num_documents", "num_stretches")}
    old = [first | {"schema_version": 1}, new[1] | {"block_len": 128, "block_nll": [500.0, 500.0]}]
    path.write_text(as_lines((*old, new[2])))
    code, out, _ = tiny.call(capsys, "evaluate", f"--workdir={workdir}", "--protocol=nonoverlapping")
    assert code == 0 and f"{math.exp(1000 / 256):.3f}" not in out
    again = tiny.rows(path)[2:]
    names = ("protocol", "eval_len", "targets", "block_len")
    assert [[row[name] for name in names] for row in again] == [[row[name] for name in names] for row in new[:2]]
    assert [row["ppl"] for row in again] == pytest.approx([row["ppl"] for row in new[:2]])
    table = read_results(workdir)
    table = table[table.left_out == ""]
    assert list(table.ppl[table.protocol == "nonoverlapping"]) == [row["ppl"] for row in again]


def test_rows_where_memory_ran_out_are_tried_again(capsys, workdir):
    path = workdir / "eval.jsonl"
    rows = tiny.rows(path)
    path.write_text(as_lines((rows[0], rows[1] | {"status": "oom"}, rows[2])))
    code, _, err = tiny.call(capsys, "evaluate", f"--workdir={workdir}")
    assert code == 0, err
    again = tiny.rows(path)[3]
    numbers = {name: value for name, value in rows[1].items() if isinstance(value, float)}
    assert {name: again[name] for name in numbers} == pytest.approx(numbers, rel=1e-5)
    same = {name: rows[1][name] for name in ("block_nll", "checksum")}
    assert again | numbers | same == rows[1] | {"run_id": "run"}


def test_partly_failed_evaluation_says_where_and_keeps_rows(capsys, workdir, monkeypatch):
    module = posx.lab.runs.scores
    real = module.score_rows

    def fail(model, way, num_devices, params, tokens, pos):
        if tokens.shape[1] > 33:
            raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")
        return real(model, way, num_devices, params, tokens, pos)

    monkeypatch.setattr(module, "score_rows", fail)
    words = ["evaluate", f"--workdir={workdir}", "--lengths=16,48,64", "--protocol=nonoverlapping"]
    line = refused(capsys, 7, words, "at 48: oom", "at 64: oom")
    assert "at 16" not in line
    assert [row["status"] for row in tiny.rows(workdir / "eval.jsonl")[3:]] == ["oom", "oom"]


def test_the_bar_of_an_evaluation_weighs_windows_by_cost(capsys, workdir, monkeypatch):
    """Every batch of every protocol and length is reported, what compiles too; passes that are shared count once."""
    seen = watched(monkeypatch, posx.lab.runs.evaluate)
    (workdir / "eval.jsonl").unlink()
    words = ["--lengths=16,32", "--protocol=nonoverlapping,sliding,per_position", "--config.eval.batch_tokens=64"]
    code, _, err = tiny.call(capsys, "evaluate", f"--workdir={workdir}", *words)
    assert code == 0, err
    assert [done for _, done in seen] == sorted(done for _, done in seen) and seen[-1][1] == seen.total
    starts = [seen.index(one) for one in seen if one[0].startswith("compiling")]
    passes = [seen[a:b] for a, b in zip(starts, [*starts[1:], None], strict=True)]
    lengths = [("16" if " 16 " in one[0][0] else "32") for one in passes]
    assert lengths == ["16", "32", "16", "32"]
    costs = [(one[-1][1] - one[0][1]) for one in passes]
    short, long = costs[:2]  # of as many tokens
    assert short < long < 2 * short and all(len(one) > 2 for one in passes)


# One is evaluated in this process, several are evaluated in a process each.
@pytest.mark.slow
@pytest.mark.parametrize("distances", [(30,), (30, 40)])
def test_evaluate_puts_other_encodings_on_trained_weights(capsys, workdir, distances):
    """Each is a run of its own beside the trained one. Its rows name the run whose weights they measure."""
    before = {path: path.read_bytes() for path in workdir.glob("*.json*")}
    trained = tiny.rows(workdir / "eval.jsonl")
    fields = json.loads((workdir / "config.json").read_text())["layers"][0]
    buckets, near = fields["num_buckets"], fields["max_distance"]  # the learned table has as many rows
    texts = ("t5(max_distance=30)", "max_distance=40")[: len(distances)]
    asked = ["evaluate", f"--workdir={workdir}", "--protocol=nonoverlapping"]
    code, out, err = tiny.call(capsys, *asked, f"--encoding={', '.join((*texts, 't5'))}", "--dry_run")
    assert all(f"max_distance: {near} -> {far}, in all layers" in err for far in distances)
    assert f"{workdir.name}: t5 changes nothing" in err
    assert code == 0 and out.count("nonoverlapping at (16, 32)") == len(distances) + 1
    assert list(workdir.parent.iterdir()) == [workdir]
    code, out, err = tiny.call(capsys, *asked, f"--encoding={', '.join(texts)}")
    assert code == 0, err
    assert all(f"| t5(num_buckets={buckets}, max_distance={far}) |" in out for far in distances)
    assert {path: path.read_bytes() for path in before} == before, "its own encoding is the run itself"
    scored = [row for row in trained if row["protocol"] == "nonoverlapping"]
    for far in distances:
        changed = workdir.parent / f"{workdir.name}@t5-num_buckets={buckets}-max_distance={far}"
        rows = tiny.rows(changed / "eval.jsonl")
        assert [row["targets"] for row in rows] == [row["targets"] for row in scored]
        assert all(a["nll"] != b["nll"] for a, b in zip(rows, scored, strict=True))
        assert {row["settings"]["parent.encoding"] for row in rows} == {"t5"}
        assert {row["settings"]["parent.hash"] for row in rows} == {trained[0]["hash"]}
    assert tiny.call(capsys, "plot", f"--workdir={workdir.parent}", "--what=extrapolation")[0] == 0
    code, out, err = tiny.call(capsys, "generate", f"--workdir={changed}", "--prompt=ka")
    assert code == 0, err


def test_masks_of_trained_weights_are_in_labels(capsys, workdir):
    asked = ["evaluate", f"--workdir={workdir}", "--protocol=nonoverlapping", "--lengths=16,32"]
    code, out, err = tiny.call(capsys, *asked, "--masks=window(sinks=2, size=4)")
    assert code == 0 and "| t5 under window(size=4, sinks=2) |" in out, err
    child = workdir.parent / f"{workdir.name}@window-size=4-sinks=2"
    assert tiny.call(capsys, *asked, "--masks=window(size=4, sinks=2)")[0] == 0
    assert tiny.call(capsys, *asked, "--masks=window(size=4, sinks=2)", "--layers=all")[0] == 0
    assert {*workdir.parent.iterdir()} == {workdir, child}, "one run has one folder"
    refused(capsys, 2, [*asked, "--masks=causal,window(size=4)"], "would be in none of the 1 layers")
    refused(capsys, 2, [*asked, "--masks=window(size=5000000000)"], "below 2**31")
    refused(capsys, 2, [*asked[:1], f"--workdir={child}", "--masks=causal"], "Name that run")
    refused(capsys, 2, [*asked, "--encoding=,"], "names nothing")
    refused(capsys, 2, [*asked, "--layers=full"], "changes nothing alone")
    refused(capsys, 2, [*asked[:2], "--lengths=abc", "--masks=window(size=2)"], "not a whole number")
    assert {*workdir.parent.iterdir()} == {workdir, child}
    shutil.rmtree(workdir)
    refused(capsys, 4, [*asked[:1], f"--workdir={child}", "--lengths=64"], "Put that run back")


def test_changes_of_one_name_are_two_runs(capsys, tmp_path):
    """The name has the encoding of the layers with the run's own, and these two changes differ in the others."""
    settings = base_config("rope(base=500)")
    settings.model.update({"num_layers": 2, "model_dim": 32, "layer_policy": ("encoding", "rope(base=20)")})
    RunFolder(tmp_path / "run").path.mkdir()
    RunFolder(tmp_path / "run").write_config(run_config(settings))
    texts = "--encoding=frequencies=ntk(factor=2), rope(base=500, frequencies=ntk(factor=2))"
    _, out, err = tiny.call(capsys, "evaluate", f"--workdir={tmp_path / 'run'}", "--layers=all", texts, "--dry_run")
    name = "run@rope-base=500-frequencies=ntk-factor=2+layers=all"
    assert f"{name}: frequencies: geometric -> ntk(factor=2), in all layers" in err
    assert re.search(rf"{re.escape(name)}\+[0-9a-f]{{8}}: base: 20 -> 500, .*, in 1 of 2 layers \(2\)", err)
    assert len(re.findall(r"^run@.*: nonoverlapping", out, re.MULTILINE)) == 2


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("alibi", "needs the parameters none, but t5 has learned"),
        ("t5(per_layer=true)", "Use an encoding with the same parameters"),
        ("rope(frequencies=yarm)", "Did you mean 'yarn'"),
    ],
)
def test_encodings_that_do_not_fit_the_weights_are_refused(capsys, workdir, text, problem):
    refused(capsys, 2, ["evaluate", f"--workdir={workdir}", f"--encoding={text}"], problem)
    assert list(workdir.parent.iterdir()) == [workdir]
