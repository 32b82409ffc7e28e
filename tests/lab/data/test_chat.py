"""Chat messages by a named template: its markers are special tokens, all else is text."""

import json

import numpy as np
import pytest
import tokenizers as hf

from posx.errors import DataError
from posx.lab.config import DataConfig
from posx.lab.data import BpeTokenizer, load_tokenizer, prepare
from posx.lab.data.chat import TEMPLATES, Chat, render_chat
from posx.lab.data.encoded import encode_documents, text_bytes
from posx.parsing import typed_fields

TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": " Hi\r\nthere <|im_end|> "},
    {"role": "assistant", "content": "{role} é"},
]
MARKERS = [marker for template in TEMPLATES.values() for marker in template.markers]
#: As the models' authors publish them, without the token that begins a text.
PUBLISHED = {
    "chatml": "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + "
    "'<|im_end|>' + '\n'}}{% endfor %}",
    "llama3": "{% for message in messages %}{{'<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + "
    "message['content'] | trim + '<|eot_id|>'}}{% endfor %}",
    "gemma": "{% for message in messages %}{% if message['role'] == 'assistant' %}{% set role = 'model' %}{% else %}"
    "{% set role = message['role'] %}{% endif %}{{'<start_of_turn>' + role + '\n' + message['content'] | trim + "
    "'<end_of_turn>\n'}}{% endfor %}",
}


@pytest.fixture(scope="module")
def tokenizer_file(tmp_path_factory):
    """A byte-level BPE with the markers of all templates, as instruct models have it."""
    made = hf.Tokenizer(hf.models.BPE())
    made.pre_tokenizer = hf.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = hf.decoders.ByteLevel()
    trainer = hf.trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|endoftext|>", *MARKERS], show_progress=False,
        initial_alphabet=sorted(hf.pre_tokenizers.ByteLevel.alphabet()),
    )  # fmt: skip
    made.train_from_iterator(["user assistant system there brief"], trainer)
    path = tmp_path_factory.mktemp("chat") / "tokenizer.json"
    made.save(str(path))
    return path


def test_templates_are_the_words_of_the_setting():
    for name in ("", *TEMPLATES):
        assert not DataConfig(template=name).problems()
        assert typed_fields(DataConfig, {"template": name}, "data", "data.")
    assert "chatml, llama3, gemma" in DataConfig(template="alpaca").problems()[0].replace("'", "")


def test_the_text_of_a_chat():
    assert render_chat(TURNS, "chatml", "here") == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n Hi\nthere <|im_end|> <|im_end|>\n"
        "<|im_start|>assistant\n{role} é<|im_end|>\n"
    )
    assert render_chat(TURNS[1:], "llama3", "here") == (
        "<|start_header_id|>user<|end_header_id|>\n\nHi\nthere <|im_end|><|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n{role} é<|eot_id|>"
    )
    assert render_chat(TURNS[2:], "gemma", "here") == "<start_of_turn>model\n{role} é<end_of_turn>\n"


def test_markers_are_special_tokens_and_marker_text_is_text(tokenizer_file):
    tokenizer = load_tokenizer(tokenizer_file)
    start, end = (tokenizer.special[marker] for marker in ("<|im_start|>", "<|im_end|>"))
    (ids,) = encode_documents([render_chat(TURNS, "chatml", "here")], tokenizer)
    assert (ids == start).sum() == (ids == end).sum() == 3, "the user's own <|im_end|> is text"
    at = [*np.flatnonzero(ids == end)]
    assert tokenizer.decode(ids[at[0] + 1 : at[1]]) == "\nuser\n Hi\nthere <|im_end|> "


@pytest.mark.parametrize("name", ["special", "bytes"])
def test_bytes_of_a_chat_are_those_of_its_text(tokenizer_file, name):
    """So bits per byte compare tokenizers that have the markers with tokenizers that do not."""
    from posx.lab.data import ByteTokenizer

    tokenizer = ByteTokenizer() if name == "bytes" else load_tokenizer(tokenizer_file)
    chats = [render_chat(TURNS, "chatml", "here"), render_chat(TURNS[:1], "llama3", "here"), "plain <|im_end|>"]
    sizes = text_bytes(chats, tokenizer)
    assert sizes.sum() == sum(len(chat.encode()) for chat in chats)
    lengths = [len(ids) for ids in encode_documents(chats, tokenizer)]
    assert len(sizes) == sum(lengths) + 3 and not sizes[np.cumsum(np.add(lengths, 1)) - 1].any()


@pytest.mark.parametrize("flags", [{}, {"rstrip": True}, {"lstrip": True, "rstrip": True}])
@pytest.mark.parametrize("scheme", ["first", "always", "never"])
def test_text_after_a_marker_is_encoded_as_in_the_library(scheme, flags):
    """Sentencepiece's space is added at the start of the document alone, and markers may drop white space."""
    letters = sorted({*"".join(turn["content"] for turn in TURNS), *"system user assistant\n\u2581"})
    vocab = {token: n for n, token in enumerate(["?", *letters, *(f"\u2581{one}" for one in letters)])}
    made = hf.Tokenizer(hf.models.BPE(vocab, [("\u2581", one) for one in letters], unk_token="?"))
    made.pre_tokenizer = hf.pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    made.add_special_tokens([hf.AddedToken(marker, normalized=False, **flags) for marker in MARKERS])
    tokenizer = BpeTokenizer(made.to_str())
    for name, turns in (("chatml", TURNS[2:]), ("llama3", TURNS[:1] * 2), ("gemma", TURNS[2:] * 2)):
        chat = render_chat(turns, name, "here")
        (ids,) = encode_documents([chat], tokenizer)
        assert ids.tolist() == tokenizer.encode_whole(chat, False)
        assert text_bytes([chat], tokenizer).sum() == len(chat.encode())


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_a_column_of_messages_is_read(tmp_path, tokenizer_file, form):
    chats = [[*TURNS[:2], {"role": "assistant", "content": f"answer {n}"}] for n in range(40)]
    path = tmp_path / f"chats.{form}"
    if form == "parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.table({"messages": chats}), path)
    else:
        path.write_text("\n".join(json.dumps({"messages": chat}) for chat in [[], *chats, []]))
    settings = {"source": str(path), "cache_dir": str(tmp_path / "cache"), "tokenizer": str(tokenizer_file)}
    found = prepare(DataConfig(**settings, text_column="messages", template="chatml"))
    assert found.train.num_documents + found.validation.num_documents == 40
    special = found.tokenizer.special
    assert (found.validation.tokens == special["<|im_start|>"]).sum() == 3 * found.validation.num_documents
    assert found.validation.token_bytes.sum() == found.validation.num_bytes
    for column, message in (("messages", "data.template=chatml .one of chatml, llama3, gemma"), ("text", "'messages'")):
        with pytest.raises(DataError, match=message):
            prepare(DataConfig(**settings, text_column=column))


def one(**fields):
    return [{"role": "user", "content": "x"} | fields]


BAD = {
    "an unknown role": (one(role="human"), "message 0 has the role 'human', which data.template=gemma lacks"),
    "a lacking role": (TURNS, "the role 'system', which data.template=gemma lacks.*Its roles are: user, assistant"),
    "a role that is no text": (one(role=None), "the role None"),
    "parts": (one(content=[{"type": "text", "text": "x"}]), "a content that is list instead of text"),
    "nothing": (one(content=None), "a content that is NoneType instead of text"),
    "a call": (one(tool_calls=[{"name": "f"}]), "has 'tool_calls', which no template of posx writes"),
    "other names": ([{"from": "human", "value": "x"}], "has 'from', 'value', but 'role' and 'content' are needed"),
    "texts": (["x"], "has str, but 'role' and 'content' are needed"),
    "half a character": (one(content="\ud800"), r"message 0: the text has the lone surrogate U\+D800"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_messages_of_another_form_are_refused(case):
    messages, message = BAD[case]
    with pytest.raises(DataError, match=message):
        render_chat(messages, "gemma", "'a.jsonl' line 1")


def test_parts_are_joined_where_a_tokenizer_lacks_markers():
    chat = Chat(["a", "<x>", "b", "<y>", ""])
    assert chat == "a<x>b<y>" and chat.parts({}) == ["a<x>b<y>"]
    assert chat.parts({"<x>": 7}) == ["a", 7, "b<y>"] and chat.parts({"<x>": 7, "<y>": 8}) == ["a", 7, "b", 8]


@pytest.mark.peers
@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_are_those_of_transformers(tokenizer_file, name):
    from transformers import PreTrainedTokenizerFast

    turns = [turn | {"content": turn["content"].replace("\r\n", "\n").replace("<|im_end|>", "")} for turn in TURNS]
    turns = turns[1:] if name == "gemma" else turns
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(tokenizer_file))
    wanted = theirs.apply_chat_template(turns, chat_template=PUBLISHED[name], tokenize=True, return_dict=False)
    (ids,) = encode_documents([render_chat(turns, name, "here")], load_tokenizer(tokenizer_file))
    assert ids.tolist() == wanted
