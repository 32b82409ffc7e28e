"""The numbers of attention weights against weights that are known, and against sums in NumPy."""

import jax
import numpy as np
import pytest

from posx.lab.config import base_config, run_config
from posx.lab.config.sections import ModelConfig
from posx.lab.data import DataConfig, prepare
from posx.lab.layers import sequential
from posx.lab.model import make_model
from posx.lab.runs import mechanism
from posx.lab.runs.autopsy import observations
from posx.lab.runs.mechanism import attention_facts, window_items

#: -log of the least normal and the least subnormal number of float32. Weights below the first may be flushed to 0.
NORMAL, SUBNORMAL = 87.34, 103.98


def facts_of(encoding, source, length, count=12, without_content=False, heads=4, pos=None):
    data = prepare(DataConfig(source=source))
    items = data.items(length, min(length, 100), count)
    config = ModelConfig(num_layers=2, model_dim=16, num_heads=heads)
    model = make_model(config, encoding, data.tokenizer.vocab_size, length)
    params = jax.jit(model.init)(jax.random.key(0))
    if without_content:
        params = jax.tree_util.tree_map_with_path(
            lambda path, x: 0 * x if "query" in jax.tree_util.keystr(path) else x, params
        )
    return items, model, params, attention_facts(model, params, items, "highest", pos=pos)


@pytest.mark.slow
def test_numbers_are_means_over_scored_queries(monkeypatch):
    monkeypatch.setattr(mechanism, "LARGEST_WEIGHTS", 5 * 4 * 24**2)  # three batches, the last of them filled up
    pos = 3 * sequential(24)
    items, model, params, found = facts_of("rope", "task:repeat_copy", 24, pos=pos)
    read = jax.jit(lambda params, tokens: model.read_attention(params, tokens, pos, lambda w, visible: w))
    layers = read(params, items.tokens[:, :-1])
    for n, w in enumerate(np.asarray(layers, np.float64)):
        right, entropy = [], []
        for row, place in zip(*np.nonzero(items.scored), strict=True):
            weights = w[row, :, place - 1, :place]
            np.testing.assert_allclose(weights.sum(axis=1), 1, rtol=1e-5)
            entropy.append(-(weights * np.log(weights)).sum(axis=1))
            if items.source[row, place] >= 0:
                right.append(w[row, :, place - 1, items.source[row, place]])
        np.testing.assert_allclose(found["attention"]["right_weight"][n], np.mean(right, axis=0), atol=2e-6)
        np.testing.assert_allclose(found["attention"]["entropy"][n], np.mean(entropy, axis=0), atol=2e-6)
    assert found["right_weight"] == np.max(found["attention"]["right_weight"])
    assert found["mean_right_weight"] == pytest.approx(np.mean(found["attention"]["right_weight"]), abs=2e-6)
    assert found["zero_weights"] == found["zero_weights_bfloat16"] == 0 and found["attention_items"] == 12


@pytest.mark.slow
def test_equal_weights_are_known_in_closed_form():
    """Without content NoPE looks at all tokens alike: weight 1 / n and entropy log n of a query that sees n."""
    items, _, _, found = facts_of("nope", "task:unique_copy(symbols=20)", 16, without_content=True)
    seen = np.nonzero(items.scored)[1]
    right = np.nonzero(items.source >= 0)[1]
    np.testing.assert_allclose(found["attention"]["entropy"], np.full((2, 4), np.log(seen).mean()), rtol=1e-5)
    np.testing.assert_allclose(found["attention"]["right_weight"], np.full((2, 4), (1 / right).mean()), atol=2e-6)


def test_far_weight_of_a_text_is_of_distances_of_l_or_more():
    """Without content NoPE gives the weight (n - L) / n to tokens L or more back, if a query sees n tokens."""
    config, stream = ModelConfig(num_layers=1, model_dim=16, num_heads=2), np.arange(100) % 7
    model = make_model(config, "nope", 7, train_len=8)
    params = jax.tree_util.tree_map_with_path(
        lambda path, x: 0 * x if "query" in jax.tree_util.keystr(path) else x, model.init(jax.random.key(0))
    )
    windows = np.array([[0, 9, 32], [32, 0, 5], [70, 0, 20]])  # the text ends within the last
    items = window_items(stream, windows, 32, 9)
    assert items.tokens.shape == (2, 33) and items.tokens[1, 0] == stream[32]
    found = attention_facts(model, params, items, "highest", padding=None)
    wanted = np.mean([max(n - 8, 0) / n for n in range(1, 33)])
    np.testing.assert_allclose(found["attention"]["far_weight"], np.full((1, 2), wanted), rtol=1e-5)
    settings = base_config("nope")
    settings.train.length = 8
    known = observations(run_config(settings), {"eval_len": 32} | found)
    assert known["equal_far_weight"] == pytest.approx(wanted, abs=1e-6) and known["new_planes"] is None
    assert window_items(stream, windows, 101, 9) is None


@pytest.mark.slow
def test_zeros_are_the_weights_that_alibi_underflows():
    """Without content a weight is exp(-slope r) over their sum, which is at most 1 / (1 - exp(-slope))."""
    length, slopes = 420, 2.0 ** -np.arange(1, 9)
    items, _, _, found = facts_of("alibi", "task:binary_majority", length, 1, without_content=True, heads=8)
    tokens = int((items.tokens[0, :-1] != 3).sum())
    distance = np.tri(tokens) * (np.arange(tokens)[:, None] - np.arange(tokens))
    pairs = tokens * (tokens + 1) / 2
    most, least = ([(slope * distance > bound).sum() / pairs for slope in slopes] for bound in (NORMAL - 2, SUBNORMAL))
    for zeros in (found["attention"]["zero_weights"], found["attention"]["zero_weights_bfloat16"]):
        assert np.all(np.array(zeros) <= np.array(most) + 1e-5) and np.all(np.array(zeros) >= np.array(least) - 1e-5)
    assert least[0] > 0.05 and most[2] == 0 == found["attention"]["zero_weights"][0][2]
    assert found["right_weight"] is None and "right_weight" not in found["attention"]
    assert found["zero_weights_bfloat16"] >= found["zero_weights"]
