"""The examples in docstrings run, one after the other."""

import inspect
import re
import textwrap

from tests.conftest import ROOT
from tests.families import BY_NAME
from training.ablate import ablate_sources
from training.adapter import merge_adapter
from training.diagnose import diagnose_model
from training.distil import distil_model
from training.finetune import finetune_model
from training.pretrain import pretrain_model

from .conftest import words


def test_examples_run_one_after_the_other(save_model, tokenizer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_model(max_position_embeddings=512).rename("ported")
    tokenizer.save_pretrained("base")
    BY_NAME["Llama"].base_causal_lm(max_position_embeddings=512).save_pretrained("base")
    (tmp_path / "LICENSE").write_text(words(3000))
    (tmp_path / "README.md").write_text(words(3000, 1))
    (tmp_path / "demo").symlink_to(ROOT / "demo")
    for function in (finetune_model, merge_adapter, distil_model, diagnose_model, ablate_sources, pretrain_model):
        (code,) = re.findall(r"```python\n(.*?)```", inspect.getdoc(function), re.DOTALL)
        exec(compile(textwrap.dedent(code), function.__name__, "exec"), {})
    assert {"tuned", "merged", "plain", "pictures", "trained"} <= {path.name for path in tmp_path.iterdir()}
