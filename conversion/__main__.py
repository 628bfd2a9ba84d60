"""Port checkpoints to Attention Residuals and back, look at them, and check that they compute what they should."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from common.errors import command_line, printable

from .export import export_checkpoint
from .inspection import inspect_checkpoint
from .port import Blocks, Form, port_checkpoint
from .upcycle import upcycle_checkpoint
from .verify import verify_port


app = command_line(__doc__)

Source = Annotated[str, typer.Argument(help="A local folder, a hub id or a GGUF file.")]
Target = Annotated[Path, typer.Argument(help="The folder to write; it must not exist, or be empty.")]
Mode = Annotated[Literal["block", "full"], typer.Option(help="Read blocks of layers, or every sublayer.")]
BlockSize = Annotated[int | None, typer.Option(help="Decoder layers per block. Default: layers / 8, rounded up.")]
NumBlocks = Annotated[int | None, typer.Option(help="The number of blocks, in place of their size.")]
FormName = Annotated[
    Literal["replace", "add"], typer.Option(help="A mixture in place of the residual stream, or gated beside it.")
]
Heads = Annotated[int, typer.Option(help="Parts of the width, each with its own weights.")]
Query = Annotated[Literal["learned", "input"], typer.Option(help="Learned, or projected from the input.")]
QueryRank = Annotated[int | None, typer.Option(help="The rank of that projection. Default: the width.")]
Weights = Annotated[
    Literal["softmax", "sigmoid", "static", "static_raw"], typer.Option(help="How sources are weighed.")
]
KeyNorm = Annotated[bool, typer.Option("--key-norm/--no-key-norm", help="Normalise the keys.")]
Window = Annotated[int | None, typer.Option(help="Read this many newest sources beside the embedding.")]
Text = Annotated[Path | None, typer.Option(help="A UTF-8 text file, in place of the built-in sample.")]


def say(report: object) -> None:
    """Print a report."""
    typer.echo(printable(str(report)))


@app.command(epilog="Example: python -m conversion port HuggingFaceTB/SmolLM2-135M-Instruct ported --num-blocks 8")
def port(
    source: Source,
    target: Target,
    mode: Mode = "block",
    block_size: BlockSize = None,
    num_blocks: NumBlocks = None,
    link: Annotated[bool, typer.Option("--link", help="Hard-link the shards: instant, but they stay shared.")] = False,
    verify: Annotated[bool, typer.Option("--verify", help="Compare with SOURCE before TARGET appears.")] = False,
    form: FormName = "replace",
    heads: Heads = 1,
    query: Query = "learned",
    query_rank: QueryRank = None,
    weights: Weights = "softmax",
    key_norm: KeyNorm = True,
    window: Window = None,
) -> None:
    """Port a checkpoint of a base family to Attention Residuals without changing what it computes.

    With --link a program that writes into one folder's shards in place changes the other's; transformers'
    save_pretrained writes new files, so it does not.
    """
    how = Form(form, heads, query, query_rank, weights, key_norm, window)
    say(port_checkpoint(source, target, Blocks(mode, block_size, num_blocks), link, verify, how))


@app.command(epilog="Example: python -m conversion verify HuggingFaceTB/SmolLM2-135M-Instruct ported")
def verify(source: Source, target: Annotated[str, typer.Argument(help="Its port.")], text: Text = None) -> None:
    """Compare a port with its source: tensors byte for byte, and logits on a text. Exit status 1 beyond tolerance."""
    verification = verify_port(source, target, text)
    say(verification)
    raise typer.Exit(0 if verification.passed else 1)


@app.command(epilog="Example: python -m conversion export ported back")
def export(source: Annotated[str, typer.Argument(help="A port that is not trained.")], target: Target) -> None:
    """Write a port as a checkpoint of its base family again. Refused once its depth attention is trained."""
    say(export_checkpoint(source, target))


@app.command(epilog="Example: python -m conversion upcycle HuggingFaceTB/SmolLM2-135M moe --experts 4 --top-k 2")
def upcycle(
    source: Source,
    target: Target,
    experts: Annotated[int, typer.Option(help="Experts per layer.")],
    top_k: Annotated[int, typer.Option(help="Experts per token.")],
    mode: Mode = "block",
    block_size: BlockSize = None,
    num_blocks: NumBlocks = None,
    expert_noise: Annotated[
        float, typer.Option(help="Noise of each expert, in units of its weights' deviation.")
    ] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of the routers and the noise.")] = 0,
    form: FormName = "replace",
    heads: Heads = 1,
    query: Query = "learned",
    query_rank: QueryRank = None,
    weights: Weights = "softmax",
    key_norm: KeyNorm = True,
    window: Window = None,
) -> None:
    """Turn a dense Llama into a Mixtral whose experts start as copies of its MLP, with depth attention."""
    blocks = Blocks(mode, block_size, num_blocks)
    how = Form(form, heads, query, query_rank, weights, key_norm, window)
    say(upcycle_checkpoint(source, target, experts, top_k, blocks, expert_noise, seed, how))


@app.command(epilog="Example: python -m conversion inspect ported --entropy")
def inspect(
    path: Source,
    text: Text = None,
    entropy: Annotated[bool, typer.Option("--entropy", help="Run it on a text for its depth weights.")] = False,
) -> None:
    """Say what a checkpoint is: family, mode, blocks, and how far its queries have moved from zero."""
    say(inspect_checkpoint(path, text, entropy))


if __name__ == "__main__":
    app()
