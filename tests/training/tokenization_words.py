"""A tokenizer that is code beside its checkpoint and does not say where its tokens lie, as Kimi's."""

import json
import re
from pathlib import Path

from transformers import PythonBackend


class WordsTokenizer(PythonBackend):
    vocab_files_names = {"vocab_file": "words.json"}  # noqa: RUF012 (as transformers has it)

    def __init__(self, vocab_file, **kwargs):
        self.words = json.loads(Path(vocab_file).read_text())
        super().__init__(special_tokens_pattern="none", **kwargs)

    @property
    def vocab_size(self):
        return len(self.words)

    def get_vocab(self):
        return dict(self.words)

    def _tokenize(self, text, **kwargs):
        return re.findall(r"<[^>]*>|\w+", text)

    def _convert_token_to_id(self, token):
        return self.words.get(token, self.words["<unk>"])

    def _convert_id_to_token(self, index):
        return next(token for token, value in self.words.items() if value == index)

    def save_vocabulary(self, save_directory, filename_prefix=None):
        path = Path(save_directory) / "words.json"
        path.write_text(json.dumps(self.words))
        return (str(path),)
