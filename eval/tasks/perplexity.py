"""Provide text for perplexity without a download: the language reference that comes with Python (`help("topics")`)."""

from pydoc_data.topics import topics

import datasets


CHARACTERS = 2_000


def python_reference(**_) -> datasets.DatasetDict:
    """Make one row per topic, in alphabetical order: `name`, `text` (its first 2,000 characters)."""
    rows = [{"name": name, "text": text.strip()[:CHARACTERS]} for name, text in sorted(topics.items())]
    return datasets.DatasetDict(test=datasets.Dataset.from_list(rows))
