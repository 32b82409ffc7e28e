"""Pictures of the encodings: those of the folder's own runs, trained, or without runs a catalogue."""

import dataclasses
import math
import pathlib
import shutil

import jax
import numpy as np
import pytest

from posx import build, load
from posx.encodings.alibi import alibi_slopes
from posx.lab import plots
from posx.lab.config import run_config
from posx.lab.plots import effects, pictures
from posx.lab.plots.effects import Subject
from posx.lab.runs.folder import RunFolder
from tests.made_rows import start, words

DIMS = effects.Dims(model_dim=16, num_heads=2, head_dim=8, num_layers=1, train_len=8)


def subject(spec: object, **changes: np.ndarray) -> Subject:
    encoding = build(spec, DIMS)
    return Subject("", "", encoding, encoding.init(jax.random.key(0), DIMS) | changes, DIMS)


def by_distance(one: Subject) -> np.ndarray:
    return effects.content_free_by_distance(one, effects.content_free(one, one.num_positions))


def test_rope_bound_matches_its_definition() -> None:
    theta = [10000.0 ** (-2 * c / 8) for c in range(4)]
    sums = [abs(sum(complex(math.cos(5 * t), math.sin(5 * t)) for t in theta[:c])) for c in range(1, 5)]
    assert effects.rope_bound(8, np.array([0, 5])) == pytest.approx([2.5, sum(sums) / 4])


@pytest.mark.slow
def test_the_bound_is_drawn_for_its_own_frequencies_alone() -> None:
    specs = {"rope(base=500)": True, "rope(frequencies=periodic(periods=(2,)))": False}
    for spec, is_drawn in specs.items():
        said = words(pictures.encodings([subject(spec)]))
        assert ("RoFormer's bound on q·k, base = 500" in said) == is_drawn
        assert is_drawn or not any("RoFormer" in text for text in said)


@pytest.mark.slow
def test_without_runs_the_catalogue_is_drawn(tmp_path: pathlib.Path) -> None:
    assert [path.name for path in plots.plot(tmp_path / "none", "encodings")] == ["encodings.png", "encodings.svg"]
    assert [subject.name for subject in effects.catalogue()] == ["nope", "sinusoidal", "rope", "t5", "alibi"]


@pytest.mark.slow
def test_a_folders_own_encodings_are_drawn_as_trained(tmp_path: pathlib.Path, whole: pathlib.Path) -> None:
    """With its own heads and sizes; a run without a checkpoint is drawn as initialised, one that cannot be read not."""
    shutil.copytree(whole, tmp_path / "trained")
    asked = RunFolder(whole).read_config().asked
    start(tmp_path / "sent", run_config(dataclasses.replace(asked, encoding="rope(base=500)")))
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{}")
    apply, params, _ = load(whole)
    sent, trained = effects.folder_encodings(tmp_path)
    assert (trained.name, trained.encoding, trained.dims) == ("t5", apply.model.encodings[0], apply.model.dims)
    table = trained.encoding.by_distance(params["shared"]["encoding_0"], np.arange(32, dtype=np.int32)).bias
    assert by_distance(trained) == pytest.approx(np.asarray(table))
    assert trained.origin == "trained in trained, step 32"
    assert (sent.name, sent.encoding.base, sent.dims, sent.origin) == (
        "rope(base=500)",
        500.0,
        trained.dims,
        "nothing learned",
    )


@pytest.mark.slow
def test_logits_without_content_are_what_every_hook_gives() -> None:
    """The bias by distance, a term inside the scale, and their sum in a chain; rotations give none."""
    slopes = -np.outer([1 / 16, 1 / 256], np.arange(16))
    assert by_distance(subject("alibi")) == pytest.approx(slopes)
    assert effects.content_free(subject("rope"), 4) is None is effects.content_free(subject("nope"), 4)
    chain = subject("transformer_xl+alibi")
    inside = np.asarray(chain.encoding.by_distance(chain.params, np.arange(16, dtype=np.int32)).scaled)
    assert by_distance(chain) == pytest.approx(inside / math.sqrt(8) + slopes, abs=1e-6) and np.abs(inside).max() > 0


def test_logit_scales_are_drawn_by_the_position_of_the_query() -> None:
    drawn = effects.logit_scales(subject("rope+log_length"))
    assert drawn == pytest.approx(np.maximum(np.log(np.arange(1, 17)) / math.log(8), 1)[None], abs=1e-6)
    assert effects.logit_scales(subject("tupe")) is None is effects.logit_scales(subject("rope"))


def test_sinks_are_drawn_by_the_weight_that_they_take() -> None:
    """1 / (1 + n) of n equal keys at z = 0, next to the sums of ALiBi's weights."""
    drawn = effects.sink_weights(subject("learned_sinks"))
    assert drawn == pytest.approx(np.stack([1 / np.arange(2, 18)] * 2), abs=1e-6)
    sums = np.cumsum(np.exp(-np.outer([1 / 16, 1 / 256], np.arange(16))), axis=1)
    assert effects.sink_weights(subject("alibi+learned_sinks")) == pytest.approx(1 / (1 + sums), abs=1e-6)
    assert effects.sink_weights(subject("rope")) is None


def test_match_of_a_vector_with_itself_falls_as_the_angles_say() -> None:
    distances, match = effects.match_by_distance(subject("rope(base=100)"))
    theta = 100.0 ** (-2 * np.arange(4) / 8)
    expected = np.cos(distances[:, None] * theta).mean(axis=1)
    assert match == pytest.approx(np.stack([expected, expected]), abs=1e-5)
    assert effects.match_by_distance(subject("alibi")) is None
    for name, over in (("rope", ""), ("fope", ", last query")):
        assert f"q·k of one vector as query and key{over}" in words(pictures.encodings([subject(name)])), name


def test_what_depends_on_the_text_is_drawn_for_random_tokens() -> None:
    """Read off the weights: for ALiBi just its bias; CoPE, whose table starts at zero, changes nothing yet."""
    changed = effects.random_token_change(subject("alibi"))
    far = np.arange(changed.shape[1])[:, None] - np.arange(changed.shape[1])[None, :]
    wanted = -alibi_slopes(DIMS.num_heads)[:, None, None] * far
    np.testing.assert_allclose(changed, np.where(far >= 0, wanted, np.nan), atol=1e-3)
    assert np.nanmax(np.abs(effects.random_token_change(subject("cope")))) < 1e-4
    assert effects.random_token_change(subject("nope")) is None


@pytest.mark.slow
def test_arrays_that_start_at_zero_are_drawn_at_random() -> None:
    """Those of CoPE, whose picture would be empty."""
    figure = pictures.encodings([effects.initial("cope", build("cope", DIMS), DIMS)])
    titles = [ax.get_title() for ax in figure.axes]
    assert "change of logits, random tokens and arrays, head 1" in titles
    assert np.nanmax(np.abs(figure.axes[0].images[0].get_array())) > 0.01


def test_the_curves_of_heads_are_named() -> None:
    assert {"head 1", "head 2"} <= set(
        words(pictures.encodings([effects.initial("alibi", build("alibi", DIMS), DIMS)]))
    )


def test_every_head_is_drawn() -> None:
    """Eight unlike sinks are eight lines with names, not the first three. Equal heads are one line without a name."""
    dims = dataclasses.replace(DIMS, num_heads=8)
    sinks = effects.initial("learned_sinks", build("learned_sinks", dims), dims)
    unlike = {name: np.arange(8, dtype=np.float32).reshape(array.shape) for name, array in sinks.params.items()}
    for params, lines in ((unlike, 8), (sinks.params, 1)):
        figure = pictures.encodings([dataclasses.replace(sinks, params=params)])
        (ax,) = [ax for ax in figure.axes if ax.get_title() == "weight of the sink, zero vectors"]
        assert len([line for line in ax.lines if len(line.get_xdata()) > 2]) == lines
        assert [text for text in words(figure) if text.startswith("head ")] == [
            f"head {n + 1}" for n in range(lines) if lines > 1
        ]
        assert ax.get_ylim()[0] == 0


def test_each_panel_of_a_chain_has_its_own_title() -> None:
    chain = "sinusoidal+rope"
    figure = pictures.encodings([effects.initial(chain, build(chain, DIMS), DIMS)])
    titles = [ax.get_title(loc="left") or ax.get_title() for ax in figure.axes if ax.get_xlabel()]
    assert len(titles) == len(set(titles)) > 3 and "inner products of the added vectors" in titles
