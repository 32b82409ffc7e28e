"""Tokenizers: bytes, byte-level BPE trained here, any tokenizer.json, or ids alone.

All classes have one interface:

* `name`, `encode`, `encode_batch`, `encode_whole`, `token_bytes`, `decode` and `spell`.
* `vocab_size`: ids are below it. `num_ids`: ids of a text that was tokenised elsewhere are below it.
* `special` holds {text: id} of the special tokens.
* `text` is the text of the file that `save` writes.
* `digest` is the sha256 of `text` in hex. For an imported model it is that of its tokenizer.json, `begin` and `eos`.
* `inner` is the tokenizer of text after a special token.

Text inside a document that looks like a special token stays text. Text with a lone surrogate, which has no UTF-8 form,
is a DataError. Some ids have a meaning:

* `eos` is the one separator. It is only added as an id, after each document.
* `begin` is the first token of a prompt or a scored text.
* `template` holds the ids that the file itself puts before a text, () without any.
* `strips` holds {id: (whether it drops white space before it, and after it)} of special tokens that stand in a text.
* `ends` holds the ids at which an imported model ends a generation, () for all others.
"""

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from posx.errors import DataError
from posx.lab.files.lines import parse_json

EOS = "<|endoftext|>"
_EOS_NAMES = (EOS, "</s>", "<|end_of_text|>", "<eos>", "<EOS>", "<|eos|>", "[EOS]", "[SEP]")
#: A model has a row for every id. More ids than this many times the number of tokens are an error.
SPARSE = 8
#: Characters of a word above which a text is cut inside it to train a BPE: each merge takes the square of its length.
LONGEST_WORD = 1000
_LONG_WORD = re.compile(rf"(?<!\S)\S{{{LONGEST_WORD + 1},}}|(?<!\s)\s{{{LONGEST_WORD + 1},}}")
_IDS_TYPE = "posx-ids"
#: The key in a stored tokenizer.json under which posx keeps the ids of an imported model.
_OF_MODEL = "posx"
_BYTES_JSON = json.dumps({"type": "posx-bytes", "version": 1, "vocab_size": 257, "eos": 256})


def token_dtype(vocab_size: int) -> np.dtype:
    """Return the smallest unsigned type that holds every id below `vocab_size`."""
    return np.min_scalar_type(vocab_size - 1)


class _Tokenizer:
    """A tokenizer that is held as the text of its file, so that equality is by content."""

    text: str
    encode_batch: Callable[[Sequence[str]], list[np.ndarray]]
    decode: Callable[[Any], str]

    strips: ClassVar[Mapping[int, tuple[bool, bool]]] = {}

    @property
    def inner(self) -> Any:
        return self

    @property
    def template(self) -> tuple[int, ...]:
        return ()

    @property
    def ends(self) -> tuple[int, ...]:
        return ()

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()

    def encode(self, text: str) -> np.ndarray:
        """Return ids [n] of the smallest unsigned type."""
        return self.encode_batch([text])[0]

    def encode_whole(self, text: str, special: bool) -> list[int]:
        """Return the ids of a text as transformers encodes it: with special tokens inside the text matched.

        Args:
          text: the text.
          special: whether the template puts its ids around the text.
        """
        return self.encode(text).tolist()

    def spell(self, number: int) -> str:
        """Return the text of one id, that of special tokens too; "" for an id that stands for nothing."""
        return self.decode([number])

    def save(self, path: str | os.PathLike[str]) -> None:
        Path(path).write_bytes(self.text.encode())


@dataclass(frozen=True)
class ByteTokenizer(_Tokenizer):
    """UTF-8 bytes as ids 0-255, and `eos` 256. Broken UTF-8 is decoded as U+FFFD."""

    text = _BYTES_JSON
    name = "bytes"
    vocab_size = num_ids = 257
    eos = begin = 256
    special: ClassVar[Mapping[str, int]] = {}

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(utf8(text), np.uint8).astype(np.uint16) for text in texts]

    def token_bytes(self, texts: Sequence[str]) -> list[np.ndarray | None]:
        return [np.ones(len(utf8(text)), np.int64) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        array = _check_ids(ids, self.vocab_size)
        return array[array < 256].astype(np.uint8).tobytes().decode("utf-8", errors="replace")


@dataclass(frozen=True)
class IdTokenizer(_Tokenizer):
    """The ids 0 to `num_ids` - 1 of an unknown tokenizer, and `eos` after them. The text of an id is its number."""

    num_ids: int
    name = "ids"
    special: ClassVar[Mapping[str, int]] = {}

    @property
    def eos(self) -> int:
        return self.num_ids

    @property
    def begin(self) -> int:
        return self.num_ids

    @property
    def vocab_size(self) -> int:
        return self.num_ids + 1

    @property
    def text(self) -> str:  # type: ignore[override]
        return json.dumps({"type": _IDS_TYPE, "version": 1, "num_ids": self.num_ids})

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the ids that texts list, as in "17 4 256". Raises DataError for other text."""
        return [np.array([self._id(word) for word in text.split()], token_dtype(self.vocab_size)) for text in texts]

    def _id(self, word: str) -> int:
        if not (word.isascii() and word.isdigit() and len(word) < 20 and int(word) < self.num_ids):
            raise DataError(
                f"'{word[:20]}' is no id below {self.num_ids}. The tokenizer of this text is not known, so write ids "
                "with spaces between them, such as '17 4 256'."
            )
        return int(word)

    def token_bytes(self, texts: Sequence[str]) -> list[np.ndarray | None]:
        return [None for _ in texts]

    def decode(self, ids: Iterable[int]) -> str:
        array = _check_ids(ids, self.vocab_size)
        return " ".join(map(str, array[array < self.num_ids].tolist()))


@dataclass(frozen=True)
class BpeTokenizer(_Tokenizer):
    """A Hugging Face tokenizer, held as the text of its tokenizer.json and the ids of an imported model in it."""

    text: str

    @cached_property
    def _parts(self) -> tuple[str, Mapping[str, Any]]:
        if f'"{_OF_MODEL}"' not in self.text or _OF_MODEL not in (stored := parse_json(self.text)):
            return self.text, {}
        ids = stored.pop(_OF_MODEL)
        return json.dumps(stored, ensure_ascii=False), ids

    @property
    def plain(self) -> str:
        """The tokenizer.json as Hugging Face reads it: without the ids of a model."""
        return self._parts[0]

    @property
    def model_ids(self) -> Mapping[str, Any]:
        """The ids of an imported model, as `with_model` keeps them; empty for every other tokenizer."""
        return self._parts[1]

    @property
    def digest(self) -> str:
        # The settings of generation beside the ids change no text, so they do not keep two rows apart.
        named = f"{self.plain}\n{self.begin} {self.eos}" if self.model_ids else self.text
        return hashlib.sha256(named.encode()).hexdigest()

    @cached_property
    def name(self) -> str:
        """The kind of model in the file: "bpe", "unigram", "wordpiece" or "wordlevel"."""
        return str(parse_json(self.text)["model"].get("type", "bpe")).lower()

    @cached_property
    def _tokenizer(self) -> Any:
        tokenizer = self._read()
        tokenizer.encode_special_tokens = True  # by default they are matched inside the text
        tokenizer.post_processor = None  # adds special tokens, and cuts white space off the offsets
        return tokenizer

    @cached_property
    def _own(self) -> Any:
        return self._read()

    def _read(self) -> Any:
        """Return the library's tokenizer. A stored one may cut or pad its output: that is switched off."""
        from tokenizers import Tokenizer as HfTokenizer

        tokenizer = HfTokenizer.from_str(self.plain)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return tokenizer

    @cached_property
    def vocab(self) -> dict[str, int]:
        """The tokens in use; other ids below `vocab_size` stand for nothing."""
        return self._tokenizer.get_vocab(with_added_tokens=True)

    @cached_property
    def num_ids(self) -> int:
        return max(self.vocab.values()) + 1

    @cached_property
    def special(self) -> dict[str, int]:
        return {token.content: number for number, token in self._tokenizer.get_added_tokens_decoder().items()}

    @cached_property
    def strips(self) -> dict[int, tuple[bool, bool]]:  # type: ignore[override]
        added = self._tokenizer.get_added_tokens_decoder()
        return {number: (token.lstrip, token.rstrip) for number, token in added.items()}

    @cached_property
    def inner(self) -> "BpeTokenizer":
        text = re.sub(r'("prepend_scheme":\s*)"first"', r'\1"never"', self.plain)  # its space is for the start alone
        return self if text == self.plain else BpeTokenizer(text)

    @cached_property
    def eos(self) -> int:
        """The first end token of an imported model, else the first special token of the file that is known as one.

        Without either, a new id after the last.
        """
        added = self._tokenizer.get_added_tokens_decoder()
        special = {token.content: number for number, token in added.items() if token.special}
        return next(iter(self.ends), next((special[name] for name in _EOS_NAMES if name in special), self.num_ids))

    @cached_property
    def template(self) -> tuple[int, ...]:
        """The ids that the file's own template puts before a text, such as Llama's <s>; () without any."""
        from tokenizers import Tokenizer as HfTokenizer

        # Any text is one token of this vocabulary.
        whole = dict.fromkeys(("normalizer", "pre_tokenizer", "decoder")) | {"version": "1.0", "added_tokens": []}
        whole["model"] = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}
        whole["post_processor"] = parse_json(self.plain).get("post_processor")
        encoding = HfTokenizer.from_str(json.dumps(whole)).encode("a")
        return tuple(encoding.ids[: encoding.special_tokens_mask.index(0)])

    @cached_property
    def begin(self) -> int:
        """The first id of `template`, else the begin token of an imported model, else `eos`."""
        of_model = self.model_ids.get("begin")
        return next(iter(self.template), self.eos if of_model is None else int(of_model))

    @cached_property
    def ends(self) -> tuple[int, ...]:
        """The end tokens of an imported model: those of its config.json, then those of its generation_config.json."""
        return tuple(map(int, self.model_ids.get("ends", ())))

    @cached_property
    def vocab_size(self) -> int:
        return 1 + max(self.num_ids - 1, self.eos, self.begin, *self.ends)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        encodings = self._encodings(texts, self._tokenizer.encode_batch_fast)
        return [np.array(encoding.ids, token_dtype(self.vocab_size)) for encoding in encodings]

    def token_bytes(self, texts: Sequence[str]) -> list[np.ndarray | None]:
        """Return, for each text, the bytes of the text behind each of its tokens, int64 [n].

        Text that the tokenizer drops, such as white space, counts with the token after it. A character that several
        tokens share is divided among them. None for a text if the tokenizer cannot tell.
        """
        encodings = self._encodings(texts, self._tokenizer.encode_batch)
        return [_token_bytes(encoding.offsets, text) for encoding, text in zip(encodings, texts, strict=True)]

    def _encodings(self, texts: Sequence[str], encode: Callable[..., list[Any]], special: bool = False) -> list[Any]:
        for text in texts:
            utf8(text)
        try:
            return encode(list(texts), add_special_tokens=special)
        except Exception as error:  # a plain one: for example of a tokenizer that lacks the token for unknown words
            raise DataError(
                f"the {self.name} tokenizer cannot encode this text: {self._missing_words(texts) or error}"
            ) from None

    def _missing_words(self, texts: Sequence[str]) -> str:
        """Return which words of `texts` a tokenizer of whole words lacks; "" for any other tokenizer."""
        words = sorted(self.vocab, key=self.vocab.__getitem__) if self.name == "wordlevel" else []
        unknown = sorted({word for text in texts for word in text.split()}.difference(words)) if words else []
        known = " ".join(words[:20]) + (f" and {len(words) - 20} more" if words[20:] else "")
        return f"{', '.join(map(repr, unknown))} is no word of it. It has {known}." if unknown else ""

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of `ids` without special tokens. Raises DataError for ids outside the vocabulary."""
        array = _check_ids(ids, self.vocab_size)
        return self._tokenizer.decode(array[array < self.num_ids].tolist(), skip_special_tokens=True)

    def encode_whole(self, text: str, special: bool) -> list[int]:
        (encoding,) = self._encodings([text], self._own.encode_batch, special)
        return encoding.ids

    def spell(self, number: int) -> str:
        return self._own.decode([number], skip_special_tokens=False) if number < self.num_ids else ""


Tokenizer = ByteTokenizer | BpeTokenizer | IdTokenizer


def train_bpe(documents: Iterable[str], vocab_size: int) -> BpeTokenizer:
    """Train a byte-level BPE of at most `vocab_size` tokens, 256 bytes and `eos` among them, always with one result."""
    from tokenizers import Tokenizer as HfTokenizer
    from tokenizers import decoders, models, pre_tokenizers, trainers

    tokenizer = HfTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[EOS], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator((utf8(piece).decode() for text in documents for piece in _cut_words(text)), trainer)
    return BpeTokenizer(tokenizer.to_str())


def _cut_words(text: str) -> Iterator[str]:
    """Yield `text` in pieces in which no run of letters, or of white space, is longer than LONGEST_WORD."""
    start = 0
    for word in _LONG_WORD.finditer(text):
        for end in range(word.start() + LONGEST_WORD, word.end(), LONGEST_WORD):
            yield text[start:end]
            start = end
    yield text[start:]


def load_tokenizer(path: str | os.PathLike[str]) -> Tokenizer:
    """Load a file that `save` wrote, or any tokenizer.json. Raises DataError if it is missing, not JSON or unusable."""
    path = Path(path).expanduser()
    path = path / "tokenizer.json" if path.is_dir() else path
    try:
        text = path.read_bytes().decode("utf-8")
        stored = parse_json(text)
        if stored == parse_json(_BYTES_JSON):
            return ByteTokenizer()
        if isinstance(stored, dict) and stored.get("type") == _IDS_TYPE:
            return IdTokenizer(int(stored["num_ids"]))
    except FileNotFoundError:
        raise DataError(
            f"tokenizer '{path}' does not exist. Use 'bytes', 'bpe' (trained here), 'ids' or the path of a "
            "tokenizer.json."
        ) from None
    except (OSError, ValueError, KeyError, TypeError, ArithmeticError) as error:
        raise DataError(f"tokenizer '{path}' cannot be read as JSON ({error}). Name a tokenizer.json.") from None
    tokenizer = BpeTokenizer(text)
    try:
        used, size = len(tokenizer.vocab), tokenizer.vocab_size
    except Exception as error:  # the parser raises plain Exception
        cause = str(error).splitlines()[0]
        raise DataError(
            f"tokenizer '{path}' is JSON, but no usable tokenizer.json ({cause}). Export it again from its library."
        ) from None
    if size > SPARSE * used + 1024:
        raise DataError(
            f"tokenizer '{path}' has {used:,} tokens with ids up to {size - 1:,}. Number them without gaps."
        )
    return tokenizer


def with_model(text: str, ids: Mapping[str, Any]) -> str:
    """Return the text of a tokenizer.json with the ids of a model. A `BpeTokenizer` of that text uses these ids.

    Args:
      text: a tokenizer.json.
      ids: "begin" (an id or None) and "ends" (ids, the first of which is `eos`). "config" holds the "bos_token_id" and
        "eos_token_id" of the model's file, each if it is there. "generation_config" is as in that file, or None.
    """
    return json.dumps({**parse_json(text), _OF_MODEL: dict(ids)}, ensure_ascii=False)


def utf8(text: str) -> bytes:
    """Return the UTF-8 bytes of `text`. Raises DataError for a lone surrogate."""
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(
            f"the text has the lone surrogate U+{ord(text[error.start]):04X} at character {error.start}, which "
            "has no UTF-8 form. Remove it from the input."
        ) from None


def _check_ids(ids: Iterable[int], vocab_size: int) -> np.ndarray:
    array = np.asarray(ids if isinstance(ids, np.ndarray) else list(ids), np.int64).reshape(-1)
    if array.size and (array.min() < 0 or array.max() >= vocab_size):
        raise DataError(
            f"ids {array.min()} to {array.max()} cannot be decoded; the vocabulary is 0 to {vocab_size - 1}."
        )
    return array


def _token_bytes(offsets: Sequence[tuple[int, int]], text: str) -> np.ndarray | None:
    """Return the UTF-8 bytes of `text` behind each token, from the tokens' spans in characters.

    A token ends with its span, and starts at the end of the tokens before it. Tokens that end at the same place share
    their bytes evenly. Byte fallback gives such tokens, and so does a prefix that is not in the text, with the
    character after it. The result is None if the spans run backwards or leave out letters at the end, as they are then
    not places in `text`.
    """
    ends = np.array([end for _, end in offsets], np.int64)
    last = int(ends[-1]) if len(ends) else 0
    if (np.diff(ends) < 0).any() or last > len(text) or any(map(str.isalnum, text[last:])):
        return None
    code = np.frombuffer(text.encode("utf-32-le"), "<u4")
    sizes = 1 + (code >= 0x80) + (code >= 0x800) + (code >= 0x10000)  # of UTF-8
    places = np.concatenate([[0], np.cumsum(sizes)])[ends]
    stops, first, count = np.unique(places, return_index=True, return_counts=True)
    group = np.repeat(np.arange(len(stops)), count)
    size, nth = np.diff(stops, prepend=0)[group], np.arange(len(places)) - first[group] + 1
    return size * nth // count[group] - size * (nth - 1) // count[group]
