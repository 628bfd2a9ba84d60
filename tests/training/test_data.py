"""Reading data: what is learned, what is held out, what is refused."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

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
        ("", r"data\.jsonl is empty; expected text"),
        ('{"text": "w1"}\n{"text": ', r"data.jsonl, line 2: no JSON \(Expecting value, column 10\)"),
        ('{"text": "w1"}\n\n[1]', r"line 3: expected an object with 'text' or 'messages', found '\[1\]'"),
        ('{"txt": "w1"}', r"line 1: expected a text in 'text'.*fields 'txt'"),
        ('{"text": 7}', r"line 1: expected a text in 'text'.*found 7"),
        ('{"text": "  "}', r"line 1: expected a text"),
        ('{"messages": []}', r"line 1: 'messages' must be a list of messages, found \[\]"),
        ('{"messages": [{"role": "user"}]}', r"line 1: message 0 must have texts 'role' and 'content'"),
        ('{"messages": [{"role": "user", "content": "w1"}]}', r"line 1: no message of the role 'assistant'"),
        ('{"messages": [{"role": "assistant", "content": "w1"}]}', r"line 1: message 0 is the assistant's"),
    ],
)
def test_malformed_data_is_named(content, message, tokenizer, tmp_path):
    with pytest.raises(DataError, match=message):
        read_documents([write(tmp_path, content)], tokenizer)


def test_files_that_cannot_be_read_are_named(tokenizer, tmp_path):
    with pytest.raises(DataError, match="missing\\.txt cannot be read"):
        read_documents([tmp_path / "missing.txt"], tokenizer)
    (tmp_path / "latin.txt").write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(DataError, match="latin\\.txt cannot be read as UTF-8"):
        read_documents([tmp_path / "latin.txt"], tokenizer)


def test_a_template_that_rewrites_earlier_turns_is_refused(tokenizer, tmp_path):
    tokenizer = type(tokenizer)(tokenizer_object=tokenizer._tokenizer, eos_token="</s>")
    tokenizer.chat_template = "{% for m in messages %}{{ loop.length }} {{ m['content'] }} {% endfor %}"
    turns = [{"role": role, "content": "w1"} for role in ("user", "assistant", "user", "assistant")]
    with pytest.raises(DataError, match="line 1: the chat template rewrites earlier turns"):
        read_documents([write(tmp_path, [{"messages": turns}])], tokenizer)
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
