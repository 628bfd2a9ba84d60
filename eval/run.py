"""Run benchmarks on models, one model in memory at a time, keeping each finished benchmark."""

import contextlib
import gc
import json
import logging
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from lm_eval import simple_evaluate
from lm_eval.api.model import LM
from lm_eval.api.registry import get_model
from lm_eval.utils import handle_non_serializable, simple_parse_args_string
from tqdm import tqdm

from common.files import whole_file

from . import data as local_data
from .benchmarks import Benchmark, EvalError, build, names_of, task_manager


log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Subject:
    """What is evaluated: a model, or a model with a PEFT adapter on it. Its name is its folder's and its column's."""

    name: str
    model: str
    adapter: str | None = None

    def identity(self) -> dict[str, Any]:
        """What tells this model from another that has been at the same place."""
        files = {}
        for folder in filter(None, (self.model, self.adapter)):
            for path in sorted(Path(folder).glob("*.*")) if Path(folder).is_dir() else ():
                if path.suffix in (".json", ".safetensors"):
                    stat = path.stat()
                    files[str(path)] = [stat.st_size, stat.st_mtime_ns]
        return {"model": self.model, "adapter": self.adapter, "files": files}


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


@dataclass
class Outcome:
    """What there is of one subject: the harness's results of each benchmark that ended, and why the others did not."""

    subject: Subject
    results: dict[str, dict[str, Any]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)


def subjects_of(models: list[str], adapter: str | None) -> list[Subject]:
    """Each model, and the last one with the adapter.

    Raises:
        EvalError: a local path that is no model or adapter, or two models of one name.
    """
    needed = dict.fromkeys(models, "config.json") | ({adapter: "adapter_config.json"} if adapter else {})
    for path, name in needed.items():
        looks_local = path.startswith((".", "/", "~")) or Path(path).exists() or path.count("/") != 1
        if looks_local and not (Path(path) / name).is_file():
            raise EvalError(f"{path} holds no {name}; expected a folder with one, or a hub id OWNER/NAME.")
    subjects = [Subject(Path(model).name or model, model) for model in models]
    if adapter:
        name = Path(adapter).resolve()
        name = name.parent.name if name.name == "adapter" else name.name
        subjects.append(Subject(f"{subjects[-1].name}+{name}", models[-1], adapter))
    names = [subject.name for subject in subjects]
    if len(set(names)) < len(names):
        raise EvalError(
            f"Two models have the same name: {', '.join(names)}. Results are kept by name: rename a folder."
        )
    return subjects


def run(
    subjects: list[Subject], names: list[str], settings: Settings, output: Path, data: Path | None = None
) -> tuple[list[Benchmark], list[Outcome]]:
    """Evaluate each subject on each benchmark whose results are not in `output` yet.

    `output/SUBJECT/BENCHMARK.json` holds what the harness returned, samples included ("lm_eval"), and the "settings".

    Raises:
        EvalError, DataError: before any model is loaded: unknown names, missing or malformed data, code that may
            not be run, results of other settings in `output`.
    """
    manager = task_manager()
    names = names_of(manager, names)
    log.info("Reading the data of %d benchmarks", len(names))
    with local_data.local(data) if data else contextlib.nullcontext([]) as missing:
        benchmarks = build(manager, names, missing)
    if not settings.run_code and (code := [benchmark.name for benchmark in benchmarks if benchmark.runs_code]):
        raise EvalError(f"{', '.join(code)} run code that the model writes: allow it with --confirm-run-unsafe-code.")
    todo = [(subject, _unfinished(subject, benchmarks, settings, output)) for subject in subjects]

    outcomes = []
    with tqdm(total=sum(len(unfinished) for _, unfinished in todo), desc="benchmarks", unit="benchmark") as bar:
        for subject, unfinished in todo:
            failures = _evaluate(subject, unfinished, settings, output, bar)
            results = {
                benchmark.name: json.loads(path.read_text(encoding="utf-8"))["lm_eval"]
                for benchmark in benchmarks
                if (path := _file(output, subject, benchmark)).exists()
            }
            outcomes.append(Outcome(subject, results, failures))
    return benchmarks, outcomes


def _file(output: Path, subject: Subject, benchmark: Benchmark) -> Path:
    return output / subject.name / f"{benchmark.name}.json"


def _settings(subject: Subject, benchmark: Benchmark, settings: Settings) -> dict[str, Any]:
    """All that a score depends on."""
    return {
        **subject.identity(),
        "backend": settings.backend,
        "model_args": settings.model_args,
        "gen_kwargs": settings.gen_kwargs,
        "limit": settings.limit,
        "chat_template": settings.chat_template,
        "tasks": benchmark.fingerprint,
        "versions": {name: version(name) for name in ("lm_eval", "transformers", "torch")},
    }


def _unfinished(
    subject: Subject, benchmarks: list[Benchmark], settings: Settings, output: Path
) -> list[tuple[Benchmark, dict[str, Any]]]:
    """The benchmarks without results yet, each with what to record of it: running one changes its tasks' configs."""
    todo = []
    for benchmark in benchmarks:
        file, wanted = _file(output, subject, benchmark), _settings(subject, benchmark, settings)
        if not file.exists():
            todo.append((benchmark, wanted))
            continue
        try:
            there = json.loads(file.read_text(encoding="utf-8"))["settings"]
        except (ValueError, KeyError) as error:
            raise EvalError(f"{file} holds no results of this command ({error}); move it away.") from error
        if differing := [key for key in wanted if there.get(key) != wanted[key]]:
            key = differing[0]
            raise EvalError(
                f"{file} has results for another {key} ({there.get(key)!r:.80}, not {wanted[key]!r:.80}): "
                "choose another --output, or move it away."
            )
    return todo


def _evaluate(
    subject: Subject, todo: list[tuple[Benchmark, dict[str, Any]]], settings: Settings, output: Path, bar: tqdm
) -> dict[str, str]:
    """Run what is left to do for one subject; returns why benchmarks failed."""
    failures: dict[str, str] = {}
    model = None
    for benchmark, record in todo:
        bar.set_description(f"{subject.name}: {benchmark.title}")
        try:
            model = model or _load(subject, settings)
            results = simple_evaluate(
                model,
                tasks=[benchmark.request()],
                task_manager=task_manager(),
                limit=settings.limit,
                gen_kwargs=settings.gen_kwargs or None,
                apply_chat_template=settings.chat_template,
                use_cache=str(output / subject.name / "responses") if settings.cache else None,
                confirm_run_unsafe_code=settings.run_code,
                bootstrap_iters=1000,
            )
            if results is not None:  # in a distributed run only the first process has them
                _write(_file(output, subject, benchmark), {"settings": record, "lm_eval": results})
        except Exception as error:  # one benchmark's failure, whatever it is, leaves the others
            log.exception("%s on %s failed", subject.name, benchmark.name)
            failures[benchmark.name] = f"{type(error).__name__}: {error}"
            if model is None:  # it cannot be loaded
                return dict.fromkeys((benchmark.name for benchmark, _ in todo), failures[benchmark.name])
        bar.update()
    del model
    gc.collect()
    if torch.accelerator.is_available():
        torch.accelerator.memory.empty_cache()
    return failures


def _load(subject: Subject, settings: Settings) -> LM:
    arguments = {"pretrained": subject.model, "trust_remote_code": True}
    arguments |= simple_parse_args_string(settings.model_args)
    if subject.adapter:
        arguments["peft"] = subject.adapter
    device = settings.device
    if device is None and settings.backend == "hf":  # the harness would take a GPU for granted
        device = str(torch.accelerator.current_accelerator()) if torch.accelerator.is_available() else "cpu"
    return get_model(settings.backend).create_from_arg_obj(
        arguments, {"batch_size": settings.batch_size, "device": device}
    )


def _write(file: Path, content: dict[str, Any]) -> None:
    with whole_file(file) as partial:
        partial.write_text(json.dumps(content, default=handle_non_serializable, ensure_ascii=False), encoding="utf-8")
