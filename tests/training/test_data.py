"""Reading data: what is learned, what is held out, what is refused."""

import json
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import UserError
from tests.families import BY_NAME, FAMILIES
from tests.training.tokenization_words import WordsTokenizer
from training.data import IGNORED, Collator, DataError, Document, hold_out, make_rows, read_documents


def write(tmp_path, content, name="data.jsonl"):
    path = tmp_path / name
    path.write_text(content if isinstance(content, str) else "\n".join(map(json.dumps, content)))
    return path


def test_a_text_is_learned_whole_and_ended(tokenizer, tmp_path):
    (document,) = read_documents([write(tmp_path, "w0 w1 w2", "a.txt")], tokenizer)
    assert document.ids == document.labels == [6, 7, 8, tokenizer.eos_token_id]


def test_of_a_conversation_only_the_assistant_is_learned(tokenizer, tmp_path):
    turns = [
        {"role": "user", "content": "w0 w1"},
        {"role": "assistant", "content": "w2 w3"},
        {"role": "user", "content": "w4"},
        {"role": "assistant", "content": "w5"},
    ]
    (document,) = read_documents([write(tmp_path, [{"messages": turns}])], tokenizer)
    found = tokenizer.convert_ids_to_tokens(document.ids)
    assert found == ["<user>", "w0", "w1", "</s>", "<assistant>", "w2", "w3", "</s>"] + [
        *("<user>", "w4", "</s>", "<assistant>", "w5", "</s>")
    ]
    learned = [word for word, label in zip(found, document.labels, strict=True) if label != IGNORED]
    assert learned == ["w2", "w3", "</s>", "w5", "</s>"]


@pytest.mark.parametrize("last", ["assistant", "user"])
def test_a_tokenizer_in_python_learns_the_same(last, tokenizer, tmp_path):
    turns = [("system", "w9"), ("user", "w0 w1"), ("assistant", "w2 w3"), ("user", "w4"), ("assistant", "w5")]
    turns = [{"role": role, "content": content} for role, content in turns[: 5 if last == "assistant" else 4]]
    path = write(tmp_path, [{"messages": turns}, {"text": "w7 w8"}, {"messages": turns[:3]}])
    vocabulary = write(tmp_path, json.dumps(tokenizer.get_vocab()), "words.json")
    slow = WordsTokenizer(vocabulary, eos_token="</s>", chat_template=tokenizer.chat_template)
    assert not slow.is_fast
    assert read_documents([path], slow) == read_documents([path], tokenizer)


def test_long_files_are_read_in_order(tokenizer, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("training.data.BATCH", 3)
    turns = [{"role": "user", "content": "w0"}, {"role": "assistant", "content": "w1"}]
    lines = [{"text": f"w{i}"} if i % 4 else {"messages": turns} for i in range(11)]
    found = read_documents([write(tmp_path, lines)], tokenizer)
    alone = [read_documents([write(tmp_path, [line])], tokenizer)[0] for line in lines]
    assert found == alone
    assert "tokenising: 100%" in capsys.readouterr().err


def test_files_may_mix_texts_and_conversations(tokenizer, tmp_path):
    turns = [{"role": "user", "content": "w1"}, {"role": "assistant", "content": "w2"}]
    lines = [{"text": "w1"}, {"messages": turns}]
    assert len(read_documents([write(tmp_path, lines), write(tmp_path, "w3", "b.txt")], tokenizer)) == 3


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", r"data\.jsonl is empty; expected some text"),
        ('{"text": "w1"}\n{"text": ', r"data.jsonl, line 2: no JSON \(Expecting value, column 10\)"),
        ('{"text": "w1"}\n\n[1]', r"line 3: expected an object with 'text' or 'messages', found '\[1\]'"),
        ('{"txt": "w1"}', r"line 1: the field 'txt' is unknown; expected 'text', or 'messages' and 'tools'"),
        ('{"text": 7}', r"line 1: expected a text in 'text'.*found 7"),
        ('{"text": "  "}', r"line 1: expected a text"),
        (r'{"text": "a \ud800 b"}', r"line 1: no JSON \(.*surrogates not allowed\)"),
        ('{"text": "w1", "text": "w2"}', r"line 1: no JSON \('text' is named twice\)"),
        ('{"text": ' + "[" * 100_000, r"line 1: no JSON \(it is nested too deeply\)"),
        ('{"text": ' + "1" * 5000 + "}", r"line 1: no JSON \(Exceeds the limit"),
        ('{"messages": []}', r"line 1: 'messages' must be a list of messages, found \[\]"),
        ('{"messages": [{"role": "user"}]}', r"line 1: message 0 must have texts 'role' and 'content'"),
        ('{"messages": [{"role": "user", "content": "w1"}]}', r"line 1: no message of the role 'assistant'"),
        ('{"messages": [{"role": "assistant", "content": "w1"}]}', r"line 1: message 0 is the assistant's"),
    ],
)
def test_malformed_data_is_named(content, message, tokenizer, tmp_path):
    with pytest.raises(UserError, match=message):
        read_documents([write(tmp_path, content)], tokenizer)


def test_files_that_cannot_be_read_are_named(tokenizer, tmp_path):
    (tmp_path / "latin.txt").write_bytes(b"\xff\xfe\xfa")
    os.mkfifo(tmp_path / "pipe.jsonl")
    for path, message in (
        (tmp_path / "missing.txt", "missing"),
        (tmp_path / "latin.txt", "cannot be read as UTF-8"),
        (tmp_path / "pipe.jsonl", "pipe"),
        (Path("/dev/zero"), "device"),
        (tmp_path, "folder"),
    ):
        with pytest.raises(UserError, match=f"{path}.*{message}"):
            read_documents([path], tokenizer)


def with_template(tokenizer, template):
    return type(tokenizer)(tokenizer_object=tokenizer._tokenizer, eos_token="</s>", chat_template=template)


def conversation(*messages, **fields):
    """A row, from words such as "user w0", or whole messages."""
    turns = [dict(zip(("role", "content"), one.split(" ", 1))) if isinstance(one, str) else one for one in messages]
    return {"messages": turns} | fields


def learned(rows, tokenizer, tmp_path):
    """The words that are learned of each row."""
    documents = read_documents([write(tmp_path, rows)], tokenizer)
    return [
        " ".join(tokenizer.convert_ids_to_tokens([label for label in document.labels if label != IGNORED]))
        for document in documents
    ]


POSITIONAL = {  # what a turn looks like depends on where it stands
    "a mark of the last turn": "{% for m in messages %}<{{ m.role }}> "
    "{% if m.role == 'assistant' and loop.last %}<think> {% endif %}{{ m.content }} </s> {% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}",
    "an end of the last turn": "{% for m in messages %}<{{ m.role }}> {{ m.content }} {% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% else %}</s> {% endif %}",
    "a count": "{% for m in messages %}{{ loop.length }} {{ m.content }} {% endfor %}",
}


@pytest.mark.parametrize("name", POSITIONAL)
def test_no_word_of_the_user_is_learned_where_a_template_goes_by_position(name, tokenizer, tmp_path):
    tokenizer = with_template(tokenizer, POSITIONAL[name])
    row = conversation("user w0 w1", "assistant w2", "user w3 w4", "assistant w5")
    with pytest.raises(DataError, match=r"line 1: the chat template writes message 1 .*'weight' as 0"):
        read_documents([write(tmp_path, [row])], tokenizer)
    row["messages"][1]["weight"] = 0
    if name != "a count":  # what it writes of the user is rewritten, too
        (words,) = learned([row], tokenizer, tmp_path)
        assert words.replace("<unk>", "").split()[0] == "w5"


def test_messages_of_weight_0_are_not_learned(tokenizer, tmp_path):
    row = conversation("user w0", "assistant w1", "user w2", "assistant w3")
    for weights, expected in (((0, 1), "w3 </s>"), ((1, 0), "w1 </s>"), ((None, 1.0), "w1 </s> w3 </s>")):
        row["messages"][1]["weight"], row["messages"][3]["weight"] = weights
        assert learned([row], tokenizer, tmp_path) == [expected]


WITH_TOOLS = (
    "{% if tools %}w9 {% for t in tools %}{{ t.function.name }} {% endfor %}{% endif %}"
    "{% for m in messages %}<{{ m.role }}> {% if m.tool_calls %}w8 {{ m.tool_calls[0].function.name }} "
    "{% else %}{{ m.content }} {% endif %}</s> {% endfor %}{% if add_generation_prompt %}<assistant> {% endif %}"
)
CALL = {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": {"name": "w7"}}]}
ANSWER = {"role": "tool", "content": "w3", "tool_call_id": "1", "name": "w7"}
TOOLS = [{"type": "function", "function": {"name": "w7"}}]


def test_tools_and_their_calls_reach_the_template(tokenizer, tmp_path):
    tokenizer = with_template(tokenizer, WITH_TOOLS)
    path = write(tmp_path, [conversation("user w0", CALL, ANSWER, "assistant w4", tools=TOOLS)])
    (document,) = read_documents([path], tokenizer)
    found = tokenizer.convert_ids_to_tokens(document.ids)
    assert found[:4] == ["w9", "w7", "<user>", "w0"]
    words = [word for word, label in zip(found, document.labels) if label != IGNORED]
    assert words == ["w8", "w7", "</s>", "w4", "</s>"]


OURS = "user w0", "assistant w1"
PASSED_OVER = {  # by the plain template of the fixture
    "tools": (conversation(*OURS, tools=TOOLS), "writes nothing of 'tools'"),
    "tool calls": (conversation("user w0", CALL), "writes nothing of the messages' field 'tool_calls'"),
    "a field that is false": (
        conversation("user w0", {"role": "assistant", "content": "w1", "train": False}),
        "writes nothing of the messages' field 'train'",
    ),
    "reasoning": (
        conversation("user w0", {"role": "assistant", "content": "w1", "reasoning_content": "w2"}),
        "writes nothing of the messages' field 'reasoning_content'",
    ),
    "a field of a row": (conversation(*OURS, split="test"), "the field 'split' is unknown; expected 'messages' and"),
    "text beside messages": (conversation(*OURS, text="w1"), "the field 'text' is unknown"),
    "tools beside text": ({"text": "w1", "tools": TOOLS}, "the field 'tools' is unknown"),
    "tools that are none": (conversation(*OURS, tools="w1"), "'tools' must be a list"),
    "half a weight": (
        conversation("user w0", {"role": "assistant", "content": "w1", "weight": 0.5}),
        "message 1: 'weight' is 0.5; expected 0 or 1",
    ),
    "a list as weight": (
        conversation("user w0", {"role": "assistant", "content": "w1", "weight": []}),
        r"message 1: 'weight' is \[\]",
    ),
    "the user's weight": (
        conversation({"role": "user", "content": "w0", "weight": 1}, "assistant w1"),
        "message 0: 'weight' is 1; expected 0 or 1, of an assistant's",
    ),
    "weights that leave nothing": (
        conversation("user w0", {"role": "assistant", "content": "w1", "weight": 0}),
        "so there is nothing to learn",
    ),
    "no content and no calls": (
        conversation("user w0", {"role": "assistant", "content": None}),
        "message 1 must have texts 'role' and 'content'",
    ),
    "an empty role": (conversation({"role": "", "content": "w0"}, "assistant w1"), "message 0 must have texts"),
}


@pytest.mark.parametrize("name", PASSED_OVER)
def test_nothing_in_a_row_is_passed_over(name, tokenizer, tmp_path):
    row, message = PASSED_OVER[name]
    with pytest.raises(DataError, match=f"line 2: .*{message}"):
        read_documents([write(tmp_path, [{"text": "w1"}, row])], tokenizer)


def test_a_role_that_the_template_leaves_out_is_refused(tokenizer, tmp_path):
    template = tokenizer.chat_template.replace("%}<{{", "if m.role != 'critic' %}<{{", 1)
    row = conversation("critic w9", "user w0", "assistant w1")
    with pytest.raises(DataError, match="line 1: the chat template writes nothing of the role 'critic'"):
        read_documents([write(tmp_path, [row])], with_template(tokenizer, template))


def test_what_says_nothing_may_stand_there(tokenizer, tmp_path):
    """As where rows come from a table, whose every row has every column."""
    empty = {"tool_calls": [], "name": None, "weight": None, "reasoning_content": ""}
    row = conversation("user w0", {"role": "assistant", "content": "w1"} | empty, text=None, tools=[])
    assert learned([row, {"text": "w2", "messages": None}], tokenizer, tmp_path)[0] == "w1 </s>"


@pytest.mark.parametrize("row", ['{"text": "w0 w95"}', '{"messages": [%s, %s]}'])
def test_tokens_that_the_model_has_no_embedding_for_are_refused(row, tokenizer, tmp_path):
    turns = [json.dumps({"role": role, "content": "w89"}) for role in ("user", "assistant")]
    path = write(tmp_path, '{"text": "w0"}\n' + (row % tuple(turns) if "%s" in row else row.replace("w95", "w89")))
    assert len(read_documents([path], tokenizer, 96)) == 2
    with pytest.raises(DataError, match=r"line 2: the tokenizer gives the token 95 \('w89'\), but .* for 95"):
        read_documents([path], tokenizer, 95)


def test_a_template_that_fails_is_named(tokenizer, tmp_path):
    tokenizer = with_template(tokenizer, "")
    turns = [{"role": role, "content": "w1"} for role in ("user", "assistant", "user", "assistant")]
    tokenizer.chat_template = "{{ raise_exception('no system role') }}"
    with pytest.raises(DataError, match="refuses these messages: no system role"):
        read_documents([write(tmp_path, [{"messages": turns}])], tokenizer)
    tokenizer.chat_template = None
    with pytest.raises(DataError, match="has no chat template"):
        read_documents([write(tmp_path, [{"messages": turns}])], tokenizer)


documents = st.lists(st.integers(1, 30), min_size=1, max_size=12).map(
    lambda sizes: [
        Document(list(range(100 * i, 100 * i + n)), list(range(100 * i, 100 * i + n))) for i, n in enumerate(sizes)
    ]
)


@given(documents, st.floats(0.01, 0.99))
@settings(max_examples=60)
def test_what_is_held_out_is_the_end_and_nothing_is_lost(documents, share):
    training, held_out = hold_out(documents, share)
    flat = [token for part in (training, held_out) for document in part for token in document.ids]
    assert flat == [token for document in documents for token in document.ids]
    assert abs(sum(len(document.ids) for document in held_out) - share * len(flat)) <= 0.5 + 1e-9


@given(documents, st.integers(2, 16), st.booleans())
@settings(max_examples=60)
def test_rows_learn_each_token_but_the_first_of_a_piece(documents, length, packed):
    rows = make_rows(documents, length, packed)
    expected = [token for d in documents for i, token in enumerate(d.ids) if i % length]
    learned = [label for row in rows for label in row["labels"] if label != IGNORED]
    assert sorted(learned) == sorted(expected)
    assert all(len(row["input_ids"]) == len(row["labels"]) <= length for row in rows)
    if packed:  # what half a row holds would have gone to another such row
        assert sum(2 * len(row["input_ids"]) <= length for row in rows) <= 1
    for row in rows:
        for position, token in zip(row.get("position_ids", []), row["input_ids"]):
            assert position == (token % 100) % length  # counted from the start of its piece


@pytest.mark.parametrize("family", [f for f in FAMILIES if f.name != "KimiLinear"], ids=lambda family: family.name)
def test_packed_rows_and_padding_on_either_side_give_the_same_loss(family, layout):
    """A packed text does not see its neighbours, nor padding: the sum of losses over the same tokens is the same."""
    generator = torch.Generator().manual_seed(0)
    texts = [torch.randint(3, 99, (n,), generator=generator).tolist() for n in (9, 14, 5, 20)]
    documents = [Document(ids, ids) for ids in texts]
    model = family.causal_lm(**layout)

    def loss(rows, **how):
        batch = Collator(pad_token_id=0, **how)(rows)
        with torch.no_grad():
            return model(**batch, num_items_in_batch=44, use_cache=False).loss.item()  # 48 tokens, 4 first ones

    alone = make_rows(documents, 24, packed=False)
    expected = sum(loss([row]) for row in alone)
    assert loss(alone) == pytest.approx(expected, rel=1e-5)
    assert loss(alone, side="left") == pytest.approx(expected, rel=1e-5)
    packed = make_rows(documents, 24, packed=True)
    assert len(packed) == 3
    assert loss(packed) == pytest.approx(expected, rel=1e-5)
    assert loss(packed, side="left") == pytest.approx(expected, rel=1e-5)


def test_padding_of_unpacked_rows_changes_no_loss_of_linear_attention():
    model = BY_NAME["KimiLinear"].causal_lm()
    texts = [list(range(3, 12)), list(range(20, 40))]
    rows = make_rows([Document(ids, ids) for ids in texts], 24, packed=False)

    def loss(rows, side="right"):
        with torch.no_grad():
            return model(**Collator(0, side)(rows), num_items_in_batch=27, use_cache=False).loss.item()

    expected = sum(loss([row]) for row in rows)
    assert loss(rows) == pytest.approx(expected, rel=1e-5)
    assert loss(rows, "left") == pytest.approx(expected, rel=1e-5)
