"""Chat messages as text, by named templates.

A template writes one message after the other. Its markers, such as <|im_start|>, become the special tokens of a
tokenizer that has them, and stay text for other tokenizers. Marker text inside a message is text. All tokens are
training targets, those of the user too.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from posx.errors import DataError, nearest
from posx.lab.data.tokenizers import utf8

_OTHER_FORMS = ("tool_calls", "function_call")


class Template(NamedTuple):
    """The form of one message of a chat.

    The token that begins a text is no part of a template, because posx puts it before a text itself.

    Attributes:
      turn: a message, with {role} and {content}.
      markers: the parts of `turn` that are special tokens.
      roles: {role: its name in the text}.
      strips: white space around a content is dropped.
    """

    turn: str
    markers: tuple[str, ...]
    roles: Mapping[str, str]
    strips: bool


_ROLES = {name: name for name in ("system", "user", "assistant")}
TEMPLATES = {
    "chatml": Template("<|im_start|>{role}\n{content}<|im_end|>\n", ("<|im_start|>", "<|im_end|>"), _ROLES, False),
    "llama3": Template(
        "<|start_header_id|>{role}<|end_header_id|>\n\n{content}<|eot_id|>",
        ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"), _ROLES, True,
    ),
    "gemma": Template(
        "<start_of_turn>{role}\n{content}<end_of_turn>\n",
        ("<start_of_turn>", "<end_of_turn>"), {"user": "user", "assistant": "model"}, True,
    ),
}  # fmt: skip


class Chat(str):
    """The text of a chat. `pieces` are its parts in order: text at even places, markers of its template at odd ones."""

    pieces: tuple[str, ...]

    def __new__(cls, pieces: Sequence[str]) -> "Chat":
        made = super().__new__(cls, "".join(pieces))
        made.pieces = tuple(pieces)
        return made

    def parts(self, special: Mapping[str, int]) -> list[str | int]:
        """Return the text between the markers that are special tokens, and the ids of these. Empty text is left out."""
        parts: list[str | int] = [""]
        for place, piece in enumerate(self.pieces):
            if place % 2 and piece in special:
                parts += [special[piece], ""]
            else:
                parts[-1] = f"{parts[-1]}{piece}"
        return [part for part in parts if part != ""]


def render_chat(messages: Sequence[Any], name: str, where: str) -> Chat:
    """Return the text of messages, each a mapping with the texts `role` and `content`.

    Args:
      messages: of one chat, in order.
      name: of the template.
      where: the place of the chat, for messages to the user.

    Raises:
      DataError: no template is named, or a message is of another form or of a role that the template lacks.
    """
    if not name:
        raise DataError(
            f"{where} holds chat messages. Name the template that writes them as text: --config.data.template=chatml "
            f"(one of {', '.join(TEMPLATES)})"
        )
    template = TEMPLATES[name]
    form = re.split(f"({'|'.join(map(re.escape, template.markers))})", template.turn)
    pieces = [""]
    for number, message in enumerate(messages):
        role, content = _read_message(message, template, name, f"{where}, message {number}")
        turn = [part.replace("{role}", role).replace("{content}", content) if part else "" for part in form[::2]]
        pieces[-1] += turn[0]
        for marker, text in zip(form[1::2], turn[1:], strict=True):
            pieces += [marker, text]
    return Chat(pieces)


def _read_message(message: Any, template: Template, name: str, where: str) -> tuple[str, str]:
    """Return the role, as the template writes it, and the content of a message. Raises DataError."""
    keys = list(message) if isinstance(message, Mapping) else []
    if not {"role", "content"} <= set(keys):
        seen = ", ".join(map(repr, keys)) or type(message).__name__
        raise DataError(f"{where} has {seen}, but 'role' and 'content' are needed. Rename its fields.")
    if other := [key for key in _OTHER_FORMS if message.get(key)]:
        raise DataError(f"{where} has {other[0]!r}, which no template of posx writes. Leave such chats out.")
    role, content = message["role"], message["content"]
    if role not in template.roles:
        raise DataError(
            f"{where} has the role {role!r}, which data.template={name} lacks. {nearest(str(role), template.roles)}"
            f"Its roles are: {', '.join(template.roles)}."
        )
    if not isinstance(content, str):
        raise DataError(f"{where} has a content that is {type(content).__name__} instead of text. Write it as text.")
    try:
        utf8(content)
    except DataError as error:
        raise DataError(f"{where}: {error}") from None
    content = content.replace("\r\n", "\n").replace("\r", "\n")
    return template.roles[role], content.strip() if template.strips else content
