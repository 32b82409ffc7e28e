"""Checkpoints survive what happens to files: the newest good one is found, a damaged one is never believed."""

import errno
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from posx.errors import OutOfMemoryError, WorkdirError
from posx.lab.files import manifests
from posx.lab.training.checkpoints import Checkpoints


def state(step: int) -> dict:
    rng = np.random.default_rng(step)
    params = {"layer": {"w": rng.standard_normal((40, 50)).astype(np.float32)}, "table": np.float32(rng.random(7))}
    return {
        "params": params,
        "opt_state": (np.int32(step), {"mu": np.zeros((40, 50), np.float32)}),
        "step": np.int32(step),
    }


ABSTRACT = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, state(0)))


def assert_is(restored, step: int) -> None:
    assert restored is not None and restored[0] == step
    jax.tree.map(np.testing.assert_array_equal, restored[1], state(step))
    assert jax.tree.structure(restored[1]) == jax.tree.structure(state(step))


@pytest.fixture(scope="module")
def two_saved(tmp_path_factory):
    """Steps 5 and 10, saved once and copied for each test."""
    folder = tmp_path_factory.mktemp("two")
    saved = Checkpoints(folder, keep=3)
    saved.save(5, state(5))
    saved.save(10, state(10))
    return folder


@pytest.fixture
def folder(two_saved, tmp_path):
    return shutil.copytree(two_saved, tmp_path / "checkpoints")


def array_file(folder, step):
    """The file that holds the arrays' bytes: the largest one of the step."""
    return max(
        (path for path in (folder / str(step)).rglob("*") if path.is_file()), key=lambda path: path.stat().st_size
    )


def flip(path, place=None):
    data = bytearray(path.read_bytes())
    data[len(data) // 2 if place is None else place] ^= 1
    path.write_bytes(data)


def test_nothing_saved_is_none(tmp_path):
    assert Checkpoints(tmp_path / "none", 1).restore(ABSTRACT) is None
    assert not (tmp_path / "none").exists()


def test_newest_is_restored_bit_for_bit(folder):
    assert Checkpoints(folder, 2).steps() == [5, 10]
    notices: list[str] = []
    assert_is(Checkpoints(folder, 2).restore(ABSTRACT, notice=notices.append), 10)
    assert notices == []


def test_a_part_of_the_tree_can_be_restored(folder):
    step, found = Checkpoints(folder, 2).restore({"params": ABSTRACT["params"]})
    assert step == 10 and found.keys() == {"params"}
    np.testing.assert_array_equal(found["params"]["layer"]["w"], state(10)["params"]["layer"]["w"])


def test_an_array_that_nobody_asks_for_is_refused_by_name(folder):
    params = {"layer": ABSTRACT["params"]["layer"]}
    with pytest.raises(WorkdirError, match=r"of another model: params\.table is unknown$"):
        Checkpoints(folder, 2).restore({"params": params})


def truncate(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


DAMAGE = {
    "a flipped bit in the arrays": lambda folder, step: flip(array_file(folder, step)),
    "truncated arrays": lambda folder, step: truncate(array_file(folder, step)),
    "emptied arrays": lambda folder, step: array_file(folder, step).write_bytes(b""),
    "removed arrays": lambda folder, step: array_file(folder, step).unlink(),
    "no folder": lambda folder, step: shutil.rmtree(folder / str(step)),
    "an empty folder": lambda folder, step: (shutil.rmtree(folder / str(step)), (folder / str(step)).mkdir()),
    "an emptied manifest": lambda folder, step: (folder / f"{step}.json").write_text(""),
    "a torn manifest": lambda folder, step: truncate(folder / f"{step}.json"),
    "a manifest that is a list": lambda folder, step: (folder / f"{step}.json").write_text("[]"),
    "a manifest without shapes": lambda folder, step: edit(folder, step, lambda facts: facts.pop("shape")),
    "a manifest with another shape": lambda folder, step: edit(folder, step, lambda facts: facts.update(shape=[2000])),
    "a manifest with another digest": lambda folder, step: edit(folder, step, lambda facts: facts.update(sha256="0")),
}


def edit(folder, step, change):
    path = folder / f"{step}.json"
    manifest = json.loads(path.read_text())
    change(manifest["arrays"]["params.layer.w"])
    path.write_text(json.dumps(manifest))


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_a_damaged_step_is_passed_over_with_a_notice(folder, damage):
    damage(folder, 10)
    notices: list[str] = []
    assert_is(Checkpoints(folder, 2).restore(ABSTRACT, notice=notices.append), 5)
    assert len(notices) == 1
    assert "checkpoint 10" in notices[0] and "skipped" in notices[0] and "\n" not in notices[0]


def test_a_removed_manifest_makes_the_step_unseen(folder):
    (folder / "10.json").unlink()
    assert_is(Checkpoints(folder, 2).restore(ABSTRACT), 5)


@pytest.mark.parametrize("name", ["a flipped bit in the arrays", "an emptied manifest"])
def test_all_damaged_is_an_error_that_names_them(folder, name):
    for step in (5, 10):
        DAMAGE[name](folder, step)
    with pytest.raises(WorkdirError, match=r"checkpoint 10.*checkpoint 5.*No good checkpoint is left"):
        Checkpoints(folder, 2).restore(ABSTRACT)


def test_a_damaged_step_can_be_saved_again(folder):
    DAMAGE["a flipped bit in the arrays"](folder, 10)
    saved = Checkpoints(folder, 2)
    assert_is(saved.restore(ABSTRACT), 5)
    saved.save(10, state(10))
    assert saved.steps() == [5, 10]
    assert_is(saved.restore(ABSTRACT), 10)


def changed(**params):
    return ABSTRACT | {"params": ABSTRACT["params"] | params}


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        (changed(table=jax.ShapeDtypeStruct((8,), jnp.float32)), r"params\.table is float32\[7\], not float32\[8\]"),
        (changed(table=jax.ShapeDtypeStruct((7,), jnp.bfloat16)), r"params\.table is float32\[7\], not bfloat16\[7\]"),
        (changed(extra=jax.ShapeDtypeStruct((7,), jnp.float32)), r"params\.extra is missing"),
    ],
    ids=["shape", "dtype", "tree"],
)
def test_another_model_is_refused_by_path(folder, wanted, words):
    with pytest.raises(WorkdirError, match=f"checkpoint 10 .*another model.*{words}"):
        Checkpoints(folder, 2).restore(wanted)


def test_what_was_half_written_is_ignored_and_swept(folder):
    (folder / "15").mkdir()
    (folder / "15" / "half").write_text("x")
    (folder / "20").mkdir()
    (folder / "25.orbax-checkpoint-tmp-7").mkdir()
    (folder / "notes").mkdir()
    (folder / "30").write_text("not a folder")
    saved = Checkpoints(folder, 3)
    assert saved.steps() == [5, 10]
    assert_is(saved.restore(ABSTRACT), 10)
    saved.save(15, state(15))
    assert {path.name for path in folder.iterdir()} == {"5", "5.json", "10", "10.json", "15", "15.json", "notes", "30"}
    assert_is(saved.restore(ABSTRACT), 15)


@pytest.mark.parametrize("keep", [1, 2])
def test_only_the_newest_are_kept(folder, keep):
    saved = Checkpoints(folder, keep)
    saved.save(15, state(15))
    wanted = [5, 10, 15][-keep:]
    assert saved.steps() == wanted
    assert {path.name for path in folder.iterdir()} == {f"{n}{end}" for n in wanted for end in ("", ".json")}


def test_a_newer_format_is_refused(folder):
    path = folder / "10.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format_version": 99}))
    with pytest.raises(WorkdirError, match=r"format 99, which this posx"):
        Checkpoints(folder, 2).restore(ABSTRACT)


@pytest.mark.parametrize(
    ("code", "error", "words"),
    [(errno.ENOSPC, OutOfMemoryError, "No space"), (errno.EACCES, WorkdirError, "Permission denied")],
)
def test_a_failed_save_keeps_the_older_ones(folder, monkeypatch, code, error, words):
    def fail(path, values):
        raise OSError(code, words)

    monkeypatch.setattr(manifests, "write_bytes", fail)
    with pytest.raises(error, match="checkpoint .*15"):
        Checkpoints(folder, 1).save(15, state(15))
    assert {path.name for path in folder.iterdir()} == {"5", "5.json", "10", "10.json"}
    assert_is(Checkpoints(folder, 1).restore(ABSTRACT), 10)
