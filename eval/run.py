"""Run benchmarks on models, one model in memory at a time, keeping each finished benchmark."""

import contextlib
import gc
import json
import logging
import os
import re
import sqlite3
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from lm_eval import simple_evaluate
from lm_eval.api.model import LM
from lm_eval.api.registry import get_model
from lm_eval.utils import handle_non_serializable, hash_string, simple_parse_args_string
from tqdm import tqdm
from transformers import AutoConfig, AutoTokenizer
from transformers.utils import ADAPTER_CONFIG_NAME
from transformers.utils.hub import cached_file, extract_commit_hash

import modeling_attnres  # noqa: F401, its models are found without running the code beside a checkpoint
from common.errors import UserError, one_line, reading
from common.files import hold_folder, whole_file

from . import data as local_data
from .adapter import check_adapter
from .benchmarks import Benchmark, EvalError, build, names_of, task_manager
from .tasks import sandbox


log = logging.getLogger(__name__)

# Arguments of the harness's models that options of ours set.
OPTIONS = {
    "pretrained": "--model",
    "peft": "--adapter",
    "batch_size": "--batch-size",
    "device": "--device",
    "trust_remote_code": "--trust-remote-code",
}


@dataclass(frozen=True)
class Subject:
    """A model, or a model with a PEFT adapter, to evaluate; `name` is its column's and its results' folder's."""

    name: str
    model: str
    adapter: str | None = None


@dataclass(frozen=True)
class Settings:
    """How models are evaluated; the same for all. `model_args` and `gen_kwargs` are the harness's `KEY=VALUE,…`."""

    backend: str = "hf"
    model_args: str = ""
    gen_kwargs: str = ""
    batch_size: str = "1"
    device: str | None = None
    limit: int | None = None
    chat_template: bool = False
    cache: bool = False
    run_code: bool = False
    no_isolation: bool = False
    trust_remote_code: bool = False

    def check(self) -> None:
        """Refuse what the harness would stumble over later.

        Raises:
            EvalError: names the option.
        """
        for option, text in (("--model-args", self.model_args), ("--gen-kwargs", self.gen_kwargs)):
            for part in filter(None, text.split(",")):
                if not re.fullmatch(r"\s*\w+=.*", part, re.DOTALL):
                    raise EvalError(f"{option}: found {part!r}, expected KEY=VALUE,KEY=VALUE,…")
        for name in simple_parse_args_string(self.model_args).keys() & OPTIONS:
            raise EvalError(f"--model-args: {name} is set by {OPTIONS[name]}.")
        if not re.fullmatch(r"[1-9]\d{0,8}|auto(:[1-9]\d{0,8})?", self.batch_size, re.ASCII):
            raise EvalError(f"--batch-size: found {self.batch_size!r}, expected a number, auto, or auto:N.")
        with reading(f"--backend {self.backend}"):
            get_model(self.backend)
        if self.device:
            with reading(f"--device {self.device}"):
                torch.device(self.device)

    @property
    def resolved_device(self) -> str | None:
        """The device to use; None: the back end chooses."""
        if self.device is None and self.backend == "hf":  # the harness would take a GPU for granted
            return str(torch.accelerator.current_accelerator()) if torch.accelerator.is_available() else "cpu"
        return self.device


@dataclass
class Outcome:
    """The harness's results for one subject on each benchmark that has finished, and why the others failed."""

    subject: Subject
    results: dict[str, dict[str, Any]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)


def subjects_of(models: list[str], adapter: str | None) -> list[Subject]:
    """List each model, and the last one with the adapter.

    Raises:
        EvalError: a local path that is no model or adapter, or two models of one name.
    """
    # Each path must hold its config, unless it can be a hub id.
    needed = dict.fromkeys(models, "config.json") | ({adapter: ADAPTER_CONFIG_NAME} if adapter else {})
    for path, name in needed.items():
        looks_local = path.startswith((".", "/", "~")) or Path(path).exists() or path.count("/") != 1
        if looks_local and not (Path(path) / name).is_file():
            is_adapter = (Path(path) / ADAPTER_CONFIG_NAME).is_file()
            expected = (
                "it is an adapter: --adapter" if is_adapter else "expected a folder with one, or a hub id OWNER/NAME"
            )
            raise EvalError(f"{path} holds no {name}; {expected}.")
    # The name of an adapter that `python -m training finetune` wrote is that of its output folder.
    subjects = [Subject(Path(model).resolve().name, model) for model in models]
    if adapter:
        folder = Path(adapter).resolve()
        name = folder.parent.name if folder.name == "adapter" else folder.name
        subjects.append(Subject(f"{subjects[-1].name}+{name}", models[-1], adapter))
    # Names become folders and columns.
    names = [subject.name for subject in subjects]
    if not "".join(names).isprintable():
        raise EvalError(f"A model's name has characters that cannot be printed: {', '.join(map(repr, names))}.")
    if len(set(names)) < len(names):
        raise EvalError(
            f"Two models have the same name: {', '.join(names)}. Results are kept by name: rename a folder."
        )
    return subjects


def run_benchmarks(
    subjects: list[Subject], names: list[str], settings: Settings, output: Path, data: Path | None = None
) -> tuple[list[Benchmark], list[Outcome]]:
    """Evaluate each subject on each benchmark whose results are not in `output` yet.

    `output/SUBJECT/BENCHMARK.json` holds what the harness returned, samples included ("lm_eval"), and the "settings".

    Returns:
        The benchmarks that `names` stand for, and an outcome per subject.

    Raises:
        UserError: before any model is loaded: unknown names, missing or malformed data, code that may not be run, an
            adapter of another model, results of other settings in `output`, another process at work there; or nothing
            could be run.

    Example:
        from pathlib import Path

        from eval.run import Settings, run_benchmarks, subjects_of

        subjects = subjects_of(["demo/checkpoints/SmolLM2-135M-Instruct"], adapter=None)
        benchmarks, outcomes = run_benchmarks(subjects, ["attnres_perplexity"], Settings(limit=1), Path("results"))
        print(outcomes[0].results["attnres_perplexity"]["results"])
    """
    # Find whatever is wrong before a model is loaded: settings, names, data, code beside the models.
    settings.check()
    manager = task_manager()
    names = names_of(manager, names)
    log.info("Reading the data of %d benchmarks", len(names))
    with local_data.local(data) if data else contextlib.nullcontext([]) as missing:
        benchmarks = build(manager, names, missing)
    if not settings.chat_template and (chats := [benchmark.name for benchmark in benchmarks if benchmark.is_chat]):
        raise EvalError(f"{', '.join(chats)}: asked as in a chat, so its prompts need the model's: --chat-template.")
    if not settings.trust_remote_code and settings.backend == "hf":
        for subject in subjects:
            _refuse_code(subject)
    for subject in subjects:
        if subject.adapter is not None:
            revision = simple_parse_args_string(settings.model_args).get("revision")
            check_adapter(subject.model, subject.adapter, settings.trust_remote_code, revision)
    with contextlib.ExitStack() as stack:
        if code := [benchmark.name for benchmark in benchmarks if benchmark.runs_code]:
            stack.enter_context(_code_allowed(settings, code))
        # Only the first process writes results, so it alone holds their folders.
        if is_first_process():
            for subject in subjects:
                busy = "another process is evaluating this model; choose another --output."
                stack.enter_context(hold_folder(output / subject.name, busy))
        # All of it is compared with what is kept before anything is run.
        todo = [(subject, _unfinished(subject, benchmarks, settings, output)) for subject in subjects]
        outcomes = []
        with tqdm(total=sum(len(unfinished) for _, unfinished in todo), desc="benchmarks", unit="benchmark") as bar:
            for subject, unfinished in todo:
                failures = _evaluate(subject, unfinished, settings, output, bar)
                # Read back also what has just been written, so that a table does not depend on where a run began.
                results = {
                    benchmark.name: _read(path, benchmark)["lm_eval"]
                    for benchmark in benchmarks
                    if (path := _file(output, subject, benchmark)).exists()
                }
                outcomes.append(Outcome(subject, results, failures))
    if all(outcome.failures and not outcome.results for outcome in outcomes):
        reasons = [f"{outcome.subject.name}: {reason}" for outcome in outcomes for reason in outcome.failures.values()]
        raise EvalError(f"Nothing could be run. {'; '.join(dict.fromkeys(reasons))}")
    return benchmarks, outcomes


def is_first_process() -> bool:
    """Say whether this process, of those that share the work (accelerate launch), is the one that has the results."""
    return int(os.environ.get("RANK", "0")) == 0


@contextlib.contextmanager
def _code_allowed(settings: Settings, benchmarks: list[str]) -> Iterator[None]:
    """Let the sandbox run code within the block, as far as that has been allowed.

    Raises:
        EvalError: it has not, or there is no sandbox here.
    """
    if not settings.run_code:
        names = ", ".join(benchmarks)
        raise EvalError(f"{names} run code that the model writes: allow it with --confirm-run-unsafe-code.")
    with contextlib.ExitStack() as stack:
        if settings.no_isolation:  # the harness loads the sandbox as a module of its own
            os.environ[sandbox.CONFIRM] = "1"
            stack.callback(os.environ.pop, sandbox.CONFIRM)
        try:
            sandbox.choose_launcher()
        except sandbox.SandboxError as error:
            raise EvalError(str(error)) from error
        yield


def _refuse_code(subject: Subject) -> None:
    """Refuse a model or tokenizer that can only be loaded by code of its own.

    Raises:
        EvalError: names the model.
    """
    for auto_class in (AutoConfig, AutoTokenizer):
        try:
            auto_class.from_pretrained(subject.model, trust_remote_code=False)
        except Exception as error:  # anything else that is wrong is reported when the model is loaded
            if "trust_remote_code" in str(error):
                raise EvalError(
                    f"{subject.model} is loaded by code that lies beside it: --trust-remote-code, if you trust it."
                ) from error


def _file(output: Path, subject: Subject, benchmark: Benchmark) -> Path:
    return output / subject.name / f"{benchmark.name}.json"


def _model_settings(subject: Subject, settings: Settings) -> dict[str, Any]:
    """Collect all that an answer depends on besides the question."""
    arguments = simple_parse_args_string(settings.model_args)
    device = settings.resolved_device
    engine = ["vllm"] if settings.backend == "vllm" else []
    return {
        "model": subject.model,
        "adapter": subject.adapter,
        "files": _identify_files(subject, arguments),
        "backend": settings.backend,
        "model_args": settings.model_args,
        "gen_kwargs": settings.gen_kwargs,
        "batch_size": settings.batch_size,
        "device": torch.device(device).type if device else None,
        "trust_remote_code": settings.trust_remote_code,
        "chat_template": settings.chat_template,
        "versions": {name: version(name) for name in ("lm_eval", "transformers", "torch", "peft", *engine)},
    }


def _identify_files(subject: Subject, arguments: dict[str, Any]) -> dict[str, Any]:
    """Identify the model by size and time of its files; one on the hub by its commit."""
    # The model, its adapter and folders that --model-args name (a tokenizer's), each with a file that a commit holds.
    configs: dict[str, str | None] = {subject.model: "config.json"}
    if subject.adapter is not None:
        configs[subject.adapter] = ADAPTER_CONFIG_NAME
    configs |= dict.fromkeys(value for value in arguments.values() if isinstance(value, str) and Path(value).is_dir())
    identity: dict[str, Any] = {}
    for source, config in configs.items():
        if not Path(source).is_dir():
            with contextlib.suppress(OSError):  # not to be had, which is reported when it is loaded
                file = cached_file(source, config, revision=arguments.get("revision"))
                identity[source] = extract_commit_hash(file, None)
            continue
        for path in sorted(Path(source).iterdir()):
            if path.suffix == ".md" or path.name.startswith(".") or path.is_dir():  # a model card is no part of it
                continue
            status = path.stat()
            if not stat.S_ISREG(status.st_mode):
                raise EvalError(f"{path} is no regular file, expected one of a model.")
            identity[str(path)] = [status.st_size, status.st_mtime_ns]
    return identity


def _unfinished(
    subject: Subject, benchmarks: list[Benchmark], settings: Settings, output: Path
) -> list[tuple[Benchmark, dict[str, Any]]]:
    """List the benchmarks without results yet, each with the settings to record with its results.

    The settings are taken before anything runs, for running a benchmark changes its tasks' configs.

    Raises:
        EvalError: there are results of other settings.
    """
    todo, model_settings = [], _model_settings(subject, settings)
    for benchmark in benchmarks:
        file = _file(output, subject, benchmark)
        wanted = model_settings | {
            "limit": settings.limit,
            "tasks": benchmark.fingerprint,
            "rows": benchmark.rows,
        }
        if not file.exists():
            todo.append((benchmark, wanted))
        elif what := _first_difference(_read(file, benchmark)["settings"], wanted):
            raise EvalError(f"{file} has results for another {what}: choose another --output, or move it away.")
    return todo


def _first_difference(recorded: dict[str, Any], wanted: dict[str, Any]) -> str | None:
    """Describe the first setting that was recorded with another value than is wanted, if there is one."""
    for key in {**wanted, **recorded}:
        was, now = recorded.get(key), wanted.get(key)
        if was == now:
            continue
        if isinstance(was, dict) and isinstance(now, dict):
            return f"{key}: {_first_difference(was, now)}"
        return f"{key} ({was!r:.80}, not {now!r:.80})"
    return None


def _read(file: Path, benchmark: Benchmark) -> dict[str, Any]:
    """Read what is kept of a finished benchmark.

    Raises:
        EvalError: the file was not written by `run_benchmarks`.
    """
    if not file.is_file():
        raise EvalError(f"{file} is no regular file; move it away.")
    with reading(file):
        content = json.loads(file.read_text(encoding="utf-8"))
    if (fault := _fault_of(content, benchmark)) is not None:
        raise EvalError(f"{file} holds no results of this command ({fault}); move it away.")
    return content


def _fault_of(content: Any, benchmark: Benchmark) -> str | None:
    """Describe what a table needs and results lack, if there is anything."""
    if not (isinstance(content, dict) and all(isinstance(content.get(key), dict) for key in ("settings", "lm_eval"))):
        return "no object with settings and lm_eval"
    results = content["lm_eval"]
    for key in ("results", "samples"):
        if not isinstance(results.get(key), dict):
            return f"no object {key}"
    score, name = results["results"].get(benchmark.name), f"{benchmark.metric},{benchmark.filter}"
    if not isinstance(score, dict) or not isinstance(score.get(name), int | float):
        return f"no number results/{benchmark.name}/{name}"
    for task in benchmark.tasks:
        samples = results["samples"].get(task)
        if not isinstance(samples, list) or not all(_is_sample(sample, benchmark) for sample in samples):
            return f"no list samples/{task} of objects with doc_id, filter, resps and {benchmark.metric}"
    return None


def _is_sample(sample: Any, benchmark: Benchmark) -> bool:
    needed = {"doc_id", "filter", "resps"}
    return (
        isinstance(sample, dict)
        and needed <= sample.keys()
        and (sample["filter"] != benchmark.filter or isinstance(sample.get(benchmark.metric), int | float | list))
    )


def _evaluate(
    subject: Subject, todo: list[tuple[Benchmark, dict[str, Any]]], settings: Settings, output: Path, bar: tqdm
) -> dict[str, str]:
    """Run the unfinished benchmarks on one subject, keep each one's results, and return why others failed."""
    failures: dict[str, str] = {}
    model = None
    for benchmark, record in todo:
        bar.set_description(f"{subject.name}: {benchmark.title}")
        try:
            # Loaded for the first benchmark: a subject whose benchmarks have all finished needs no memory.
            if model is None:
                model = _load(subject, settings)
            results = simple_evaluate(
                model,
                tasks=[benchmark.request()],
                task_manager=task_manager(),
                limit=settings.limit,
                gen_kwargs=settings.gen_kwargs or None,
                apply_chat_template=settings.chat_template,
                use_cache=_cache(output / subject.name, record) if settings.cache else None,
                confirm_run_unsafe_code=settings.run_code,
                bootstrap_iters=1000,
            )
        except Exception as error:  # whatever it is, the other benchmarks go on
            kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
            failures[benchmark.name] = kind + one_line(str(error))
            log.error("%s on %s failed: %s", subject.name, benchmark.name, failures[benchmark.name])
            log.debug("It failed here:", exc_info=error)
            if model is None:  # it cannot be loaded: every benchmark fails for this reason
                return dict.fromkeys((benchmark.name for benchmark, _ in todo), failures[benchmark.name])
        else:
            if results is not None:  # in a distributed run only the first process has them
                _write(_file(output, subject, benchmark), {"settings": record, "lm_eval": results})
        bar.update()
    # Free the memory for the next subject.
    del model
    gc.collect()
    if torch.accelerator.is_available():
        torch.accelerator.memory.empty_cache()
    return failures


def _cache(folder: Path, record: dict[str, Any]) -> str:
    """Return where the harness keeps a model's responses.

    The path has a hash of the model's settings: in the file itself the harness knows requests by their text alone.

    Raises:
        UserError: a file there is damaged.
    """
    model_settings = {key: value for key, value in record.items() if key not in ("limit", "tasks", "rows")}
    name = f"responses-{hash_string(json.dumps(model_settings, sort_keys=True))[:16]}"
    for file in folder.glob(f"{name}_rank*.db"):
        with reading(file), contextlib.closing(sqlite3.connect(file)) as responses:
            responses.execute("PRAGMA quick_check(1)").fetchall()
    return str(folder / name)


def _load(subject: Subject, settings: Settings) -> LM:
    """Load a subject as a model of the harness."""
    arguments = {"pretrained": subject.model, "trust_remote_code": settings.trust_remote_code}
    arguments |= simple_parse_args_string(settings.model_args)
    if subject.adapter:
        arguments["peft"] = subject.adapter
    return get_model(settings.backend).create_from_arg_obj(
        arguments, {"batch_size": settings.batch_size, "device": settings.resolved_device}
    )


def _write(file: Path, content: dict[str, Any]) -> None:
    with whole_file(file) as partial:
        partial.write_text(json.dumps(content, default=handle_non_serializable), encoding="utf-8")
