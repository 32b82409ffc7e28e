"""Protocol self-checks: which targets are scored, with how much context, and what becomes of the sums."""

import importlib
import itertools
import math

import jax.numpy as jnp
import numpy as np
import pytest

import posx
from posx.errors import ConfigError, DataError
from posx.evaluation import Nonoverlapping, PerPosition, Sliding, UndefinedLength, evaluate

VOCAB = 7
rng = np.random.default_rng(0)
STREAM = rng.integers(0, VOCAB, 1001)
#: A loss of its own for every pair of neighbours, so that no two targets can be exchanged unnoticed.
WEIGHTS = rng.uniform(0.1, 3.0, (VOCAB, VOCAB))
TABLE = np.float32(-np.log(WEIGHTS / WEIGHTS.sum(axis=1, keepdims=True)))
LENGTHS = (10, 16, 64, 250)


def bigram(tokens):
    """log p of the next token, from the one before it alone: the same at every length."""
    return -TABLE[tokens[:, :-1], tokens[:, 1:]]


def losses(stream) -> np.ndarray:
    return TABLE[stream[:-1], stream[1:]].astype(np.float64)


def numbered(tokens):
    """A "model" whose loss is the amount of context: column i of a window has i + 1 tokens before its target."""
    return -np.broadcast_to(np.arange(1, tokens.shape[1], dtype=np.float32), (tokens.shape[0], tokens.shape[1] - 1))


@pytest.mark.parametrize("protocol", ["nonoverlapping", "sliding", "per_position"])
def test_a_uniform_model_has_perplexity_v(protocol):
    sizes = STREAM + 1
    uniform = lambda t: jnp.full(t.shape, -math.log(VOCAB))  # noqa: E731
    rows = evaluate(uniform, STREAM, protocol, LENGTHS, token_bytes=sizes, separators=[])
    assert len(rows) == (1 if protocol == "per_position" else 4)
    for row in rows:
        assert row["ppl"] == pytest.approx(VOCAB, rel=1e-6)
        assert row["bpb"] == pytest.approx(math.log2(VOCAB) * row["num_targets"] / row["num_bytes"], rel=1e-6)
        assert row["status"] == "ok"


def test_nonoverlapping_scores_every_target_once_at_every_length():
    for row in evaluate(bigram, STREAM, "nonoverlapping", LENGTHS):
        assert row["num_targets"] == 1000 and row["num_windows"] == math.ceil(1000 / row["eval_len"])
        assert row["nll"] == pytest.approx(losses(STREAM).mean(), rel=1e-6)
        assert row["bpb"] is None and row["num_bytes"] is None and row["num_documents"] is None
        blocks = np.add.reduceat(losses(STREAM), [0, 256, 512, 768])
        assert row["block_len"] == 256 and row["block_nll"] == pytest.approx(blocks, rel=1e-5)


@pytest.mark.parametrize("num_targets", [64, 65, 256, 999, 5000])
def test_the_number_of_targets_is_kept_whatever_the_windows(num_targets):
    for row in evaluate(bigram, STREAM, Nonoverlapping(num_targets), (16, 64)):
        assert row["num_targets"] == min(num_targets, 1000)


def test_a_ragged_last_window_counts_by_its_tokens():
    stream = STREAM[:26]  # windows of 10, 10 and 5 targets
    (row,) = evaluate(numbered, stream, "nonoverlapping", [10])
    by_token = np.concatenate([np.arange(1, 11), np.arange(1, 11), np.arange(1, 6)]).mean()
    by_window = np.mean([5.5, 5.5, 3.0])
    assert row["nll"] == pytest.approx(by_token, rel=1e-6) and by_token != pytest.approx(by_window, rel=1e-2)


@pytest.mark.parametrize("length", [10, 16])
def test_sliding_by_whole_windows_equals_nonoverlapping(length):
    def depends_on_place(tokens):
        return bigram(tokens) * np.sqrt(np.arange(1, tokens.shape[1], dtype=np.float32))

    (slid,) = evaluate(depends_on_place, STREAM, Sliding(stride=length, num_targets=600), [length])
    assert slid["num_targets"] == 600 and slid["stride"] == length and slid["num_stretches"] == 2
    (plain,) = evaluate(depends_on_place, STREAM[length:], Nonoverlapping(600), [length])
    assert plain["num_stretches"] == 2 and slid["num_windows"] == plain["num_windows"]
    assert slid["nll"] == pytest.approx(plain["nll"], rel=1e-6)
    np.testing.assert_allclose(slid["block_nll"], plain["block_nll"], rtol=1e-4)


@pytest.mark.parametrize("stride", [1, 3, 4, 16])
def test_sliding_gives_every_target_its_context(stride):
    lengths, seen = (16, 20, 64), []

    def model(tokens):
        seen.append(tokens.shape)
        return numbered(tokens)

    for row in evaluate(model, STREAM, Sliding(stride, 300), lengths):
        length = row["eval_len"]
        assert row["num_targets"] == 300 and row["stride"] == stride
        # The scored targets of a window have length - stride + 1 ... length tokens before them, the nearest included;
        # the last window of the one stretch scores what is left of it.
        wanted = length - stride + 1 + np.arange(300) % stride
        assert row["nll"] == pytest.approx(wanted.mean(), rel=1e-6)
    assert {shape[1] for shape in seen} == {17, 21, 65}


def test_sliding_scores_equal_targets_and_no_warm_up():
    rows = evaluate(bigram, STREAM, Sliding(4, 0), (16, 20, 64))
    assert {row["num_targets"] for row in rows} == {936} and len({row["targets"] for row in rows}) == 1
    for row in rows:
        assert row["nll"] == pytest.approx(losses(STREAM)[64:].mean(), rel=1e-6)


def test_sliding_stride_defaults_to_a_quarter_of_the_shortest():
    (row,) = evaluate(bigram, STREAM, "sliding", [40])
    assert row["stride"] == 10


@pytest.mark.parametrize("num_targets", [0, 400])
def test_running_mean_of_per_position_is_nonoverlapping(num_targets):
    """Of 400 targets in one stretch, and of all in ten windows."""

    def improves_with_context(tokens):
        place = np.arange(1, tokens.shape[1], dtype=np.float32)
        return bigram(tokens) - 1 / place

    longest = 100
    (row,) = evaluate(improves_with_context, STREAM, PerPosition(num_targets), (20, 50, longest))
    assert row["eval_len"] == longest and row["position_edges"] == list(range(longest + 1))
    assert row["position_targets"] == [(num_targets or 1000) // longest] * longest
    plain = evaluate(improves_with_context, STREAM, Nonoverlapping(num_targets), (20, 50, longest))
    assert {one["targets"] for one in plain} == {row["targets"]}
    for one in plain:
        # A window of n tokens lacks only the context that no target of its first n positions has.
        running = np.mean(row["position_nll"][: one["eval_len"]])
        assert running == pytest.approx(one["nll"], rel=1e-4 if one["eval_len"] == longest else 0.1)


def test_per_position_of_ragged_windows_counts_what_is_there():
    (row,) = evaluate(numbered, STREAM[:26], PerPosition(), [10])
    assert row["position_nll"] == [float(n) for n in range(1, 11)]
    assert row["position_targets"] == [3] * 5 + [2] * 5
    (row,) = evaluate(numbered, STREAM, PerPosition(512), [200])
    assert row["position_nll"] == [float(n) for n in range(1, 201)]
    assert row["num_stretches"] == 2 and row["position_targets"] == [3] * 112 + [2] * 88, "the second goes on"


def test_bins_of_per_position_lose_no_target():
    stream = rng.integers(0, VOCAB, 6001)
    (row,) = evaluate(bigram, stream, PerPosition(), [3000])
    assert len(row["position_nll"]) == 1024 and row["position_edges"][-1] == 3000
    total = np.dot(row["position_nll"], row["position_targets"])
    assert sum(row["position_targets"]) == 6000 and total == pytest.approx(losses(stream).sum(), rel=1e-4)


@pytest.mark.parametrize("protocol", ["nonoverlapping", Sliding(5, 100), "per_position"])
def test_all_accepted_shapes_of_log_probs_agree(protocol):
    def whole(tokens):
        """[b, t, v]"""
        return jnp.asarray(-TABLE[tokens])

    def with_last(tokens):
        """[b, t]: the last column is not read."""
        return jnp.pad(jnp.asarray(bigram(tokens)), ((0, 0), (0, 1)), constant_values=jnp.nan)

    shapes = {
        "[b, t-1]": bigram,
        "[b, t]": with_last,
        "[b, t, v]": whole,
        "[b, t-1, v]": lambda tokens: whole(tokens)[:, :-1],
    }
    rows = {name: evaluate(f, STREAM, protocol, (10, 16)) for name, f in shapes.items()}
    assert all(row["status"] == "ok" for found in rows.values() for row in found)
    for name, found in rows.items():
        assert found == rows["[b, t-1]"], name


def test_a_model_of_another_shape_is_refused():
    for result in (np.zeros((1638, 3)), -1.0, None, np.zeros(1638), np.zeros((1638, 10, 3))):
        with pytest.raises(ConfigError, match=r"log_probs gave (shape .* expected|3 entries a token)"):
            evaluate(lambda tokens, result=result: result, STREAM, "nonoverlapping", [10])


class Tensor:
    """What matters of a torch tensor: it indexes as NumPy does, and is no array before it is detached and moved."""

    def __init__(self, values, state=("grad", "gpu")):
        self.values, self.shape, self.state = np.asarray(values), np.shape(values), state

    def __getitem__(self, key):
        return Tensor(self.values[key], self.state)

    def __array__(self, dtype=None, copy=None):
        assert not self.state, f"Can't convert a tensor with {self.state} to numpy"
        return self.values

    detach = lambda self: Tensor(self.values, [s for s in self.state if s != "grad"])  # noqa: E731
    cpu = lambda self: Tensor(self.values, [s for s in self.state if s != "gpu"])  # noqa: E731
    float = lambda self: Tensor(self.values.astype(np.float32), self.state)  # noqa: E731
    is_floating_point = lambda self: np.issubdtype(self.values.dtype, np.floating)  # noqa: E731


def torch_tensor(dtype):
    torch = importlib.import_module("torch")
    return lambda values: torch.tensor(np.array(values), dtype=getattr(torch, dtype), requires_grad=True)


@pytest.mark.parametrize(
    "kind",
    ["numpy", "jax", "bfloat16", "tensor", *(pytest.param(f"torch {d}", marks=pytest.mark.peers)
                                             for d in ("float32", "bfloat16"))],
)  # fmt: skip
def test_arrays_of_every_kind_are_accepted(kind):
    """Also those of a model in training."""
    if kind.startswith("torch"):
        wrap = torch_tensor(kind.split()[1])
    else:
        wrap = {
            "numpy": np.asarray, "jax": jnp.asarray, "bfloat16": lambda x: jnp.asarray(x, jnp.bfloat16),
            "tensor": Tensor,
        }[kind]  # fmt: skip
    close = 1e-2 if "bfloat16" in kind else 1e-6
    for model in (lambda t: wrap(bigram(t)), lambda t: wrap(-TABLE[t])):
        for row in evaluate(model, STREAM, ["nonoverlapping", "sliding", "per_position"], [16]):
            plain = evaluate(bigram, STREAM, row["protocol"], [16])[0]
            assert row["nll"] == pytest.approx(plain["nll"], rel=close) and row["targets"] == plain["targets"]
    for stream in (jnp.asarray(STREAM), Tensor(STREAM), STREAM.tolist(), STREAM.astype(np.uint8)):
        assert (
            evaluate(bigram, stream, "nonoverlapping", [16])[0]["targets"]
            == evaluate(bigram, STREAM, "nonoverlapping", [16])[0]["targets"]
        )


@pytest.mark.parametrize("protocol", ["nonoverlapping", "sliding", "per_position"])
def test_what_are_no_log_probabilities_is_refused(protocol):
    logits = rng.normal(0, 3, (VOCAB, VOCAB)).astype(np.float32)
    for model, words in (
        (
            lambda tokens: logits[tokens[:, :-1], tokens[:, 1:]],
            "log-probabilities up to .* above 0. If these are logits",
        ),
        (lambda tokens: logits[tokens], "probabilities sum to .* not 1. If these are logits"),
        (lambda tokens: logits[tokens] - 20, "probabilities sum to .* not 1. If these are logits"),
        (lambda tokens: np.exp(-TABLE)[tokens], "probabilities sum to .* not 1. If these are logits"),
    ):
        with pytest.raises(ConfigError, match=words) as caught:
            evaluate(model, STREAM, protocol, [16])
        assert "\n" not in str(caught.value) and "log_softmax" in str(caught.value)


@pytest.mark.parametrize(
    ("stream", "words"),
    [
        ("a text, not tokens", "stream: a text cannot be token ids"),
        (b"bytes", "a text cannot be token ids"),
        (["a", "text"], "token ids"),
        (STREAM / 2, "token ids"),
        (STREAM[None], r"stream: \[1, 1001\] of int64 cannot be token ids"),
        ([], "token ids"),
        ([[1, 2], [3]], "token ids"),
        ([1, 2**31], "0 to 2147483647 are allowed"),
    ],
)
def test_what_is_no_stream_of_tokens_is_refused(stream, words):
    with pytest.raises(ConfigError, match=words) as caught:
        evaluate(bigram, stream, "nonoverlapping", [10])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("sizes", [[1] * VOCAB, np.ones(1001), -np.ones(1001, int), [[1], [2, 3]]])
def test_token_bytes_that_are_not_of_the_stream_are_refused(sizes):
    with pytest.raises(ConfigError, match=r"the stream has 1001 tokens.*such as table\[stream\]"):
        evaluate(bigram, STREAM, "nonoverlapping", [10], token_bytes=sizes, separators=[])
    with pytest.raises(ConfigError, match=r"needs separators. .* separators=\[\] if the stream has none"):
        evaluate(bigram, STREAM, "nonoverlapping", [10], token_bytes=np.ones(1001, int))


@pytest.mark.parametrize("protocol", ["nonoverlapping", "per_position", Sliding(4, 100), Nonoverlapping(600)])
def test_bits_per_byte_are_of_the_text_without_separators(protocol):
    """Every other target is a separator, which costs 1 nat and has no bytes; a letter costs 3 bits and has its own."""
    stream = np.array([6, *(token for n in range(600) for token in (n % 4, 6))])
    sizes = np.where(stream == 6, 0, 1 + np.arange(1201) % 3)
    nll = lambda t: np.where(t[:, 1:] == 6, -1.0, -math.log(8)).astype(np.float32)  # noqa: E731
    (row,) = evaluate(nll, stream, protocol, [16], token_bytes=sizes, separators=[6])
    half = row["num_targets"] // 2
    assert row["num_separators"] == half and row["nll"] == pytest.approx((1 + math.log(8)) / 2, rel=1e-6)
    assert row["bpb"] == pytest.approx(3 * half / row["num_bytes"], rel=1e-6)
    if row["num_targets"] == 1200:
        assert row["num_bytes"] == sizes[1:].sum()
    (unknown,) = evaluate(nll, stream, protocol, [16])
    assert unknown["num_separators"] is unknown["bpb"] is None


def test_separators_that_do_not_fit_the_stream_are_told(capsys):
    options = {"stream": [*range(5)] * 8, "protocol": "nonoverlapping", "lengths": [8]}
    uniform = lambda t: np.full(t.shape, -math.log(5), np.float32)  # noqa: E731
    (row,) = evaluate(uniform, **options, separators=[4, 256], token_bytes=[1, 1, 1, 1, 0] * 8)
    assert row["num_separators"] == 8 and "notice: separators=[256] are not in the stream" in capsys.readouterr().err
    evaluate(uniform, **options, separators=[4], token_bytes=[1, 1, 1, 1, 0] * 8)
    evaluate(uniform, **options, separators=[], token_bytes=[1] * 40)
    assert not capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"separators=\[4\] have bytes of text in token_bytes. Set these to 0"):
        evaluate(uniform, **options, separators=[4], token_bytes=[1] * 40)
    for wrong in (4, "<eos>", {4}, [4.0]):
        with pytest.raises(ConfigError, match="separators: .* cannot be token ids"):
            evaluate(uniform, **options, separators=wrong)


def test_bytes_are_those_of_the_scored_occurrences():
    """The same token has other bytes in another place; three stretches of 256 targets of them are scored."""
    sizes = np.arange(4097)
    rows = evaluate(lambda t: np.full(t.shape, -2.0), np.arange(4097) % 7, Nonoverlapping(768), [32],
                    token_bytes=sizes, separators=[])  # fmt: skip
    starts = [554, 1920, 3285]  # their middles are those of thirds of the stream
    assert rows[0]["num_bytes"] == sum(sizes[1 + at : 257 + at].sum() for at in starts)


def test_short_batches_are_filled_up_and_not_counted():
    for batch_tokens in (1, 64, 100, 10**6):
        shapes = set()

        def model(tokens, shapes=shapes):
            shapes.add(tokens.shape)
            return bigram(tokens)

        (row,) = evaluate(model, STREAM, "nonoverlapping", [16], batch_tokens=batch_tokens)
        assert len(shapes) == 1, "every call must have one shape, or it compiles again"
        assert row["nll"] == pytest.approx(losses(STREAM).mean(), rel=1e-6)


def test_undefined_lengths_are_recorded_and_the_others_go_on():
    def model(tokens):
        if tokens.shape[1] - 1 > 50:
            raise UndefinedLength("defined up to 50")
        return bigram(tokens)

    rows = evaluate(model, STREAM, ["nonoverlapping", Sliding(4, 100), "per_position"], (10, 64, 40))
    found = [(row["protocol"], row["eval_len"], row["status"]) for row in rows]
    assert found == [
        ("nonoverlapping", 10, "ok"), ("nonoverlapping", 64, "undefined"), ("nonoverlapping", 40, "ok"),
        ("sliding", 10, "ok"), ("sliding", 64, "undefined"), ("sliding", 40, "ok"),
        ("per_position", 40, "ok"),
    ]  # fmt: skip
    assert all(row["nll"] is row["ppl"] is None for row in rows if row["status"] == "undefined")
    assert evaluate(model, STREAM, "per_position", [64]) == []


class Exhausted(RuntimeError):
    """As JAX reports it."""


@pytest.mark.parametrize("error", [Exhausted("RESOURCE_EXHAUSTED: Out of memory allocating 1 byte"), MemoryError()])
def test_running_out_of_memory_halves_the_batch_alone(error):
    tried = []

    def model(tokens):
        tried.append(tokens.shape[0])
        if tokens.shape[0] > 3:
            raise error
        return bigram(tokens)

    (row,) = evaluate(model, STREAM, "nonoverlapping", [10], batch_tokens=160)
    assert row["status"] == "ok" and row["nll"] == pytest.approx(losses(STREAM).mean(), rel=1e-6)
    scored = tried[tried.index(16, 1) :]  # after the check of the first windows
    assert scored[:4] == [16, 8, 4, 2] and set(scored[3:]) == {2}


def test_a_length_that_never_fits_is_oom_and_the_others_go_on():
    def model(tokens):
        if tokens.shape[1] > 30:
            raise Exhausted("RESOURCE_EXHAUSTED: out of memory")
        return bigram(tokens)

    rows = evaluate(model, STREAM, "nonoverlapping", (10, 64, 16))
    assert [row["status"] for row in rows] == ["ok", "oom", "ok"] and rows[1]["nll"] is None


def test_other_errors_are_not_taken_for_memory():
    def model(tokens):
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        evaluate(model, STREAM, "nonoverlapping", [10])


@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_nonfinite_losses_are_recorded_only_if_they_count(bad):
    def model(tokens):
        if tokens.shape[1] - 1 != 16:
            return bigram(tokens)
        values = bigram(tokens)
        values[0, 3] = bad
        return values

    rows = evaluate(model, STREAM, "nonoverlapping", (10, 16, 64))
    assert [row["status"] for row in rows] == ["ok", "nonfinite", "ok"]
    assert rows[1]["nll"] is None and rows[1]["num_targets"] == 1000
    (slid,) = evaluate(model, STREAM, Sliding(4, 100), [16])
    assert slid["status"] == "ok", "column 3 is context of every window, never a scored target"


def test_huge_losses_keep_their_nats_and_say_inf():
    (row,) = evaluate(lambda t: np.full((t.shape[0], t.shape[1] - 1), -800.0), STREAM, "nonoverlapping", [10])
    assert row["status"] == "ok" and row["nll"] == pytest.approx(800) and row["ppl"] == "inf"


def test_a_stream_of_known_entropy():
    """A two-state chain: p(stay) = 0.9. The true bigram model scores its entropy, the unigram model one bit."""
    flips = rng.random(200_000) > 0.9
    stream = np.cumsum(flips) % 2
    entropy = -(0.9 * math.log(0.9) + 0.1 * math.log(0.1))

    def true_model(tokens):
        return np.where(tokens[:, 1:] == tokens[:, :-1], math.log(0.9), math.log(0.1)).astype(np.float32)

    ones = np.ones(200_000, int)
    for row in evaluate(
        true_model, stream, ["nonoverlapping", Sliding(16, 50_000)], (32, 128), token_bytes=ones, separators=[]
    ):
        low, high = row["nll_interval"]
        assert abs(row["nll"] - entropy) < high - low < 0.02
        assert row["bpb"] == pytest.approx(row["nll"] / math.log(2))
    (unigram,) = evaluate(lambda t: np.full(t.shape, -math.log(2), np.float32), stream, "nonoverlapping", [32])
    assert unigram["ppl"] == pytest.approx(2, rel=1e-6)


def test_rows_are_handed_over_as_soon_as_they_are_there():
    order = []

    def model(tokens):
        order.append(tokens.shape[1] - 1)
        return bigram(tokens)

    evaluate(model, STREAM, "nonoverlapping", (500, 1000), on_row=lambda row: order.append(row["status"]))
    assert [key for key, _ in itertools.groupby(order)] == [500, "ok", 1000, "ok"]


def test_per_position_reuses_the_pass_of_the_same_length():
    calls = []
    model = lambda tokens: calls.append(tokens.shape) or bigram(tokens)  # noqa: E731
    evaluate(model, STREAM, ["nonoverlapping", "per_position"], [1000])
    assert len(calls) == 1 + 3, "and three that check the function"


@pytest.mark.parametrize(
    ("protocol", "lengths", "words"),
    [
        ("nonoverlaping", [10], "Did you mean 'nonoverlapping'"),
        ("strided", [10], "Did you mean 'hf_strided'"),
        ("nonoverlapping", [], "at least one window length"),
        ("nonoverlapping", [10, 0], "1 token or more"),
        ("nonoverlapping", 10, "lengths=10: give a list of whole numbers"),
        ("nonoverlapping", [10.5], r"lengths=\[10.5\]: give a list of whole numbers"),
        ("nonoverlapping", [10, 16, 10], "lengths names 10 twice"),
        (["nonoverlapping", "sliding", "nonoverlapping"], [10], "protocol names Nonoverlapping.* twice"),
        (Sliding(stride=11), [10, 20], "between 1 and the shortest length, 10"),
        (Nonoverlapping(100), [10, 128], "less than one window of 128"),
    ],
)
def test_senseless_questions_are_refused(protocol, lengths, words):
    with pytest.raises(ConfigError, match=words):
        evaluate(bigram, STREAM, protocol, lengths)


@pytest.mark.parametrize(
    ("protocol", "lengths"),
    [("nonoverlapping", [1001]), ("per_position", [1001]), ("sliding", [1000]), (Sliding(8), [995])],
)
def test_streams_that_are_too_short_are_refused(protocol, lengths):
    with pytest.raises(DataError, match=r"need"):
        evaluate(bigram, STREAM, protocol, lengths)
    with pytest.raises(DataError, match=r"need"):
        evaluate(bigram, STREAM[:1], protocol, [8])


def test_the_public_call_is_the_same_function():
    assert posx.evaluate is evaluate
