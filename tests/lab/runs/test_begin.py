"""The begin and end tokens of a model: read from each of its files, kept in the run, used, and written back."""

import json

import numpy as np
import pytest

import posx
from posx.errors import ConfigError, DataError
from posx.lab.data import BpeTokenizer, load_tokenizer
from posx.lab.runs.exchange import read_run
from posx.lab.runs.folder import RunFolder
from posx.lab.runs.foreign import read_model
from tests import tiny


def write(folder, name, **values):
    path = folder / f"{name}.json"
    path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else {}) | values))


@pytest.fixture
def source(tmp_path):
    return tiny.write_model(tmp_path / "hf")


#: The contents of config.json, generation_config.json and tokenizer_config.json, and the ids that follow from them.
#: Token 0 is <|endoftext|>, and the letters "a" and "b" are tokens too.
SAID = {
    "nothing": ({}, {}, {}, 0, ()),
    "config": ({"bos_token_id": 4, "eos_token_id": 5}, {}, {}, 4, (5,)),
    "list": ({"bos_token_id": 4, "eos_token_id": [7, 5]}, {}, {}, 4, (7, 5)),
    "null": ({"bos_token_id": None, "eos_token_id": None}, {}, {}, 0, ()),
    "generation": ({"bos_token_id": 4, "eos_token_id": 5}, {"eos_token_id": [5, 9]}, {}, 4, (5, 9)),
    "generation-alone": ({}, {"eos_token_id": 9}, {}, 9, (9,)),
    "tokenizer": ({"bos_token_id": 4, "eos_token_id": 5}, {}, {"bos_token": "a", "eos_token": "b"}, "a", (5, "b")),
    "tokenizer-whole": ({}, {}, {"bos_token": {"content": "a"}, "eos_token": {"content": "b"}}, "a", ("b",)),
    "tokenizer-null": ({"bos_token_id": 4, "eos_token_id": 5}, {}, {"bos_token": None}, 5, (5,)),
    "tokenizer-unknown": ({"bos_token_id": 4}, {}, {"bos_token": "<no such token>"}, 0, ()),
    "beyond-the-rows": ({"bos_token_id": 999, "eos_token_id": [5, 300, -1]}, {}, {}, 5, (5,)),
}  # fmt: skip


@pytest.mark.parametrize("case", SAID)
def test_begin_and_end_tokens_of_each_file_are_read(source, capsys, case):
    config, generation, named, begin, ends = SAID[case]
    for name, values in (("config", config), ("generation_config", generation), ("tokenizer_config", named)):
        if values:
            write(source, name, **values)
    found = BpeTokenizer(read_model(source).tokenizer)
    ids = found.vocab
    assert found.begin == (ids[begin] if isinstance(begin, str) else begin)
    assert found.ends == tuple(ids[end] if isinstance(end, str) else end for end in ends)
    assert found.eos == (found.ends or (0,))[0] and found.template == ()
    assert found.plain == json.dumps(json.loads((source / "tokenizer.json").read_text()), ensure_ascii=False)
    assert ("has no row in the model, which has 300" in capsys.readouterr().err) == (case == "beyond-the-rows")


def test_a_token_called_none_is_no_begin_token(source):
    """Qwen's tokenizer has "bos_token": null, and the vocabulary of GPT-2 has a token "None"."""
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    token = tokenizer["added_tokens"][0] | {"id": 257, "content": "None"}
    write(source, "tokenizer", added_tokens=[*tokenizer["added_tokens"], token])
    write(source, "tokenizer_config", bos_token=None)
    found = BpeTokenizer(read_model(source).tokenizer)
    assert found.vocab["None"] == 257 and found.begin == 0


def test_begin_tokens_stand_before_the_text(source):
    """A template that only ends texts, as that of embedding models, has none: it is the model's own."""
    end, text = {"SpecialToken": {"id": "a", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    special = {"a": {"id": "a", "ids": [7], "tokens": ["a"]}}
    write(source, "config", bos_token_id=4, eos_token_id=7)
    for single, begin, template in (([text, end], 4, ()), ([end, text, end], 7, (7,)), ([end, end, text], 7, (7, 7))):
        one = {"type": "TemplateProcessing", "single": single, "pair": single, "special_tokens": special}
        first = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True}
        for processor in (one, {"type": "Sequence", "processors": [first, one]}):
            write(source, "tokenizer", post_processor=processor)
            found = BpeTokenizer(read_model(source).tokenizer)
            assert (found.begin, found.template) == (begin, template)


def test_a_begin_token_without_a_row_is_refused(source):
    """The tokens of images in a tokenizer have no rows, but the template's token begins each text."""
    text, token = {"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "<s>", "type_id": 0}}
    special = {"<s>": {"id": "<s>", "ids": [300], "tokens": ["<s>"]}}
    one = {"type": "TemplateProcessing", "single": [token, text], "pair": [text], "special_tokens": special}
    write(source, "tokenizer", post_processor=one)
    with pytest.raises(DataError, match="the tokenizer has 301 ids, but the model 300 rows"):
        read_run(read_model(source), "hf", RunFolder(source / "run"))


def test_older_files_name_begin_and_end_tokens(source, capsys):
    """transformers reads special_tokens_map.json unless tokenizer_config.json lists its added tokens."""
    write(source, "special_tokens_map", bos_token="a", eos_token={"content": "b", "lstrip": False})
    write(source, "tokenizer_config", bos_token="c")
    found = BpeTokenizer(read_model(source).tokenizer)
    assert (found.begin, found.ends) == (found.vocab["a"], (found.vocab["b"],))
    write(source, "tokenizer_config", added_tokens_decoder={})
    found = BpeTokenizer(read_model(source).tokenizer)
    assert (found.begin, found.ends) == (found.vocab["c"], ()) and capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "name, values",
    [
        ("tokenizer_config", {"added_tokens_decoder": {"258": {"content": "<think>", "special": False}}}),
        ("tokenizer_config", {"additional_special_tokens": ["<think>", "a"]}),
        ("tokenizer_config", {"extra_special_tokens": {"think_token": "<think>"}}),
        ("tokenizer_config", {"eos_token": "<think>"}),
        ("special_tokens_map", {"eos_token": {"content": "<think>"}}),
        ("added_tokens", {"<think>": 258}),
    ],
)
def test_tokens_that_tokenizer_json_lacks_are_named(source, capsys, name, values):
    """transformers adds them to the tokenizer."""
    write(source, name, **values)
    read_model(source)
    assert "notice: the token '<think>' is not in tokenizer.json" in capsys.readouterr().err


@pytest.mark.parametrize("value", ["</s>", 1.5, True, [5, "x"]])
def test_end_tokens_that_are_no_ids_are_refused(source, value):
    write(source, "generation_config", eos_token_id=value)
    with pytest.raises(ConfigError, match=r"eos_token_id=.* is no token id. Write a whole number"):
        read_model(source)


def test_digest_of_a_tokenizer_has_its_begin_and_first_end(source):
    """Settings of generation keep no rows apart: they change neither the text nor its first token."""
    write(source, "config", bos_token_id=4, eos_token_id=5)
    one = BpeTokenizer(read_model(source).tokenizer)
    write(source, "generation_config", eos_token_id=[5, 9], temperature=0.6)
    other = BpeTokenizer(read_model(source).tokenizer)
    assert one.digest == other.digest and one.ends != other.ends
    write(source, "config", bos_token_id=6)
    assert BpeTokenizer(read_model(source).tokenizer).digest != one.digest


@pytest.mark.peers
def test_begin_and_end_tokens_survive_import_and_export(capsys, tmp_path):
    """A list of end tokens and generation_config.json are written back. `posx generate` ends at each of them."""
    from transformers import GenerationConfig

    from tests.lab.runs.test_exchange import model_of

    source, run, back = tmp_path / "hf", tmp_path / "run", tmp_path / "back"
    tiny.write_model(source)
    model_of("llama").save_pretrained(source)
    generation = {"eos_token_id": [5, 9], "temperature": 0.6, "do_sample": True}
    GenerationConfig(**generation).save_pretrained(source)
    write(source, "config", bos_token_id=4, eos_token_id=[5, 7])
    code, _, err = tiny.call(capsys, "import", f"--from={source}", f"--to={run}")
    assert code == 0, err
    apply, params, tokenizer = posx.load(run)
    assert (tokenizer.begin, tokenizer.eos, tokenizer.ends) == (4, 5, (5, 7, 9))
    assert tiny.call(capsys, "export", f"--workdir={run}", f"--to={back}")[0] == 0
    config = json.loads((back / "config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"]) == (4, [5, 7])
    assert json.loads((back / "generation_config.json").read_text()).items() >= generation.items()
    assert "posx" not in json.loads((back / "tokenizer.json").read_text())
    again = tmp_path / "again"
    assert tiny.call(capsys, "import", f"--from={back}", f"--to={again}")[0] == 0
    assert load_tokenizer(again) == load_tokenizer(run)
    # The text ends before the first end token.
    words = ["generate", f"--workdir={run}", "--prompt=some", "--num_tokens=4", "--temperature=0"]
    prompt = np.array([[4, *tokenizer.encode("some")]])
    first = int(np.asarray(apply(params, prompt))[0, -1].argmax())
    assert tiny.call(capsys, *words)[1].strip() != "some" or first in (5, 7, 9)
    GenerationConfig(**generation | {"eos_token_id": [5, first]}).save_pretrained(source)
    ends = tmp_path / "ends"
    assert tiny.call(capsys, "import", f"--from={source}", f"--to={ends}")[0] == 0
    words[1] = f"--workdir={ends}"
    code, out, err = tiny.call(capsys, *words)
    assert code == 0 and out == "some\n", err
