"""Train two models of a million parameters, with and without Attention Residuals, on the source of Python's library.

`make pretrain-demo`, some five minutes on two cores. It ends with a picture of both losses and of the depth weights.
"""

import json
import sysconfig
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM

from common.errors import run_command
from common.files import whole_file
from training.corpus import Rows
from training.depth import mean_depth_weights
from training.options import Arguments
from training.pictures import draw_depth_weights, draw_losses
from training.pretrain import Pretraining, pretrain_model


HERE = Path(__file__).parent
FOLDER = HERE / "checkpoints/pretrain"
LOSSES, WEIGHTS = HERE / "pretrain-losses.png", HERE / "pretrain-depth.png"
STEPS, LENGTH = 400, 128


def write_texts(path: Path) -> None:
    """Write the modules of Python's standard library as JSONL; its tests are left out."""
    library = Path(sysconfig.get_paths()["stdlib"])
    modules = [p for p in sorted(library.rglob("*.py")) if not {"test", "tests", "site-packages"} & set(p.parts)]
    with whole_file(path) as file, open(file, "w", encoding="utf-8") as lines:
        for module in tqdm(modules, desc="reading Python's library", unit="file"):
            text = module.read_text(encoding="utf-8", errors="ignore")
            if text.strip():
                lines.write(json.dumps({"text": text}) + "\n")


def train(mode: str, texts: Path) -> dict:
    """Train one of the two, going on where a run was stopped; returns its result."""
    output = FOLDER / mode
    if (output / "model").exists():
        return json.loads((output / "result.json").read_text())
    recipe = Pretraining(
        config=str(HERE / "tiny"),
        data=[str(texts)],
        tokenizer="train",
        mode=mode,
        length=LENGTH,
        shards=FOLDER / "shards",
    )
    arguments = Arguments(
        output_dir=str(output),
        resume_from_checkpoint=True,
        max_steps=STEPS,
        per_device_train_batch_size=16,
        learning_rate=3e-3,
        lr_scheduler_type="warmup_stable_decay",
        lr_scheduler_kwargs={"num_decay_steps": STEPS // 5},
        warmup_steps=STEPS // 20,
        weight_decay=0.1,
        adam_beta2=0.95,
        logging_steps=10,
        save_steps=100,
        save_total_limit=1,
        report_to="none",
        use_cpu=True,
    )
    return pretrain_model(recipe, arguments)


def draw(results: dict[str, dict]) -> None:
    """Draw the losses of both, and what the one with depth attention reads of the first held-out row."""
    curves = {
        mode: [(entry["step"], entry["loss"]) for entry in result["log"] if "loss" in entry]
        for mode, result in results.items()
    }
    draw_losses(curves, LOSSES, "loss on Python's library, two models of a million parameters")
    model = AutoModelForCausalLM.from_pretrained(FOLDER / "block/model")
    held_out = Rows(sorted(FOLDER.glob("shards/[0-9]*/held_out.npy")), LENGTH)
    row = torch.from_numpy(held_out[0]["input_ids"])[None]
    weights = [weights_N.tolist() for weights_N in mean_depth_weights(model, row)]
    draw_depth_weights(weights, WEIGHTS, f"depth weights after {STEPS} steps")


def main() -> None:
    """Train two models of a million parameters on Python's library, with and without depth attention (five minutes)."""
    texts = FOLDER / "python.jsonl"
    if not texts.exists():
        write_texts(texts)
    results = {mode: train(mode, texts) for mode in ("none", "block")}
    draw(results)
    for mode, result in results.items():
        print(f"{mode:5}: held-out loss {result['held_out_loss']['after']:.4f}, {result['parameters']:,} parameters")
    print(f"pictures: {LOSSES.relative_to(Path.cwd())}, {WEIGHTS.relative_to(Path.cwd())}")


if __name__ == "__main__":
    run_command(main, "python -m demo.pretrain")
