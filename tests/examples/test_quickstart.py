"""The notebook runs from its first cell to its last, and shows what it says."""

import nbformat
import pytest
from nbclient import NotebookClient

from tests.conftest import ROOT


@pytest.mark.slow
@pytest.mark.xdist_group("smollm2")
def test_the_notebook():
    notebook = nbformat.read(ROOT / "examples" / "quickstart.ipynb", as_version=4)
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": ROOT / "examples"}}).execute()
    said = [
        "".join(output.get("text", "") for output in cell.outputs if output.get("name") == "stdout")
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]
    answers = next(text for text in said if "relative logit error" in text).splitlines()
    assert answers[0] == answers[1]
    assert float(answers[2].split()[-1]) <= 3e-6
    losses = [float(line.split()[-1]) for text in said if text.startswith("step 0") for line in text.splitlines()]
    assert losses[-1] < losses[0]
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 2
