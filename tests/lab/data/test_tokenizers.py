"""Both tokenizers keep every byte, never read special tokens out of text, and survive being saved."""

import json
import string

import numpy as np
import pytest
import tokenizers as hf

from posx.errors import DataError
from posx.lab.data import BpeTokenizer, ByteTokenizer, load_tokenizer, train_bpe
from posx.lab.data.tokenizers import LONGEST_WORD

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
    (sizes,) = tokenizer.token_bytes([text])
    assert len(sizes) == len(ids) and sizes.sum() == len(text.encode())
    assert tokenizer.eos not in ids


def test_interface(tokenizer):
    assert tokenizer.eos < tokenizer.vocab_size
    assert len(tokenizer.digest) == 64
    for ids, text in zip(tokenizer.encode_batch(TEXTS), TEXTS, strict=True):
        np.testing.assert_array_equal(ids, tokenizer.encode(text))
        assert ids.dtype == np.uint16


LETTERS = string.ascii_lowercase
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
DOG = "i love a dog"


def metaspace(scheme, space=True, fallback=True, normalizer=None):
    """A SentencePiece unigram model of letters, with or without a token of its own for a space."""
    pieces = [("<unk>", 0.0), *((piece, -10.0) for piece in BYTES), *((letter, -3.0) for letter in LETTERS)]
    made = hf.Tokenizer(hf.models.Unigram(pieces + [("\u2581", -2.0)] * space, unk_id=0, byte_fallback=fallback))
    made.pre_tokenizer = hf.pre_tokenizers.Metaspace(prepend_scheme=scheme)
    if normalizer is not None:
        made.normalizer = normalizer
    return made


def llama():
    """BPE with byte fallback whose normaliser puts a space in front."""
    vocab = {piece: n for n, piece in enumerate(["<unk>", *BYTES, "\u2581", *LETTERS])}
    made = hf.Tokenizer(hf.models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    made.normalizer = hf.normalizers.Sequence([hf.normalizers.Prepend("\u2581"), hf.normalizers.Replace(" ", "\u2581")])
    return made


def bert():
    pieces = ["[UNK]", *LETTERS, *(f"##{letter}" for letter in LETTERS)]
    made = hf.Tokenizer(hf.models.WordPiece({piece: n for n, piece in enumerate(pieces)}, unk_token="[UNK]"))
    made.normalizer, made.pre_tokenizer = hf.normalizers.BertNormalizer(), hf.pre_tokenizers.BertPreTokenizer()
    return made


def byte_level(prefix, normalizer=None):
    alphabet = sorted(hf.pre_tokenizers.ByteLevel.alphabet())
    made = hf.Tokenizer(hf.models.BPE({piece: n for n, piece in enumerate(alphabet)}, []))
    made.pre_tokenizer = hf.pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    made.post_processor = hf.processors.ByteLevel(trim_offsets=True)
    if normalizer is not None:
        made.normalizer = normalizer
    return made


KINDS = {
    "no token for a space": lambda: metaspace("never", space=False),
    "a prefix": lambda: metaspace("always"),
    "llama": llama,
    "bert": bert,
    "unknown words": lambda: metaspace("first", fallback=False, normalizer=hf.normalizers.NFKC()),
    "byte-level": lambda: byte_level(False),
    "byte-level with a prefix": lambda: byte_level(True),
    "byte-level, NFD, lower case": lambda: byte_level(
        False, hf.normalizers.Sequence([hf.normalizers.NFD(), hf.normalizers.Lowercase()])
    ),
}


@pytest.mark.parametrize("text", [DOG, "  \ufb01ne \u00bd  \u00c9a", "\u6f22\U0001f642 x", "a\u0301\n\nb"])
@pytest.mark.parametrize("kind", KINDS)
def test_bytes_of_tokens_are_those_of_the_source_text(kind, text):
    """Every tokenizer divides the same bytes, whatever its tokens look like."""
    tokenizer = BpeTokenizer(KINDS[kind]().to_str())
    (sizes,) = tokenizer.token_bytes([text])
    assert len(sizes) == len(tokenizer.encode(text)) and sizes.min() >= 0
    assert sizes.sum() == len(text.encode())


def test_bytes_of_tokens_follow_each_token_to_its_place():
    for kind, wanted in (
        ("no token for a space", [1, 0, 0, 1, 1, 1, 1, 1, 0, 0, 1, 1, 0, 0, 1, 1, 1, 1]),
        ("a prefix", [0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1]),
        ("bert", [1, 2, 1, 1, 1, 2, 2, 1, 1]),  # a space is dropped: it counts with the letter after it
    ):
        (sizes,) = BpeTokenizer(KINDS[kind]().to_str()).token_bytes([DOG])
        assert sizes.tolist() == wanted, kind
    (sizes,) = BpeTokenizer(llama().to_str()).token_bytes(["\u6f22 \u00e9"])
    assert sizes.tolist() == [0, 1, 1, 1, 1, 1, 1], "a prefix that is not in the text, then byte fallback"


def test_bytes_of_tokens_are_unknown_without_offsets():
    """A BPE without a token for unknown letters drops them, and then counts places in what is left."""
    made = BpeTokenizer(hf.Tokenizer(hf.models.BPE({"a": 0, "l": 1}, [])).to_str())
    assert made.encode(DOG).tolist() == [1, 0]
    assert made.token_bytes([DOG, "lala"])[0] is None
    assert made.token_bytes(["lala"])[0].tolist() == [1, 1, 1, 1]


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


def test_bpe_learns_no_merge_across_the_cut_of_a_long_word():
    """DNA has no spaces, and the time to learn from a word rises with the square of its length: so it is cut."""
    text = 5 * ("c" + (LONGEST_WORD - 2) * "a" + "b")
    tokenizer = train_bpe([text], 300)
    assert not any("bc" in tokenizer.spell(number) for number in range(tokenizer.vocab_size))
    assert len(tokenizer.encode(text)) < 0.1 * len(text) and tokenizer.decode(tokenizer.encode(text)) == text


def test_foreign_tokenizer_is_not_cut_padded_or_decorated(tmp_path):
    tokenizer = foreign(tmp_path, ["<s>", "</s>"])
    text = "some text </s> that is longer than four tokens"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode("z")) == 1
    assert (tokenizer.begin, tokenizer.eos) == (0, 1)


def test_foreign_tokenizer_without_end_of_text_gets_one(tmp_path):
    tokenizer = foreign(tmp_path, [])
    assert tokenizer.begin == tokenizer.eos == tokenizer.vocab_size - 1
    assert tokenizer.eos not in json.loads(tokenizer.text)["model"]["vocab"].values()
    assert tokenizer.decode([*tokenizer.encode("hi"), tokenizer.eos]) == "hi"


def word_level(vocab: dict[str, int]) -> bytes:
    model = {"type": "WordLevel", "vocab": vocab, "unk_token": "[UNK]"}
    return json.dumps({"version": "1.0", "model": model, "pre_tokenizer": {"type": "Whitespace"}}).encode()


def test_tokenizer_without_its_unknown_token_is_an_error(tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(word_level({"known": 0}))
    with pytest.raises(DataError, match="wordlevel tokenizer cannot encode .* 'else', 'something' is no word of it."):
        load_tokenizer(path).encode("something else")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "does not exist"),
        (b"{not json", "cannot be read as JSON"),
        (b"\xff\xfe", "cannot be read"),
        (b'{"a": 1}', "no usable tokenizer.json"),
        (b"[]", "no usable tokenizer.json"),
        (b'{"type": "posx-ids", "num_ids": 1e999}', "cannot be read as JSON"),
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
