"""Fine-tune a model with Attention Residuals, merge what was learned, and see what its depth attention does."""

from pathlib import Path
from typing import Annotated, Literal

import torch
import typer
from transformers import HfArgumentParser, TrainingArguments

from common.errors import command_line, reading

from .adapter import merge_adapter
from .diagnose import diagnose_model
from .finetune import Recipe, finetune_model
from .loading import TrainingError


Trust = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run the code of a tokenizer that lies beside the checkpoint.")
]

app = command_line(__doc__)


class Options(HfArgumentParser):
    """TrainingArguments as options; what is wrong with them is raised, where argparse prints them all and exits."""

    def error(self, message: str):
        raise TrainingError(f"{message}.")


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    epilog="Example: python -m training finetune --model ported --data notes.txt --output tuned --max_steps 200 "
    "--per_device_train_batch_size 4 --learning_rate 2e-4 --logging_steps 10",
)
def finetune(
    context: typer.Context,
    model: Annotated[str, typer.Option(help="A local folder or hub id of a model with Attention Residuals.")],
    data: Annotated[
        list[Path], typer.Option(help="Text, or .jsonl with 'text' or 'messages'; several times for more.")
    ],
    output: Annotated[Path, typer.Option(help="Where adapter/, result.json and checkpoints are written.")],
    lora: Annotated[
        Literal["all-linear", "attention", "experts", "none"], typer.Option(help="What LoRA adapts.")
    ] = "all-linear",
    rank: Annotated[int, typer.Option(help="LoRA's rank.")] = 16,
    alpha: Annotated[int, typer.Option(help="LoRA's alpha.")] = 32,
    dora: Annotated[bool, typer.Option("--dora", help="Weight-decomposed LoRA.")] = False,
    rslora: Annotated[bool, typer.Option("--rslora", help="Scale by alpha / √rank.")] = False,
    depth: Annotated[
        bool | None,
        typer.Option("--depth/--no-depth", help="Train the depth parameters, in full. Default: if there are any."),
    ] = None,
    depth_lr: Annotated[float, typer.Option(help="Their learning rate.")] = 1e-4,
    length: Annotated[int, typer.Option(help="Tokens of a row.")] = 512,
    packed: Annotated[
        bool, typer.Option("--packed/--no-packed", help="Several texts a row, which do not see each other.")
    ] = True,
    held_out: Annotated[float, typer.Option(help="The share of tokens, the last ones, that measure the loss.")] = 0.05,
    control: Annotated[bool, typer.Option("--control", help="Load with standard residuals, for comparison.")] = False,
    quantise: Annotated[
        Literal["4bit", "8bit"] | None, typer.Option(help="Quantise frozen weights (bitsandbytes).")
    ] = None,
    trust_remote_code: Trust = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue from the last complete checkpoint in OUTPUT.")
    ] = False,
) -> None:
    """Fine-tune with PEFT: LoRA on chosen modules, the depth parameters in full beside it.

    Any further option is one of transformers' TrainingArguments: --max_steps, --learning_rate, --bf16 True,
    --activation_checkpointing True, --report_to tensorboard, --fsdp …
    """
    parser = Options(TrainingArguments, add_help=False)
    defaults = {
        "--report_to": "none",
        "--logging_nan_inf_filter": "False",  # or a loss that is not finite would not be seen
        "--remove_unused_columns": "False",
        "--dataloader_pin_memory": str(torch.accelerator.is_available()),
    }
    given = {argument.split("=")[0].replace("-", "_").replace("__", "--", 1) for argument in context.args}
    extra = [part for name, value in defaults.items() if name not in given for part in (name, value)]
    for name, ours in (("--output_dir", "--output"), ("--resume_from_checkpoint", "--resume")):
        if name in given:
            raise TrainingError(f"{name}: give {ours} in place of it.")
    with reading("the options"):  # whatever transformers finds wrong with them
        (arguments,) = parser.parse_args_into_dataclasses(["--output_dir", str(output), *extra, *context.args])
    recipe = Recipe(
        model,
        data,
        lora,
        rank,
        alpha,
        dora,
        rslora,
        depth,
        depth_lr,
        length,
        packed,
        held_out,
        control,
        quantise,
        trust_remote_code,
    )
    finetune_model(recipe, arguments, resume)


@app.command(epilog="Example: python -m training merge tuned/adapter merged")
def merge(
    adapter: Annotated[Path, typer.Argument(help="The adapter that finetune wrote.")],
    target: Annotated[Path, typer.Argument(help="The folder to write; it must not exist, or be empty.")],
) -> None:
    """Merge an adapter into its base: a checkpoint that loads without PEFT."""
    merge_adapter(adapter, target)
    print(f"{target}: merged")


@app.command(epilog="Example: python -m training diagnose merged --text notes.txt --output pictures --against ported")
def diagnose(
    path: Annotated[str, typer.Argument(help="A model with Attention Residuals.")],
    output: Annotated[Path, typer.Option(help="The folder for diagnosis.json and pictures.")],
    text: Annotated[Path | None, typer.Option(help="A UTF-8 text file, in place of the built-in sample.")] = None,
    adapter: Annotated[Path | None, typer.Option(help="An adapter to load on it.")] = None,
    against: Annotated[
        str | None, typer.Option(help="A second model. Default: the same with standard residuals.")
    ] = None,
    tokens: Annotated[int, typer.Option(help="How much of the text, at most.")] = 512,
    trust_remote_code: Trust = False,
) -> None:
    """The paper's figures for a checkpoint: depth weights, magnitudes and gradients by layer, reach, mixing matrix."""
    diagnose_model(path, output, text, adapter, against, tokens, trust_remote_code)


if __name__ == "__main__":
    app()
