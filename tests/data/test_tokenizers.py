"""Both tokenizers keep every byte, never read special tokens out of text, and survive being saved."""

import json

import numpy as np
import pytest

from posx.data import BpeTokenizer, ByteTokenizer, load_tokenizer, train_bpe
from posx.errors import ConfigError, DataError

TEXTS = [
    "plain text, twice: plain text",
    "a\r\nb\rc\n\n\n  d\t",
    "NUL \0 inside, U+2028 \u2028, no-break\u00a0space",
    "漢字とかな, emoji 🙂, e\u0301",
    "<|endoftext|> and </s> and <s> are text here",
    " leading and trailing ",
    "",
]


@pytest.fixture(scope="module")
def bpe():
    return train_bpe([*TEXTS, "the cat sat on the mat. " * 50], 320)


@pytest.fixture(params=["bytes", "bpe"])
def tokenizer(request, bpe):
    return ByteTokenizer() if request.param == "bytes" else bpe


def foreign(tmp_path, special, **changes):
    """A tokenizer.json as others write it: truncation, padding, specials around each text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    hf = Tokenizer(models.BPE())
    hf.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    hf.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=270,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    hf.train_from_iterator(["some text"], trainer)
    if special:
        hf.post_processor = processors.TemplateProcessing(single=f"{special[0]} $A", special_tokens=[(special[0], 0)])
    hf.enable_truncation(4)
    hf.enable_padding(length=64)
    hf.save(str(tmp_path / "tokenizer.json"))
    return load_tokenizer(tmp_path / "tokenizer.json")


@pytest.mark.parametrize("text", TEXTS)
def test_round_trip_and_byte_counts(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.num_bytes[ids].sum() == len(text.encode())
    assert tokenizer.eos not in ids


def test_interface(tokenizer):
    assert tokenizer.eos < tokenizer.vocab_size == len(tokenizer.num_bytes)
    assert tokenizer.num_bytes[tokenizer.eos] == 0
    assert len(tokenizer.digest) == 64
    for ids, text in zip(tokenizer.encode_batch(TEXTS), TEXTS, strict=True):
        np.testing.assert_array_equal(ids, tokenizer.encode(text))
        assert ids.dtype == np.uint16


def test_separators_are_not_shown(tokenizer):
    ids = [*tokenizer.encode("a").tolist(), tokenizer.eos, *tokenizer.encode("b").tolist()]
    assert tokenizer.decode(ids) == "ab"


def test_broken_utf8_is_shown_not_raised():
    assert ByteTokenizer().decode([0xE6, 0x41]) == "\ufffdA"


def test_ids_outside_the_vocabulary_are_refused(tokenizer):
    for bad in (-1, tokenizer.vocab_size):
        with pytest.raises(DataError, match=f"vocabulary is 0 to {tokenizer.vocab_size - 1}"):
            tokenizer.decode([bad])


def test_lone_surrogate_is_refused(tokenizer):
    with pytest.raises(DataError, match=r"U\+D800 at character 2"):
        tokenizer.encode("ab\ud800")


def test_saved_tokenizer_is_equal(tokenizer, tmp_path):
    tokenizer.save(tmp_path / "tokenizer.json")
    again = load_tokenizer(tmp_path / "tokenizer.json")
    assert again == tokenizer and again.digest == tokenizer.digest and again.name == tokenizer.name
    assert load_tokenizer(tmp_path) == tokenizer  # the folder will do
    np.testing.assert_array_equal(again.encode(TEXTS[3]), tokenizer.encode(TEXTS[3]))


def test_training_is_deterministic_and_learns(bpe):
    again = train_bpe([*TEXTS, "the cat sat on the mat. " * 50], 320)
    assert again == bpe
    assert bpe.name == "bpe" and bpe.vocab_size == 320
    assert len(bpe.encode("the cat sat")) <= 3


def test_too_small_vocabulary_is_refused():
    with pytest.raises(ConfigError, match="vocab_size is 256"):
        train_bpe(["text"], 256)


def test_foreign_tokenizer_is_not_cut_padded_or_decorated(tmp_path):
    tokenizer = foreign(tmp_path, ["<s>", "</s>"])
    text = "some text </s> that is longer than four tokens"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode("z")) == 1
    assert tokenizer.eos == 1


def test_foreign_tokenizer_without_end_of_text_gets_one(tmp_path):
    tokenizer = foreign(tmp_path, [])
    assert tokenizer.eos == tokenizer.vocab_size - 1
    assert tokenizer.eos not in json.loads(tokenizer.text)["model"]["vocab"].values()
    assert tokenizer.decode([*tokenizer.encode("hi"), tokenizer.eos]) == "hi"


def word_level(vocab: dict[str, int]) -> bytes:
    model = {"type": "WordLevel", "vocab": vocab, "unk_token": "[UNK]"}
    return json.dumps({"version": "1.0", "model": model, "pre_tokenizer": {"type": "Whitespace"}}).encode()


def test_a_tokenizer_that_lacks_its_token_for_unknown_words_says_so(tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(word_level({"known": 0}))
    with pytest.raises(DataError, match="wordlevel tokenizer cannot encode this text: .*UNK"):
        load_tokenizer(path).encode("something else")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "does not exist"),
        (b"{not json", "is not JSON"),
        (b"\xff\xfe", "cannot be read"),
        (b'{"a": 1}', "no usable tokenizer.json"),
        (b"[]", "no usable tokenizer.json"),
        (b"[" * 100_000, "nested too deeply"),
        (word_level({"[UNK]": 0, "word": 10**8}), "ids up to 100,000,001"),
    ],
)
def test_bad_tokenizer_files(tmp_path, content, message):
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        load_tokenizer(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_equality_is_by_content(bpe):
    assert BpeTokenizer(bpe.text) == bpe
    assert ByteTokenizer() == ByteTokenizer()
