"""Evaluate models with Attention Residuals on the benchmarks of the paper, and compare them item by item."""

import logging
from pathlib import Path
from typing import Annotated

import typer
from lm_eval.utils import setup_logging

from common.errors import command_line

from . import data as local_data
from .benchmarks import EvalError, build, names_of, task_manager
from .run import Settings, is_first_process, run_benchmarks, subjects_of
from .table import compare, write


app = command_line(__doc__)

Tasks = Annotated[
    str,
    typer.Option(help="Names, separated by commas: attnres_paper, attnres_core, one of their tasks, any of lm-eval's."),
]


@app.command(
    epilog="Example: python -m eval run --model source --model ported --tasks attnres_core --data data "
    "--confirm-run-unsafe-code"
)
def run(
    model: Annotated[list[str], typer.Option(help="A local folder or a hub id; may be given several times.")],
    tasks: Tasks,
    adapter: Annotated[
        str | None, typer.Option(help="A PEFT adapter: the last model is evaluated with it, too.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Use only so many items of each task.")] = None,
    data: Annotated[Path | None, typer.Option(help="Read the data sets from this folder, not from the hub.")] = None,
    output: Annotated[Path, typer.Option(help="The folder for results; what is there is not run again.")] = Path(
        "results"
    ),
    batch_size: Annotated[str, typer.Option(help="A number, auto, or auto:N.")] = "1",
    device: Annotated[str | None, typer.Option(help="cpu, cuda:0, … Default: a GPU if there is one.")] = None,
    backend: Annotated[str, typer.Option(help="The harness's model type: hf, vllm, …")] = "hf",
    model_args: Annotated[
        str, typer.Option(help="More for the harness's model, as dtype=float32,max_length=2048.")
    ] = "",
    gen_kwargs: Annotated[str, typer.Option(help="Arguments for generation, as max_gen_toks=256.")] = "",
    chat_template: Annotated[bool, typer.Option("--chat-template", help="Use the model's chat template.")] = False,
    cache: Annotated[bool, typer.Option("--cache", help="Keep each response, to resume within a benchmark.")] = False,
    confirm_run_unsafe_code: Annotated[
        bool, typer.Option("--confirm-run-unsafe-code", help="Run the code that models write (HumanEval, MBPP).")
    ] = False,
    confirm_no_isolation: Annotated[
        bool, typer.Option("--confirm-no-isolation", help="Run that code even where the system cannot isolate it.")
    ] = False,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run the code that lies beside a model.")
    ] = False,
) -> None:
    """Run benchmarks, one model after the other, and print one table.

    Finished benchmarks stay in OUTPUT and are not run again. Exit status 1: one failed; 2: nothing could be run.
    """
    _quiet()
    settings = Settings(
        backend=backend,
        model_args=model_args,
        gen_kwargs=gen_kwargs,
        batch_size=batch_size,
        device=device,
        limit=limit,
        chat_template=chat_template,
        cache=cache,
        run_code=confirm_run_unsafe_code,
        no_isolation=confirm_no_isolation,
        trust_remote_code=trust_remote_code,
    )
    if adapter and backend != "hf":
        raise EvalError(f"--adapter works with the back end hf, not {backend}; merge it: python -m training merge.")
    benchmarks, outcomes = run_benchmarks(subjects_of(model, adapter), tasks.split(","), settings, output, data)
    if not is_first_process():
        return
    print(write(compare(benchmarks, outcomes), outcomes, output))
    print(f"{', '.join(map(str, sorted(output.glob('table.*'))))}; details in {output}/MODEL/BENCHMARK.json")
    raise typer.Exit(1 if any(outcome.failures for outcome in outcomes) else 0)


@app.command(epilog="Example: python -m eval fetch --tasks attnres_paper --data data")
def fetch(tasks: Tasks, data: Annotated[Path, typer.Option(help="The folder to fill.")]) -> None:
    """Download the data sets of tasks, to evaluate without a network later. Files that are there are kept."""
    _quiet()
    manager = task_manager()
    with local_data.fetching(data) as written:
        build(manager, names_of(manager, tasks.split(",")), [])
    for file in written:
        print(f"{file}  {file.stat().st_size / 2**20:.1f} MiB")
    print(f"{data} is complete for {tasks}.")


def _quiet() -> None:
    """Hide the messages that the harness prints on every run."""
    setup_logging("WARNING")
    for name in ("lm_eval.api.task", "lm_eval.evaluator"):
        logging.getLogger(name).setLevel(logging.ERROR)


if __name__ == "__main__":
    app()
