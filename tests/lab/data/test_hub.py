"""Hub names: the local cache is used, and without it a missing network is found out fast."""

import io
import time
from pathlib import Path

import pytest

from posx.errors import DataError
from posx.lab.data import DataConfig, prepare, texts


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """An empty cache of `datasets`, and no network."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "hf"))
    monkeypatch.setattr(texts, "_reachable", lambda: False)
    return tmp_path / "hf"


def fill(cache: Path, **splits: list[str]) -> None:
    """Lay out the data set acme/tales as `datasets` does after a download."""
    import datasets
    from datasets.arrow_writer import ArrowWriter

    folder = cache / "acme___tales/default/0.0.0/abc"
    folder.mkdir(parents=True)
    features = datasets.Features({"text": datasets.Value("string")})
    known = datasets.splits.SplitDict(dataset_name="tales")
    for split, rows in splits.items():
        with ArrowWriter(path=str(folder / f"tales-{split}.arrow"), features=features) as writer:
            for row in rows:
                writer.write({"text": row})
            examples, size = writer.finalize()
        known.add(datasets.splits.SplitInfo(split, size, examples, dataset_name="tales"))
    info = datasets.DatasetInfo(
        features=features, splits=known, dataset_name="tales", config_name="default", version="0.0.0"
    )
    info.write_to_directory(str(folder))


def tales(tmp_path, **settings):
    return prepare(DataConfig(source="acme/tales", cache_dir=str(tmp_path / "posx"), **settings))


def test_cached_data_set_loads_without_network(tmp_path, cache):
    fill(cache, train=["a tale", "another"], validation=["held out"])
    found = tales(tmp_path)
    assert found.tokenizer.decode(found.validation.tokens) == "held out"
    assert found.train.num_documents == 2
    by_hash = tales(tmp_path, validation_split="")
    assert by_hash.train.num_documents == by_hash.validation.num_documents == 1


def test_held_out_file_for_a_hub_data_set(tmp_path, cache):
    fill(cache, train=["a tale", "another"])
    (tmp_path / "held.txt").write_text("from a file")
    found = tales(tmp_path, validation=str(tmp_path / "held.txt"))
    assert found.tokenizer.decode(found.validation.tokens) == "from a file"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"validation_split": "valid"}, "no split 'valid'. It has 'train', 'validation'"),
        ({"text_column": "body"}, r"no column 'body' \(columns there: 'text'\)"),
        ({"subset": "other"}, "'acme/tales' with subset 'other' is not a local path"),
    ],
)
def test_unknown_names_list_the_known_ones(tmp_path, cache, settings, message):
    fill(cache, train=["a tale"], validation=["held out"])
    with pytest.raises(DataError, match=message):
        tales(tmp_path, **settings)


def test_unreachable_hub_says_what_to_do(tmp_path):
    with pytest.raises(DataError, match="not cached here, and the hub cannot be reached. Set data.source to a local"):
        tales(tmp_path)


def test_probe_gives_up_in_time(monkeypatch):
    monkeypatch.undo()
    import socket

    for variable in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(socket, "create_connection", lambda *_: (time.sleep(10), io.BytesIO())[1])
    start = time.monotonic()
    assert not texts._reachable()
    assert time.monotonic() - start < 3


def test_settings_of_datasets_are_put_back(monkeypatch):
    import datasets
    import huggingface_hub.constants as constants

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    before = (datasets.are_progress_bars_disabled(), datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE)
    with texts._quiet(offline=True):
        assert datasets.are_progress_bars_disabled() and datasets.config.HF_HUB_OFFLINE and constants.HF_HUB_OFFLINE
    after = (datasets.are_progress_bars_disabled(), datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE)
    assert before == after
