"""Pictures: the statistics of dead leaves, hidden patches at rows and columns, and a run through the command line."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from posx.errors import DataError
from posx.lab.config import DataConfig, ModelConfig
from posx.lab.data.masking import mask_id, masked_batch, num_hidden
from posx.lab.data.tasks import open_task
from posx.lab.files.rows import row_problem
from posx.lab.model import make_model
from posx.lab.positions import Positions, parse_policy
from posx.lab.runs.folder import RunFolder
from posx.lab.tasks import draw_rows, parse_task
from posx.lab.tasks.base import BOS, FIRST
from tests import tiny

TASK = open_task(DataConfig(source="task:dead_leaves"))


def share_of_equal(rows, columns):
    """Return the probability that two patches so far apart have one colour, from the definition.

    The topmost rectangle over either patch covers both with probability A / (2 B - A). A and B are the mean places of a
    rectangle that covers both, and one.
    """
    sides = np.arange(2, 6)
    both = np.maximum(sides - rows, 0).mean() * np.maximum(sides - columns, 0).mean()
    same = both / (2 * sides.mean() ** 2 - both)
    return same + (1 - same) / 8


@pytest.mark.parametrize(("side", "count"), [(8, 4000), (24, 60)])
def test_leaves_have_the_statistics_of_their_definition(side, count):
    """Of neighbours, of patches farther apart, and in the corner as elsewhere, at any side."""
    items = draw_rows(parse_task("dead_leaves"), jax.random.split(jax.random.key(0), count), 4, side**2, side**2)
    tokens = np.asarray(items.tokens)
    assert (tokens[:, 0] == BOS).all() and set(np.unique(tokens[:, 1:])) == set(range(FIRST, FIRST + 8))
    assert np.asarray(items.scored).tolist() == [[False] + [True] * side**2] * count
    pictures = tokens[:, 1:].reshape(count, side, side)
    for rows, columns in ((0, 1), (1, 0), (2, 3), (5, 0)):
        equal = pictures[:, rows:, columns:] == pictures[:, : side - rows, : side - columns]
        for part in (equal, equal[:, :1, :1]):
            by_picture = part.mean(axis=(1, 2))
            error = by_picture.std() / count**0.5
            assert abs(by_picture.mean() - share_of_equal(rows, columns)) < 4 * error, (rows, columns)


def test_hidden_patches_are_the_targets_of_a_batch():
    batch = masked_batch(TASK, seed=1, step=3, batch_size=4, length=64)
    patches = TASK.batch(seed=1, step=3, batch_size=4, length=64).tokens[:, 1:]
    hidden = batch.weights > 0
    np.testing.assert_array_equal(batch.targets, patches)
    assert hidden.sum(axis=1).tolist() == [num_hidden(64)] * 4 and batch.weights.mean() == pytest.approx(1)
    np.testing.assert_array_equal(batch.inputs[~hidden], patches[~hidden])
    assert (batch.inputs[hidden] == mask_id(TASK.tokenizer.vocab_size)).mean() > 0.5
    part = masked_batch(TASK, seed=1, step=3, batch_size=4, length=64, rows=slice(2, 3))
    np.testing.assert_array_equal(part.inputs, batch.inputs[2:3])


def test_measured_patches_do_not_depend_on_the_number_of_items():
    few, many = (TASK.items(256, 64, count) for count in (3, 5))
    assert few.scored.sum(axis=1).tolist() == [num_hidden(256)] * 3 and not few.scored[:, 0].any()
    np.testing.assert_array_equal(few.scored, many.scored[:3])


def test_grid_gives_rows_and_columns():
    grid = Positions(parse_policy("grid"))
    wanted = [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2], [2, 0], [2, 1], [2, 2]]
    assert grid.measure(9).tolist() == np.asarray(grid.train(0, jnp.arange(2), 9)).tolist() == wanted
    assert grid.measure(9).dtype == np.int32


@pytest.mark.parametrize("policy", ["encoding", "nope,encoding"])
def test_a_cached_picture_equals_one_pass(policy):
    """Layers that read no position take those with axes, also beside layers that read them."""
    policy = tuple(policy.split(","))
    config = ModelConfig(num_layers=len(policy), model_dim=16, num_heads=2, layer_policy=policy)
    model = make_model(config, "axial(inner=learned(num_positions=40))+learned_sinks", 9, 16)
    params = model.init(jax.random.key(0))
    tokens = np.random.default_rng(0).integers(0, 9, (2, 16)).astype(np.int32)
    pos, order = Positions(parse_policy("grid")).measure(16), np.arange(16, dtype=np.int32)
    whole = jax.jit(model)(params, tokens, pos)
    cache, found = model.empty_cache(2, 20), []
    decode = jax.jit(model.decode)
    for n in range(0, 16, 4):
        logits, cache = decode(params, tokens[:, n : n + 4], pos[n : n + 4], order[n : n + 4], cache)
        found.append(logits)
    np.testing.assert_allclose(np.concatenate(found, axis=1), whole, atol=2e-5)
    moved = jax.jit(model)(params, tokens, np.stack([pos, pos[:, ::-1]]))
    np.testing.assert_allclose(moved[0], whole[0], atol=2e-5)
    assert np.abs(moved[1] - whole[1]).max() > 1e-4
    with pytest.raises(ValueError, match=r"pos is no array: give \[t, 2\] or \[b, t, 2\]"):
        model(params, tokens, None)


@pytest.mark.slow
def test_a_model_that_reads_no_position_takes_axes():
    model = make_model(ModelConfig(num_layers=2, model_dim=16, num_heads=2), "nope", 9, 16)
    params, tokens = model.init(jax.random.key(0)), np.zeros((2, 16), np.int32)
    found = model(params, tokens, Positions(parse_policy("grid")).measure(16))
    np.testing.assert_array_equal(found, model(params, tokens, None))


def words(site, folder, *more):
    return [
        "train", f"--config={site / 'tiny.py'}:axial", f"--workdir={folder}", "--config.data.source=task:dead_leaves",
        "--config.train.objective=masked", "--config.train.positions=grid", "--config.train.length=16",
        "--config.eval.lengths=16,36", "--config.train.steps=3", "--config.eval.num_items=20", *more,
    ]  # fmt: skip


@pytest.mark.slow
def test_a_run_measures_hidden_patches_of_larger_pictures(site, tmp_path, capsys):
    """The table shows the share of hidden patches that are right, not of pictures without a mistake."""
    assert tiny.run(*words(site, tmp_path / "run"))[0] == 0
    rows = RunFolder(tmp_path / "run").measured_rows()
    assert [(row["protocol"], row["eval_len"], row["num_targets"]) for row in rows] == [
        ("answers", 16, 20 * num_hidden(16)), ("answers", 36, 20 * num_hidden(36)),
    ]  # fmt: skip
    for row in rows:
        assert not row_problem(row) and 0 <= row["accuracy"] < 1
        assert row["ppl"] == pytest.approx(np.exp(row["nll"])) and 1 < row["ppl"] < 20
    code, out, err = tiny.call(capsys, "table", f"--workdir={tmp_path / 'run'}")
    assert code == 0, err
    assert all(f"{row['accuracy']:.4f} (" in out for row in rows) and rows[0]["exact_match"] < rows[0]["accuracy"]
    assert json.loads((tmp_path / "run" / "config.json").read_text())["train"]["positions"] == "grid"


def test_a_length_that_is_no_square_is_refused():
    with pytest.raises(
        DataError, match="dead_leaves has square pictures alone, and 40 patches are none. Give 36 or 49"
    ):
        TASK.check_lengths([64, 40], 64)
