"""Training data: plain text, JSONL with `text`, chat JSONL with `messages`. All is read before a model is loaded.

A *document* is a text or a conversation as token ids, with labels; -100 marks tokens that are not learned. Documents
become *rows*, one sequence of a batch each: a piece of one document, or packed, several that do not see each other.
"""

import json
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import torch
from tqdm import tqdm

from common.errors import UserError


IGNORED = -100
BATCH = 1000  # texts that are tokenised at once


class DataError(UserError):
    """Data that cannot be trained on; the message names the file, the line, what was found and what was expected."""


@dataclass
class Document:
    ids: list[int]
    labels: list[int]

    def cut(self, length: int) -> Iterator["Document"]:
        """Pieces of at most `length` tokens. The first token of a piece is predicted from nothing, so not learned."""
        for start in range(0, len(self.ids), length):
            ids, labels = self.ids[start : start + length], self.labels[start : start + length]
            if any(label != IGNORED for label in labels[1:]):
                yield Document(ids, [IGNORED, *labels[1:]])


@dataclass
class Conversation:
    """A conversation as its template writes it, and the spans of characters that the assistant says."""

    text: str
    learned: list[tuple[int, int]]


def read_documents(paths: Iterable[Path], tokenizer) -> list[Document]:
    """Read and tokenise files, by their ending: `.jsonl` holds an object a line, anything else is one text.

    Raises:
        DataError: a file cannot be read, is empty, or has a malformed line.
    """
    examples: list[str | Conversation] = []
    for path in paths:
        try:
            content = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"{path} cannot be read as UTF-8 text: {error}.") from error
        if not content.strip():
            raise DataError(f"{path} is empty; expected text, or JSONL with 'text' or 'messages'.")
        if path.suffix == ".jsonl":
            examples += [_example(line, where, tokenizer) for where, line in _lines(path, content)]
        else:
            examples.append(content)
    documents = []
    with tqdm(total=len(examples), desc="tokenising", unit="text", disable=len(examples) <= BATCH) as bar:
        for start in range(0, len(examples), BATCH):
            batch = examples[start : start + BATCH]
            for kind, group in groupby(batch, key=type):
                documents += (_texts if kind is str else _conversations)(list(group), tokenizer)
            bar.update(len(batch))
    return documents


def _lines(path: Path, content: str) -> Iterator[tuple[str, dict]]:
    for number, line in enumerate(content.split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            found = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(f"{where}: no JSON ({error.msg}, column {error.colno}): {line[:60]!r}.") from error
        if not isinstance(found, dict):
            raise DataError(f"{where}: expected an object with 'text' or 'messages', found {line[:60]!r}.")
        yield where, found


def _example(line: dict, where: str, tokenizer) -> str | Conversation:
    if "messages" in line:
        return _conversation(line["messages"], where, tokenizer)
    text = line.get("text")
    if not isinstance(text, str) or not text.strip():
        fields = ", ".join(map(repr, line)) or "none"
        raise DataError(f"{where}: expected a text in 'text', or 'messages'; found {text!r}, fields {fields}.")
    return text


def _conversation(messages, where: str, tokenizer) -> Conversation:
    """A conversation through the chat template; only what the assistant says is learned, its end token included."""
    if not isinstance(messages, list) or not messages:
        raise DataError(f"{where}: 'messages' must be a list of messages, found {messages!r}.")
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
            raise DataError(f"{where}: message {index} must have texts 'role' and 'content', found {message!r}.")
    if not any(message["role"] == "assistant" for message in messages):
        raise DataError(f"{where}: no message of the role 'assistant', so there is nothing to learn.")
    if messages[0]["role"] == "assistant":
        raise DataError(f"{where}: message 0 is the assistant's; a conversation starts with the system or the user.")
    if not tokenizer.chat_template:
        raise DataError(f"{where}: the tokenizer has no chat template, which 'messages' need.")

    def render(count: int, **kwargs) -> str:
        return tokenizer.apply_chat_template(messages[:count], tokenize=False, **kwargs)

    try:
        whole = render(len(messages))
        turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        prefixes = [render(index, add_generation_prompt=True) for index in turns]
        spans = [(len(prefix), len(render(index + 1))) for prefix, index in zip(prefixes, turns)]
    except Exception as error:  # whatever a template raises: Jinja errors, or its own raise_exception
        raise DataError(f"{where}: the chat template refuses these messages: {error}.") from error
    if not all(whole.startswith(prefix) for prefix in prefixes):
        raise DataError(
            f"{where}: the chat template rewrites earlier turns when later ones follow, so the assistant's turns "
            "cannot be told apart. Give each turn as a conversation of its own."
        )
    return Conversation(whole, spans)


def _texts(texts: list[str], tokenizer) -> list[Document]:
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    encoded = tokenizer(texts, add_special_tokens=True, verbose=False)["input_ids"]
    found = [ids if ids[-1:] == end else [*ids, *end] for ids in encoded]
    return [Document(ids, list(ids)) for ids in found]


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
    """Each turn tokenised apart, as when it is generated, by a tokenizer that does not say where its tokens lie."""
    document, at = Document([], []), 0
    for start, stop in [*conversation.learned, (len(conversation.text), len(conversation.text))]:
        for piece, learned in ((conversation.text[at:start], False), (conversation.text[start:stop], True)):
            ids = tokenizer(piece, add_special_tokens=False, verbose=False)["input_ids"] if piece else []
            document.ids += ids
            document.labels += ids if learned else [IGNORED] * len(ids)
        at = stop
    return document


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
    """Rows of at most `length` tokens.

    Packed, a row holds whole pieces of documents one after another: each piece goes where the least room is left for
    it. `position_ids` start again at each: from that, and from there being no `attention_mask`, transformers' masks
    know that they must not see each other.
    """
    pieces = [piece for document in documents for piece in document.cut(length)]
    if not packed:
        return [{"input_ids": piece.ids, "labels": piece.labels} for piece in pieces]
    rows: list[list[Document]] = []
    rooms: list[int] = []  # how much room is left in some row, each once, in order
    rows_with: defaultdict[int, list[list[Document]]] = defaultdict(list)
    for piece in pieces:
        place = bisect_left(rooms, len(piece.ids))
        if place == len(rooms):
            row, room = [], length
            rows.append(row)
        else:
            room = rooms[place]
            row = rows_with[room].pop()
            if not rows_with[room]:
                del rooms[place]
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
    """Rows to a batch, padded on one side to the longest of them, or to `length`.

    Padding of packed rows is one more sequence that nobody learns; otherwise an attention mask tells it.
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
