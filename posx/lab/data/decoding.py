"""Decode text files, name all that cannot be decoded at once, and find text that was decoded wrongly.

A byte-order mark decides the encoding of its file, whatever the setting says.
"""

import codecs
import re
import shlex
import unicodedata
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from posx.errors import DataError
from posx.lab.progress import quantity

_MARKS = {
    codecs.BOM_UTF8: "utf-8", codecs.BOM_UTF32_LE: "utf-32", codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16",
}  # fmt: skip
#: Encodings of several bytes a character, whose files have zero bytes. UTF-32 first: its text is also valid UTF-16.
_WIDE = ("utf-32-le", "utf-32-be", "utf-16-le", "utf-16-be")
_ICONV = {name: name.replace("-le", "le").replace("-be", "be") for name in _WIDE}
_ICONV |= {"cp1252": "cp1252", "latin-1": "iso-8859-1", "": "ENCODING"}
_CONTROL = re.compile(r"[\x00-\x08\x0e-\x1f]")
NAMED = 10  # files that a message names
_SAMPLE = 4096  # characters by which a guess is judged
_MOST_BLOCKS = 100  # of 256 characters, that a sample of text has characters of


class TextDecoder:
    """Decodes files by one setting. Files that do not fit are kept for `check`, doubtful ones for `warnings`."""

    def __init__(self, encoding: str):
        self.encoding = encoding
        self.num_files = 0
        self.plain_utf8 = True  # whether all files that could be decoded are ASCII
        self.failed: dict[Path, tuple[str, str]] = {}  # the reason, and a key of `_ICONV` or a word of `_fix`
        self.mojibake: list[tuple[Path, str, str]] = []
        self.controls: list[Path] = []
        self.maybe_cp1252 = True  # whether all of `controls` are valid cp1252

    def text(self, path: Path) -> str | None:
        """Return the text of a file, None if it cannot be decoded."""
        raw = path.read_bytes()
        self.num_files += 1
        mark = next((name for mark, name in _MARKS.items() if raw.startswith(mark)), "")
        encoding = mark or self.encoding
        try:
            text = raw.decode(encoding)
        except UnicodeError as error:
            self._refuse(path, raw, encoding, getattr(error, "start", 0))
            return None
        if "\0" in text or not (mark or _is_in_order(raw, text, encoding)):
            self._refuse(path, raw, encoding, None)
            return None
        self.plain_utf8 &= raw.isascii()
        if encoding == self.encoding:
            self._doubt(path, raw, text)
        return text

    def _refuse(self, path: Path, raw: bytes, encoding: str, at: int | None) -> None:
        """Keep the reason why a file cannot be decoded. `at` is the offset of the first wrong byte, None for a NUL."""
        guess = _wide_encoding(raw) if b"\0" in raw or at is None else ""
        if guess:
            reason = f"looks like {guess} without a byte-order mark"
        elif at is None or (b"\0" in raw and encoding.lower().startswith("utf-8")):
            reason, guess = f"is a binary file (NUL at byte {raw.index(0)})", "binary"
        elif _decodes(raw, "utf-8"):
            reason, guess = f"is utf-8, not {encoding}", "utf-8"
        elif strays := _stray_bytes(raw):
            at, count = strays
            reason = f"is utf-8 but for {quantity(count, 'byte')}, the first of them 0x{raw[at]:02X} at offset {at}"
            guess = "strays"
        else:
            reason = f"is not {encoding}: byte 0x{raw[at]:02X} at offset {at}"
            guess = "latin-1" if not re.search(b"[\x80-\x9f]", raw) else "cp1252" if _decodes(raw, "cp1252") else ""
        self.failed[path] = reason, guess

    def _doubt(self, path: Path, raw: bytes, text: str) -> None:
        """Keep a file if its bytes are UTF-8 that the setting reads as something else, or have control characters."""
        kind = codecs.lookup(self.encoding).name
        if kind.startswith("utf-8") or (raw.isascii() and not kind.startswith(("utf-16", "utf-32"))):
            return
        if not (_decodes(raw, "utf-8") or _stray_bytes(raw)):
            if re.search("[\x80-\x9f]", text):
                self.controls.append(path)
                self.maybe_cp1252 &= _decodes(raw, "cp1252")
            return
        meant = raw.decode("utf-8", "ignore")
        if meant != text and not _CONTROL.search(meant):
            match = re.search(r"\w*[^\x00-\x7f]\w*", meant)
            word = (match[0] if match else meant)[:20]
            self.mojibake.append((path, word, word.encode().decode(self.encoding, "replace")))

    def check(self) -> None:
        """Raise DataError with all files that could not be decoded, and how to mend them."""
        if not self.failed:
            return
        reasons = [f"'{path}' {reason}" for path, (reason, _) in self.failed.items()]
        told = reasons[0]
        if len(reasons) > 1:
            more = f"; and {len(reasons) - NAMED} more" if len(reasons) > NAMED else ""
            told = f"{len(reasons)} of {self.num_files} text files cannot be read: {'; '.join(reasons[:NAMED])}{more}"
        raise DataError(f"{told}. {self._fix()}")

    def _fix(self) -> str:
        guesses = {guess: shlex.quote(str(path)) for path, (_, guess) in reversed(self.failed.items())}
        advice = ["Name text. Token ids are read from .npy files, and from .bin files with data.dtype"] * (
            "binary" in guesses
        )
        is_utf8 = "utf-8" in guesses or ("strays" in guesses and codecs.lookup(self.encoding).name != "utf-8")
        advice += ["Leave data.text_encoding out"] * is_utf8
        if path := guesses.get("strays"):
            advice.append(f"Drop these bytes, for example: iconv -c -f UTF-8 -t UTF-8 {path} > FILE")
        guesses = {guess: path for guess, path in guesses.items() if guess in _ICONV}
        wide = guesses.keys() & set(_WIDE)
        if wide and not advice and len(guesses) == 1 and len(self.failed) == self.num_files:
            return f"Set --config.data.text_encoding={wide.pop()}"
        commands = [f"iconv -f {_ICONV[guess]} -t UTF-8 {path} > FILE" for guess, path in guesses.items()]
        if commands:
            advice.append(f"Convert to UTF-8, for example: {'; '.join(commands)}")
        if commands and not wide and "" not in guesses and self.plain_utf8 and len(advice) == 1:
            advice.append(f"Or set data.text_encoding, as in --config.data.text_encoding={min(guesses)}")
        return ". ".join(advice)

    def warnings(self) -> Iterator[str]:
        """Yield a line on files whose bytes are UTF-8 but were read as something else, and on control characters."""
        if self.mojibake:
            path, meant, word = self.mojibake[0]
            yield (
                f"warning: data.text_encoding={self.encoding}, but {len(self.mojibake)} of "
                f"{quantity(self.num_files, 'file')} are UTF-8: '{path.name}' gives {word!r} instead of "
                f"{meant!r}. Leave data.text_encoding out, or convert the other files to UTF-8."
            )
        if self.controls:
            yield (
                f"warning: read as {self.encoding}, {len(self.controls)} of {quantity(self.num_files, 'file')} have "
                f"control characters U+0080 to U+009F, first '{self.controls[0].name}'. "
                + "They may be cp1252: set --config.data.text_encoding=cp1252, or convert" * self.maybe_cp1252
                + "They are of another encoding: convert" * (not self.maybe_cp1252)
                + " them to UTF-8."
            )


def _decodes(raw: bytes, encoding: str) -> bool:
    try:
        raw.decode(encoding)
    except UnicodeDecodeError:
        return False
    return True


def _stray_bytes(raw: bytes) -> tuple[int, int] | None:
    """Return the offset of the first byte that is not UTF-8 and the number of such bytes, None for other text.

    A file that was cut inside a character has such bytes. Text of another encoding has more of them than characters of
    several bytes, as hardly any of its bytes form one by accident.
    """
    try:
        raw.decode("utf-8")
        return None
    except UnicodeDecodeError as error:
        text = raw.decode("utf-8", "ignore")
        strays, characters = len(raw) - len(text.encode()), len(text) - len(text.encode("ascii", "ignore"))
        return (error.start, strays) if strays < characters else None


def _wide_encoding(raw: bytes) -> str:
    """Return the encoding of _WIDE that bytes without a mark are probably of, "" if of none.

    Bytes that are also valid UTF-8 must have a tenth of control characters at least: one stray NUL makes no UTF-16.
    Token ids are valid UTF-16 too, but have other characters than text: see `_like_text`.
    """
    likely = not _decodes(raw, "utf-8") or len(_CONTROL.findall(raw.decode("utf-8"))) * 10 > len(raw)
    shares: dict[str, float] = {}
    for name in _WIDE if likely else ():
        try:
            text = raw.decode(name)
        except UnicodeDecodeError:
            continue
        if "\0" not in text and (share := _like_text(text[:_SAMPLE])):
            shares[name] = share
    return max(shares, key=shares.__getitem__, default="")


def _is_in_order(raw: bytes, text: str, encoding: str) -> bool:
    """Tell whether bytes without a mark, read as `text` by a wide encoding, are not text of the other byte order.

    In the wrong order the letters of a script, which share a few blocks, are spread over many.
    """
    if not codecs.lookup(encoding).name.startswith(("utf-16", "utf-32")) or not (guess := _wide_encoding(raw)):
        return True
    meant, sample = raw.decode(guess)[:_SAMPLE], text[:_SAMPLE]
    is_spread = _blocks(sample) > min(_MOST_BLOCKS, 2 * _blocks(meant))
    return meant == sample or not (is_spread or _like_text(meant) > 0.5)


def _blocks(sample: str) -> int:
    """Return the number of blocks of 256 characters that a sample has characters of."""
    return len({ord(char) >> 8 for char in sample})


def _like_text(sample: str) -> float:
    """Return the share of ASCII and of East Asian punctuation, 0 if a sample is not like text.

    Text of any script has at least a twentieth of these, hardly a control character, and few blocks of 256 characters.
    """
    code = np.frombuffer(sample.encode("utf-32-le"), "<u4")
    control = sum(unicodedata.category(char)[0] == "C" and char not in "\t\n\r\f" for char in sample)
    common = (code < 0x80) | ((code >= 0x3000) & (code < 0x3040)) | ((code >= 0xFF00) & (code < 0xFFF0))
    share = float(common.mean())
    is_text = share >= 0.05 and control <= 0.01 * len(sample) and _blocks(sample) <= _MOST_BLOCKS
    return share if is_text else 0.0
