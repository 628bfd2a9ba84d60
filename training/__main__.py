"""Train a model from random weights, fine-tune one, bring what it learned elsewhere, see what depth attention does."""

from argparse import SUPPRESS
from pathlib import Path
from typing import Annotated

import torch
import typer

from common.errors import command_line

from .adapter import merge_adapter
from .diagnose import diagnose_model
from .distil import Distillation, distil_model
from .finetune import Recipe, finetune_model
from .loading import make_config
from .options import Arguments, OptionParser
from .pipeline_cut import describe_cut
from .pipeline_trainer import PipelineOptions
from .pretrain import Pretraining, prepare_run, pretrain_model, read_fields
from .scaling import scale_modes
from .sweep import read_sweep, run_sweep


app = command_line(__doc__)


def leave_processes() -> None:
    """Leave the processes of torchrun, whose threads the end of the interpreter would stop at any moment."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
    add_help_option=False,
)
def finetune(context: typer.Context) -> None:
    """Fine-tune: LoRA on chosen modules and the depth parameters in full beside it, or all weights."""
    finetune_model(*finetune_options().parse(context.args))
    leave_processes()


def finetune_options() -> OptionParser:
    """Make the parser of what `finetune` is given."""
    parser = OptionParser(
        Recipe,
        Arguments,
        PipelineOptions,
        usage="python -m training finetune [RECIPE.yaml] --model MODEL --data FILE … --output FOLDER [--resume] […]",
        description=f"{finetune.__doc__} Options are written with - or _ between words. A YAML or JSON file of them "
        "('depth_lr: 1e-3', one per line) may come first; the options after it override it.",
        epilog="Example: python -m training finetune --model ported --data notes.txt --output tuned --max-steps 200 "
        "--per-device-train-batch-size 4 --learning-rate 2e-4 --logging-steps 10",
    )
    parser.add_argument(
        "--no_depth",
        "--no-depth",
        dest="depth",
        action="store_false",
        default=SUPPRESS,  # that of --depth
        help="Leave the depth parameters as they are.",
    )
    return parser


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
    add_help_option=False,
)
def pretrain(context: typer.Context) -> None:
    """Train from random weights, with Attention Residuals or with standard residuals."""
    pretrain_model(*pretrain_options().parse(context.args))
    leave_processes()


def pretrain_options() -> OptionParser:
    """Make the parser of what `pretrain` is given."""
    return OptionParser(
        Pretraining,
        Arguments,
        PipelineOptions,
        usage="python -m training pretrain [RECIPE.yaml] --config FOLDER --data FILE … --output FOLDER [--resume] […]",
        description=f"{pretrain.__doc__} Options are written with - or _ between words. A YAML or JSON file of them "
        "('depth_lr_factor: 2', one per line) may come first; the options after it override it.",
        epilog="Example: python -m training pretrain --config demo/tiny --data LICENSE README.md --tokenizer train "
        "--held-out 0.5 --output trained --mode full --set vocab_size=512 --length 64 --max-steps 20 "
        "--learning-rate 1e-3 --lr-scheduler-type cosine",
    )


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
    add_help_option=False,
)
def distil(context: typer.Context) -> None:
    """Bring what a trained port learned into its plain base, which is served without this library."""
    recipe, arguments = distil_options().parse(context.args)
    distil_model(recipe, arguments)
    leave_processes()


def distil_options() -> OptionParser:
    """Make the parser of what `distil` is given."""
    return OptionParser(
        Distillation,
        Arguments,
        usage="python -m training distil [RECIPE.yaml] --model BASE --teacher MERGED --data FILE … --output FOLDER […]",
        description=f"{distil.__doc__} Options are written with - or _ between words. A YAML or JSON file of them "
        "('temperature: 2', one per line) may come first; the options after it override it.",
        epilog="Example: python -m training distil --model demo/checkpoints/SmolLM2-135M-Instruct --teacher merged "
        "--data notes.txt --output plain --lora full --max-steps 200 --learning-rate 3e-5",
    )


@app.command(epilog="Example: python -m training merge tuned/adapter merged")
def merge(
    adapter: Annotated[Path, typer.Argument(help="The adapter that finetune wrote.")],
    target: Annotated[Path, typer.Argument(help="The folder to write; it must be empty or absent.")],
) -> None:
    """Merge an adapter into its base: a checkpoint that loads without PEFT."""
    merge_adapter(adapter, target)
    print(f"{target}: merged")


@app.command(epilog="Example: python -m training diagnose merged --text notes.txt --output pictures --against ported")
def diagnose(
    path: Annotated[str, typer.Argument(help="A model with Attention Residuals.")],
    output: Annotated[Path, typer.Option(help="The folder for diagnosis.json and pictures.")],
    text: Annotated[Path | None, typer.Option(help="A UTF-8 text file, in place of the built-in sample.")] = None,
    adapter: Annotated[Path | None, typer.Option(help="An adapter to merge into the model first.")] = None,
    against: Annotated[
        str | None, typer.Option(help="A second model. Default: the same with standard residuals.")
    ] = None,
    tokens: Annotated[int, typer.Option(help="The number of tokens of the text, at most.")] = 512,
    ablate: Annotated[
        bool, typer.Option("--ablate", help="Hide each source, one at a time, and see how the loss rises.")
    ] = False,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run the code of a tokenizer that lies beside the checkpoint.")
    ] = False,
) -> None:
    """Draw the paper's figures for a checkpoint: depth weights, magnitudes, gradients, reach, mixing matrix."""
    diagnose_model(
        path,
        output,
        text=text,
        adapter=adapter,
        against=against,
        tokens=tokens,
        ablate=ablate,
        trust_remote_code=trust_remote_code,
    )


@app.command(epilog="Example: python -m training scaling training/paper_scaling.csv --output pictures --compute 5.6")
def scaling(
    runs: Annotated[
        list[Path], typer.Argument(help="CSV or JSON files of runs, or folders with the result.json of finished runs.")
    ],
    output: Annotated[Path, typer.Option(help="The folder for scaling.json and the picture.")],
    baseline: Annotated[str, typer.Option(help="The mode that others are compared with.")] = "none",
    compute: Annotated[
        float | None,
        typer.Option(help="Where they are compared, in PFLOP/s-days. Default: the largest that all modes have."),
    ] = None,
) -> None:
    """Fit loss against compute for each mode, and say what their difference is worth in compute."""
    scale_modes(runs, output, baseline=baseline, compute=compute)


@app.command(epilog="Example: python -m training sweep training/sweeps/blocks.yaml --jobs 2")
def sweep(
    runs: Annotated[Path, typer.Argument(help="A YAML or JSON file with output, options and grid.")],
    jobs: Annotated[int, typer.Option(min=1, help="The number of runs at a time, which share the cores.")] = 1,
) -> None:
    """Pre-train with every combination of options in a grid; run again, it goes on where it was stopped."""
    run_sweep(read_sweep(runs), jobs, prepare=lambda options: prepare_run(*pretrain_options().parse(options)))


@app.command(epilog="Example: python -m training stages demo/tiny --pipeline 4 --virtual 2 --set attn_res_block_size=3")
def stages(
    config: Annotated[str, typer.Argument(help="A folder or hub id with the config.json of a model.")],
    pipeline: Annotated[int, typer.Option(help="The number of processes.")],
    virtual: Annotated[int, typer.Option(help="The number of stages on each.")] = 1,
    fields: Annotated[
        list[str] | None, typer.Option("--set", help="Other fields of the config, as NAME=VALUE.")
    ] = None,
) -> None:
    """Say how a pipeline cuts a model's layers, and how many vectors of the model's width travel a token."""
    changed = read_fields(Pretraining(config, [], fields=fields or []))
    print("\n".join(describe_cut(make_config(config, changed), pipeline, virtual)))


if __name__ == "__main__":
    app()
