"""Put foreign text (names of folders and files, what cards and results say) into Markdown or Python as text."""

import re
from collections.abc import Iterable, Sequence

from common.errors import one_line


def plain(text: object) -> str:
    """Return a text that Markdown and HTML show as it is, within a line or a table's cell."""
    return re.sub(r"[\\`*\[\]<>|~&#$:@]|(?<![^\W_])_|_(?![^\W_])|(?<=www)\.", r"\\\g<0>", one_line(str(text)))


def code(text: str) -> str:
    """Return a text as a code span, within a line; in a table its pipes would end the cell, so `plain` is for those."""
    words = one_line(text)
    fence = "`" * (1 + max(map(len, re.findall("`+", words)), default=0))
    space = " " if "`" in words else ""
    return f"{fence}{space}{words}{space}{fence}"


def table(header: Sequence[str], rows: Iterable[Sequence[str]], rules: Sequence[str] | None = None) -> str:
    """Return a table, whose cells are Markdown.

    Args:
        header: the columns' titles.
        rows: the cells, row by row.
        rules: what stands beneath each title, as `---:` for a column of numbers. Default: `---`.
    """
    lines = [f"| {' | '.join(cells)} |" for cells in (header, *rows)]
    lines.insert(1, f"|{'|'.join(rules or ['---'] * len(header))}|")
    return "\n".join(lines)


def link(hub_id: str) -> str:
    """Return a link to a model on the hub."""
    return f"[{plain(hub_id)}](https://huggingface.co/{hub_id})"


def python_string(text: str) -> str:
    """Return a Python literal of one line, in double quotes where it can be."""
    literal = repr(text)
    return literal if '"' in text else f'"{literal[1:-1]}"'
