"""Training data: plain text, JSONL with `text`, chat JSONL with `messages`. All is read before a model is loaded.

Nothing in a row is passed over: a field is learned from, handed to the chat template, or refused by line and name.

A *document* is a text or a conversation as token ids, with labels; -100 marks tokens that are not learned. Documents
become *rows*, one sequence of a batch each: a piece of one document, or packed, several that do not see each other.
"""

import json
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import torch
from tqdm import tqdm

from common.errors import UserError, describe
from common.text import read_text


IGNORED = -100
BATCH = 1000  # texts that are tokenised at once
EMPTY = (None, "", [], {})  # a field of a message that says nothing
LABELS = ("role", "content", "name", "tool_call_id")  # of a message; a template may leave names and ids out


class DataError(UserError):
    """Data that cannot be trained on; the message names the file, the line, what was found and what was expected."""


@dataclass
class Document:
    ids: list[int]
    labels: list[int]

    def cut(self, length: int) -> Iterator["Document"]:
        """Cut into pieces of at most `length` tokens; the first of each, predicted from nothing, is not learned."""
        for start in range(0, len(self.ids), length):
            ids, labels = self.ids[start : start + length], self.labels[start : start + length]
            if any(label != IGNORED for label in labels[1:]):
                yield Document(ids, [IGNORED, *labels[1:]])


@dataclass
class Conversation:
    """A conversation as its template writes it, and the spans of characters that are learned."""

    text: str
    learned: list[tuple[int, int]]


def read_documents(paths: Iterable[Path], tokenizer, vocab_size: int | None = None) -> list[Document]:
    """Read and tokenise files, by their ending: `.jsonl` holds one object per line, anything else is one text.

    Raises:
        UserError: a file cannot be read, is empty, has a malformed line, or one with tokens from `vocab_size` on.
    """
    # Every row is checked before the first is tokenised
    examples: list[tuple[str, str | Conversation]] = []
    for path in paths:
        content, where = read_text(path)
        if path.suffix.lower() == ".jsonl":
            lines = content.split("\n")
            examples += [(where, _example(row, where, tokenizer)) for where, row in json_lines(path, lines)]
        else:
            examples.append((where, content))
    # Tokenised in batches, which fast tokenizers do in parallel
    documents: list[Document] = []
    with tqdm(total=len(examples), desc="tokenising", unit="text", disable=len(examples) <= BATCH) as bar:
        for start in range(0, len(examples), BATCH):
            batch = examples[start : start + BATCH]
            # Each run of examples of one kind
            for kind, group in groupby((example for _, example in batch), key=type):
                if kind is str:
                    documents += tokenise_texts(list(group), tokenizer)
                else:
                    documents += _conversations(list(group), tokenizer)
            bar.update(len(batch))
    # A token without an embedding would fail in the middle of training
    for (where, _), document in zip(examples, documents, strict=True):
        if vocab_size is not None and (largest := max(document.ids, default=0)) >= vocab_size:
            raise DataError(
                f"{where}: the tokenizer gives the token {largest} ({tokenizer.convert_ids_to_tokens(largest)!r}), but "
                f"the model has embeddings for {vocab_size} (vocab_size)."
            )
    return documents


def json_lines(path: Path, lines: Iterable[str]) -> Iterator[tuple[str, dict]]:
    """Parse the lines of a file, one object each; yields where each stands, and the object.

    Raises:
        DataError: a line is no JSON, or no object.
    """
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            row = json.loads(line, object_pairs_hook=_unique)
            json.dumps(row, ensure_ascii=False).encode()  # half a surrogate pair is no character
        except json.JSONDecodeError as error:
            raise _no_json(where, line, f"{error.msg}, column {error.colno}") from error
        except (ValueError, RecursionError) as error:
            raise _no_json(where, line, describe(error)) from error
        if not isinstance(row, dict):
            raise DataError(f"{where}: expected an object with 'text' or 'messages', found {line[:60]!r}.")
        yield where, row


def _no_json(where: str, line: str, reason: str) -> DataError:
    return DataError(f"{where}: no JSON ({reason}): {line[:60]!r}.")


def _unique(pairs: list[tuple[str, object]]) -> dict:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        twice = next(key for i, (key, _) in enumerate(pairs) if key in dict(pairs[:i]))
        raise ValueError(f"{twice!r} is named twice")
    return fields


def _example(row: dict, where: str, tokenizer) -> str | Conversation:
    row = {field: value for field, value in row.items() if value is not None}
    known = ("messages", "tools") if "messages" in row else ("text",)
    if unknown := [field for field in row if field not in known]:
        expected = "'messages' and 'tools'" if "messages" in row else "'text', or 'messages' and 'tools'"
        raise DataError(f"{where}: the field {unknown[0]!r} is unknown; expected {expected}, and no others.")
    if "messages" in row:
        return _conversation(row["messages"], row.get("tools"), where, tokenizer)
    return text_of(row, where, "a text in 'text', or 'messages'")


def text_of(row: dict, where: str, expected: str = "a text in 'text'") -> str:
    """Return the text of a row.

    Raises:
        DataError: there is none.
    """
    text = row.get("text")
    if not isinstance(text, str) or not text.strip():
        raise DataError(f"{where}: expected {expected}; found {text!r:.300}.")
    return text


def _message(message, place: str) -> tuple[dict, bool]:
    """Say what the template is given of a message, and whether it is learned."""
    fields = message if isinstance(message, dict) else {}
    given = {field: value for field, value in fields.items() if value not in EMPTY and field != "weight"}
    given["content"] = fields.get("content")
    is_assistant = given.get("role") == "assistant"
    if given["content"] is None and is_assistant and "tool_calls" in given:
        given["content"] = ""  # or a template might write "None"
    if not all(isinstance(given.get(field), str) for field in ("role", "content")):
        raise DataError(f"{place} must have texts 'role' and 'content', found {message!r:.300}.")
    weight = fields.get("weight")
    if weight is not None and (not is_assistant or isinstance(weight, bool) or weight not in (0, 1)):
        raise DataError(f"{place}: 'weight' is {weight!r:.60}; expected 0 or 1, of an assistant's message.")
    return given, is_assistant and weight != 0


def _conversation(messages, tools, where: str, tokenizer) -> Conversation:
    """Write a conversation by the chat template; only what the assistant says is learned, its end token included."""
    given, learned = _check_conversation(messages, tools, where)
    if not tokenizer.chat_template:
        raise DataError(f"{where}: the tokenizer has no chat template, which 'messages' need.")

    def render(messages, tools=tools, **kwargs) -> str:
        return tokenizer.apply_chat_template(list(messages), tools=tools or None, tokenize=False, **kwargs)

    # The whole, and of each turn that is learned what is written before it and with it
    try:
        whole = render(given)
        turns = [index for index, is_learned in enumerate(learned) if is_learned]
        before = [render(given[:index], add_generation_prompt=True) for index in turns]
        after = [render(given[: index + 1]) for index in turns]
    except Exception as error:  # whatever a template raises: Jinja errors, or its own raise_exception
        raise DataError(f"{where}: the chat template refuses these messages: {describe(error)}.") from error
    # The difference is what the assistant says, if the rest of the conversation changes neither
    for index, start, end in zip(turns, before, after):
        if not (whole.startswith(end) and end.startswith(start)):
            raise DataError(
                f"{where}: the chat template writes message {index} or what comes before it differently when others "
                "follow, so what the assistant says cannot be told apart. Give each turn as a conversation of its own, "
                "or its 'weight' as 0."
            )
    # A part is passed over if the whole is the same without it
    for what, *without in _parts(given, tools):
        try:
            is_written = render(*without) != whole
        except Exception:  # so the template asks for it
            continue
        if not is_written:
            raise DataError(f"{where}: the chat template writes nothing of {what}.")
    return Conversation(whole, [(len(start), len(end)) for start, end in zip(before, after)])


def _check_conversation(messages, tools, where: str) -> tuple[tuple[dict, ...], tuple[bool, ...]]:
    """Refuse what is no conversation; returns what the template is given of each message, and whether it is learned."""
    if not isinstance(messages, list) or not messages:
        raise DataError(f"{where}: 'messages' must be a list of messages, found {messages!r:.300}.")
    if not isinstance(tools, list | None):
        raise DataError(f"{where}: 'tools' must be a list of tools, found {tools!r:.300}.")
    given, learned = zip(*(_message(message, f"{where}: message {i}") for i, message in enumerate(messages)))
    if not any(learned):
        raise DataError(f"{where}: no message of the role 'assistant' (and 'weight' 1), so there is nothing to learn.")
    if given[0]["role"] == "assistant":
        raise DataError(f"{where}: message 0 is the assistant's; a conversation starts with the system or the user.")
    return given, learned


def _parts(messages: tuple[dict, ...], tools: list | None) -> Iterator[tuple]:
    """Name what a template might pass over, with the messages and tools that there are without it."""
    if tools:
        yield "'tools'", messages, None
    for field in dict.fromkeys(field for message in messages for field in message if field not in LABELS):
        yield (
            f"the messages' field {field!r}",
            [{name: value for name, value in message.items() if name != field} for message in messages],
            tools,
        )
    for role in dict.fromkeys(message["role"] for message in messages if message["role"] not in ("user", "assistant")):
        yield f"the role {role!r}", [message for message in messages if message["role"] != role], tools


def tokenise_texts(texts: list[str], tokenizer) -> list[Document]:
    """Tokenise texts, each ended by the tokenizer's end token, if it has one."""
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    encoded = tokenizer(texts, add_special_tokens=True, verbose=False)["input_ids"]
    ended = [ids if ids[-1:] == end else [*ids, *end] for ids in encoded]
    return [Document(ids, list(ids)) for ids in ended]


def _conversations(conversations: list[Conversation], tokenizer) -> list[Document]:
    if not tokenizer.is_fast:
        return [_in_pieces(conversation, tokenizer) for conversation in conversations]
    texts = [conversation.text for conversation in conversations]
    encoded = tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    documents = []
    for conversation, ids, offsets in zip(conversations, encoded["input_ids"], encoded["offset_mapping"], strict=True):
        labels = [
            token if any(start <= begin < end <= stop for start, stop in conversation.learned) else IGNORED
            for token, (begin, end) in zip(ids, offsets, strict=True)
        ]
        documents.append(Document(ids, labels))
    return documents


def _in_pieces(conversation: Conversation, tokenizer) -> Document:
    """Tokenise each turn apart, as when it is generated, for a tokenizer that does not say where its tokens lie."""
    document, done = Document([], []), 0
    for start, stop in [*conversation.learned, (len(conversation.text), len(conversation.text))]:
        for piece, learned in ((conversation.text[done:start], False), (conversation.text[start:stop], True)):
            ids = tokenizer(piece, add_special_tokens=False, verbose=False)["input_ids"] if piece else []
            document.ids += ids
            document.labels += ids if learned else [IGNORED] * len(ids)
        done = stop
    return document


def read_rows(
    paths: Sequence[Path], tokenizer, vocab_size: int, *, length: int, packed: bool, held_out: float
) -> tuple[list[dict[str, list[int]]], list[dict[str, list[int]]]]:
    """Read files into rows to train on, and rows that are held out.

    Raises:
        UserError: as `read_documents`, or there is nothing to train on or nothing held out.
    """
    documents = read_documents(paths, tokenizer, vocab_size)
    rows, held_out_rows = (make_rows(part, length, packed) for part in hold_out(documents, held_out))
    if not rows or not held_out_rows:
        raise DataError(
            f"{', '.join(map(str, paths))}: {len(rows)} rows to train on and {len(held_out_rows)} held out; expected "
            "some of both. Give more data or another --held-out."
        )
    return rows, held_out_rows


def hold_out(documents: list[Document], share: float) -> tuple[list[Document], list[Document]]:
    """Split off the last `share` of all tokens, cutting a document where the split falls within it."""
    total = sum(len(document.ids) for document in documents)
    left, training, held_out = round(total * (1 - share)), [], []
    for document in documents:
        if left >= len(document.ids):
            training.append(document)
        elif left <= 0:
            held_out.append(document)
        else:
            training.append(Document(document.ids[:left], document.labels[:left]))
            held_out.append(Document(document.ids[left:], document.labels[left:]))
        left -= len(document.ids)
    return training, held_out


def make_rows(documents: Iterable[Document], length: int, packed: bool) -> list[dict[str, list[int]]]:
    """Make rows of at most `length` tokens.

    Packed, a row holds whole pieces of documents one after another: each piece goes where the least room is left for
    it. `position_ids` start again at each: from that, and from there being no `attention_mask`, transformers' masks
    know that they must not see each other.
    """
    pieces = [piece for document in documents for piece in document.cut(length)]
    if not packed:
        return [{"input_ids": piece.ids, "labels": piece.labels} for piece in pieces]
    # Best fit, with the rows found by the room that they have left
    rows: list[list[Document]] = []
    rooms: list[int] = []  # how much room is left in some row, each once, in order
    rows_with: defaultdict[int, list[list[Document]]] = defaultdict(list)
    for piece in pieces:
        # Take the row with the least room that is enough, or a new one
        place = bisect_left(rooms, len(piece.ids))
        if place == len(rooms):
            row, room = [], length
            rows.append(row)
        else:
            room = rooms[place]
            row = rows_with[room].pop()
            if not rows_with[room]:
                del rooms[place]
        # Put it back under the room that it has left now
        row.append(piece)
        if room := room - len(piece.ids):
            if not rows_with[room]:
                insort(rooms, room)
            rows_with[room].append(row)
    return [
        {
            "input_ids": [token for piece in row for token in piece.ids],
            "labels": [label for piece in row for label in piece.labels],
            "position_ids": [position for piece in row for position in range(len(piece.ids))],
        }
        for row in rows
    ]


@dataclass
class Collator:
    """Makes a batch of rows, padded on one side to the longest of them.

    Padding of packed rows is one more sequence, which is not learned; otherwise an attention mask leaves it out.
    """

    pad_token_id: int
    side: str = "right"

    def __call__(self, rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
        longest = max(len(row["input_ids"]) for row in rows)
        packed = "position_ids" in rows[0]
        fill = {"input_ids": self.pad_token_id, "labels": IGNORED}
        batch = {name: [self._pad(row[name], value, longest) for row in rows] for name, value in fill.items()}
        if packed:
            batch["position_ids"] = [
                self._join(row["position_ids"], list(range(longest - len(row["position_ids"])))) for row in rows
            ]
        else:
            batch["attention_mask"] = [self._pad([1] * len(row["input_ids"]), 0, longest) for row in rows]
            batch["position_ids"] = [self._pad(list(range(len(row["input_ids"]))), 0, longest) for row in rows]
        return {name: torch.tensor(values) for name, values in batch.items()}

    def _pad(self, values: list[int], fill: int, longest: int) -> list[int]:
        return self._join(values, [fill] * (longest - len(values)))

    def _join(self, values: list[int], padding: list[int]) -> list[int]:
        return values + padding if self.side == "right" else padding + values
