"""The protocols of other libraries give their numbers: against transcriptions of the originals, and the originals."""

import math

import numpy as np
import pytest

from posx.errors import ConfigError, DataError
from posx.evaluation import HfStrided, LmEvalRolling, Nonoverlapping, evaluate, loss_difference
from posx.evaluation.statistics import few_places

VOCAB, EOS = 11, 0
rng = np.random.default_rng(5)
PAIRS, PLACES = rng.normal(size=(VOCAB, VOCAB)), rng.normal(size=(40, VOCAB))
#: Documents shorter and longer than windows, one empty, one of whole windows, one a token longer.
DOCUMENTS = [rng.integers(1, VOCAB, size).tolist() for size in (3, 0, 1, 16, 17, 31, 40, 5)]
STREAM = np.array([EOS] + [token for text in DOCUMENTS for token in [*text, EOS]])
BEGINS = np.cumsum([1] + [len(text) + 1 for text in DOCUMENTS[:-1]])


def model(tokens):
    """Return log-probabilities [t, v] after tokens [t]: of the last token, its place, and the mean of all before."""
    tokens = np.asarray(tokens)
    mean = np.cumsum(PAIRS[tokens], axis=0) / np.arange(1, len(tokens) + 1)[:, None]
    logits = PAIRS[tokens] + PLACES[: len(tokens)] + 2 * mean
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


def log_probs(tokens):
    return np.array([model(row[:-1])[np.arange(len(row) - 1), row[1:]] for row in tokens])


def windows_of_harness(tokens, length):
    """Yield (context, continuation) as lm-evaluation-harness 0.4.13 makes them, with one token of context."""
    done = min(length, len(tokens))
    if tokens:
        yield [EOS], tokens[:done]
    while done < len(tokens):
        count = min(len(tokens) - done, length)
        end = done + count
        yield tokens[end - length - 1 : end - count], tokens[end - count : end]
        done = end


def rolling(documents, length, of=model):
    """Return the summed log-likelihood of documents, each in the windows of the harness."""
    total = 0.0
    for text in documents:
        for context, rest in windows_of_harness(text, length):
            given = (context + rest)[-(length + 1) :]
            found = np.asarray(of(given[:-1]))[-len(rest) :]
            total += sum(found[n, token] for n, token in enumerate(rest))
    return total


def strided(tokens, length, stride):
    """Return the perplexity of transformers' recipe, line by line: the loss is a mean over the labels after a shift."""
    nll_sum, n_tokens, before = 0.0, 0, 0
    for begin in range(0, len(tokens), stride):
        end = min(begin + length, len(tokens))
        inputs = tokens[begin:end]
        labels = np.array(inputs)
        labels[: len(labels) - (end - before)] = -100
        found, shifted = model(inputs)[:-1], labels[1:]
        loss = -np.mean([found[n, token] for n, token in enumerate(shifted) if token != -100])
        num_loss_tokens = (labels != -100).sum() - 1
        nll_sum, n_tokens = nll_sum + loss * num_loss_tokens, n_tokens + num_loss_tokens
        before = end
        if end == len(tokens):
            break
    return math.exp(nll_sum / n_tokens)


@pytest.mark.parametrize("length", [1, 4, 8, 16, 39])
def test_rolling_equals_the_harness(length):
    sizes = 1 + (np.arange(len(STREAM)) % 3)
    sizes[STREAM == EOS] = 0
    (row,) = evaluate(
        log_probs, STREAM, "lm_eval_rolling", [length], documents=BEGINS, token_bytes=sizes, separators=[EOS]
    )
    total, count = rolling(DOCUMENTS, length), sum(map(len, DOCUMENTS))
    assert row["nll"] == pytest.approx(-total / count, rel=1e-6)
    assert row["bpb"] == pytest.approx(-total / sizes.sum() / math.log(2), rel=1e-6)
    assert (row["num_targets"], row["num_documents"], row["num_separators"]) == (count, 7, 0)
    assert row["num_windows"] == sum(len(list(windows_of_harness(text, length))) for text in DOCUMENTS)


def test_rolling_has_the_same_targets_at_every_length():
    rows = evaluate(log_probs, STREAM, "lm_eval_rolling", [4, 16], documents=BEGINS)
    assert rows[0]["targets"] == rows[1]["targets"] and rows[0]["nll"] != rows[1]["nll"]
    plain = evaluate(log_probs, STREAM, "nonoverlapping", [16])[0]
    with pytest.raises(ConfigError, match="different targets"):
        loss_difference([rows[1]], [plain])


@pytest.mark.parametrize("end", [0, 1])
def test_rolling_without_documents_reads_one_text(end):
    text = STREAM[: len(STREAM) - end].tolist()  # with the separator at the end, and without
    (row,) = evaluate(log_probs, text, LmEvalRolling(), [8])
    assert row["num_targets"] == len(STREAM) - 2
    assert row["nll"] == pytest.approx(-rolling([STREAM[1:-1].tolist()], 8) / row["num_targets"], rel=1e-6)


@pytest.mark.parametrize("count", [2, 3, 4, 25, 37, 1000])
def test_rolling_scores_the_first_targets(count):
    (row,) = evaluate(log_probs, STREAM, LmEvalRolling(count), [8], documents=BEGINS)
    left, kept = count, []
    for text in DOCUMENTS:
        kept.append(text[:left])
        left -= len(kept[-1])
    assert row["num_targets"] == sum(map(len, kept)) == min(count, 113)
    assert row["nll"] == pytest.approx(-rolling(kept, 8) / row["num_targets"], rel=1e-6)


def test_rolling_begins_each_document_after_the_begin_token():
    """Token 0 of the stream takes the place of the separator before a document."""
    begin = 7
    stream = np.concatenate([[begin], STREAM[1:]])
    (row,) = evaluate(log_probs, stream, "lm_eval_rolling", [8], documents=BEGINS, separators=[EOS])
    total = 0.0
    for text in DOCUMENTS:
        for context, rest in windows_of_harness(text, 8):
            context = [begin] if context == [EOS] else context
            given = (context + rest)[-9:]
            total += log_probs([given])[0, -len(rest) :].sum()
    assert row["num_targets"] == sum(map(len, DOCUMENTS)) and row["num_documents"] == 7
    assert row["nll"] == pytest.approx(-total / row["num_targets"], rel=1e-6)


def test_rolling_scores_text_that_no_separator_ends():
    """Two documents without a separator between them, the second of which begins with the token of the start."""
    stream = np.array([EOS, 3, 4, 5, EOS, 6, 7])
    (row,) = evaluate(log_probs, stream, "lm_eval_rolling", [8], documents=[1, 4], separators=[])
    assert row["num_targets"] == 6
    assert row["nll"] == pytest.approx(-rolling([[3, 4, 5], [EOS, 6, 7]], 8) / 6, rel=1e-6)


def test_a_document_at_the_end_of_the_stream_holds_no_token():
    """Offsets often list the end too. The last token was scored as a document of its own."""
    for begins in ([1, 4], [1, 4, 8], [1, 4, 8, 8]):
        text = [EOS, 3, 4, 5, 6, 7, 8, 9]
        for protocol in ("lm_eval_rolling", "nonoverlapping"):
            (row,) = evaluate(log_probs, text, protocol, [4], documents=begins, separators=[])
            assert (row["num_documents"], row["own_context"]) == (2, 0.5625)
            if protocol == "lm_eval_rolling":
                assert row["nll"] == pytest.approx(-rolling([text[1:4], text[4:]], 4) / 7)


def test_rolling_asks_for_separators_that_it_cannot_know():
    with pytest.raises(ConfigError, match=r"at place 3 of the stream follows token .*pass separators=\[\]"):
        evaluate(log_probs, STREAM, "lm_eval_rolling", [8], documents=[1, 3])
    with pytest.raises(DataError, match="0 targets, but lm_eval_rolling needs 1"):
        evaluate(log_probs, [EOS, EOS], "lm_eval_rolling", [8])


@pytest.mark.parametrize(
    ("length", "stride"),
    [
        *[(8, 4), (8, 3), (16, 16), (2, 1)],
        *(pytest.param(*pair, marks=pytest.mark.slow) for pair in ((8, 1), (8, 7), (8, 8), (16, 8))),
    ],
)
@pytest.mark.parametrize(
    "size", [2, 9, 13, *(pytest.param(n, marks=pytest.mark.slow) for n in (7, 8, 12, 48, 55, len(STREAM)))]
)
def test_strided_equals_the_recipe(length, stride, size):
    text = STREAM[20 : 20 + size]
    if len(text) % length == 1 and stride == length:  # the recipe is NaN: its last window has no target
        text = text[:-1]
    (row,) = evaluate(log_probs, STREAM[20 : 20 + size], HfStrided(stride=stride), [length])
    assert row["ppl"] == pytest.approx(strided(text, length, stride), rel=1e-6)
    assert row["num_targets"] == len(text) - (1 if stride < length else row["num_windows"])


def test_strided_weighs_windows_as_the_recipe_does():
    """The first window weighs its targets in full, each later one a target less than it has."""
    nats = lambda tokens: -np.ones(tokens.shape) * (4 - (tokens[:, :1] > 0))  # noqa: E731
    (row,) = evaluate(nats, np.arange(14), HfStrided(stride=4), [8])
    assert row["nll"] == pytest.approx((4 * 7 + 3 * 3 + 3 * 1) / 11)
    assert sum(row["block_nll"]) == pytest.approx(row["nll"] * 13, rel=1e-3)


def test_strided_rows_pair_with_their_own_kind_alone():
    rows = evaluate(log_probs, STREAM, ["hf_strided", Nonoverlapping(), HfStrided(stride=8)], [8, 16])
    halves, plain, eights = rows[:2], rows[2], rows[4:]
    assert [row["stride"] for row in rows] == [4, 8, 8, 16, 8, 8]
    assert halves[0]["targets"] == halves[1]["targets"] == eights[1]["targets"] != eights[0]["targets"]
    gap = loss_difference([halves[1]], [halves[0]])
    assert gap.effect()[0] == pytest.approx(halves[1]["ppl"] / halves[0]["ppl"], rel=1e-3)
    for other in (plain, eights[0]):
        with pytest.raises(ConfigError, match="different targets"):
            loss_difference([halves[1]], [other])


def test_strided_scores_the_first_targets():
    (row,) = evaluate(log_probs, STREAM, HfStrided(20, stride=4), [8])
    assert row["num_targets"] == 20 and row["ppl"] == pytest.approx(strided(STREAM[:21], 8, 4), rel=1e-6)


@pytest.mark.parametrize("count", [20, 21, 22, 500])
def test_strided_windows_without_overlap_are_one_place(count):
    """They score as many targets as asked, of the start of the text. So a part of the text gives no interval."""
    (row,) = evaluate(log_probs, STREAM, HfStrided(count, stride=8), [8], documents=BEGINS)
    whole = count == 500
    assert row["num_targets"] == (len(STREAM) - row["num_windows"] if whole else count) and row["num_stretches"] == 1
    assert whole == (few_places(row) == "") and (whole or "(1 stretch of" in few_places(row))


@pytest.mark.parametrize(("stride", "length"), [(9, 8), (-1, 8), (0, 1)])
def test_strided_refuses_strides_that_skip_tokens(stride, length):
    with pytest.raises(ConfigError, match=r"stride=.* must be between 1 and the length"):
        evaluate(log_probs, STREAM, HfStrided(stride=stride), [length])


@pytest.fixture(scope="module")
def llama():
    """A small random Llama of transformers, and its log-probabilities as `evaluate` takes them."""
    import torch
    import transformers

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(**sizes, vocab_size=300, bos_token_id=None, eos_token_id=0)
    made = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))

    def of_next(tokens):
        with torch.inference_mode():
            return torch.log_softmax(made(torch.from_numpy(tokens[:, :-1]).long()).logits, dim=-1)

    return made, of_next


@pytest.mark.peers
@pytest.mark.parametrize("length", [7, 24])
def test_rolling_equals_lm_eval_on_a_llama(llama, tmp_path, length):
    import transformers
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    from posx.lab.data import train_bpe

    tokenizer = train_bpe(["some words and other words " * 9], 270)
    tokenizer.save(tmp_path / "tokenizer.json")
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(tmp_path / "tokenizer.json"), eos_token="<|endoftext|>"
    )
    texts = ["words " * n + "and more" for n in (1, 2, 3, 9)]
    harness = HFLM(pretrained=llama[0], tokenizer=theirs, max_length=length, batch_size=2, device="cpu")
    found = harness.loglikelihood_rolling(
        [Instance("loglikelihood_rolling", {}, (text,), n) for n, text in enumerate(texts)], disable_tqdm=True
    )
    ids, eos = tokenizer.encode_batch(texts), tokenizer.eos
    assert harness.prefix_token_id == eos and [harness.tok_encode(text) for text in texts] == [x.tolist() for x in ids]
    stream = np.concatenate([[eos], *(np.append(one, eos) for one in ids)])
    documents = 1 + np.cumsum([0, *(len(one) + 1 for one in ids[:-1])])
    (row,) = evaluate(llama[1], stream, "lm_eval_rolling", [length], documents=documents)
    assert row["nll"] * row["num_targets"] == pytest.approx(-sum(found), rel=1e-6)


@pytest.mark.peers
@pytest.mark.parametrize(("length", "stride"), [(16, 8), (16, 5), (16, 16), (64, 32)])
def test_strided_equals_the_recipe_on_a_llama(llama, length, stride):
    """The loop of transformers' documentation, with the loss that its model gives for labels."""
    import torch

    tokens = torch.from_numpy(np.random.default_rng(0).integers(0, 300, (1, 45)))
    nll_sum, n_tokens, before = 0.0, 0, 0
    for begin in range(0, 45, stride):
        end = min(begin + length, 45)
        inputs = tokens[:, begin:end]
        labels = inputs.clone()
        labels[:, : -(end - before)] = -100
        with torch.no_grad():
            loss = llama[0](inputs, labels=labels).loss
        num_loss_tokens = (labels != -100).sum().item() - labels.size(0)
        nll_sum, n_tokens, before = nll_sum + loss * num_loss_tokens, n_tokens + num_loss_tokens, end
        if end == 45:
            break
    (row,) = evaluate(llama[1], tokens[0], HfStrided(stride=stride), [length])
    assert row["ppl"] == pytest.approx(math.exp(nll_sum / n_tokens), rel=1e-5)
