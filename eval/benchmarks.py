"""The benchmarks a name stands for, built from the harness's tasks and ours, and what is known of each."""

import hashlib
import inspect
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

from datasets import Dataset
from huggingface_hub import is_offline_mode
from lm_eval.api.group import Group
from lm_eval.api.task import Task
from lm_eval.tasks import TaskManager
from lm_eval.utils import hash_string

from common.errors import UserError, one_line

from .data import DataError
from .harness import GROUP_FIELD_NAMES, Kind, first_filter, load_yaml


TASKS = Path(__file__).parent / "tasks"
WITHOUT_NETWORK = "`python -m eval fetch`, run where there is a network, fills a folder that --data reads without one."


class EvalError(UserError):
    """An evaluation that cannot be done as asked; the message says why, before a model is loaded."""


@dataclass
class Benchmark:
    """One row of a table: a task, or a group of tasks in which every item has the same weight.

    Attributes:
        metric, filter: the harness's names of the one metric that is reported, and of the filter it is taken after.
        paper: the paper's figures (percent) for standard residuals and for Attention Residuals, where it has them.
    """

    name: str
    title: str
    tasks: dict[str, Task]
    metric: str
    filter: str
    paper: tuple[float, float] | None

    @property
    def shots(self) -> int:
        """The number of worked examples in a prompt; the largest of the tasks'."""
        return max(task.config.num_fewshot or 0 for task in self.tasks.values())

    @property
    def dataset(self) -> str:
        """The data set's hub id; the task's name where it makes its own."""
        return next(iter(self.tasks.values())).config.dataset_path or self.name

    @property
    def runs_code(self) -> bool:
        """Whether a task runs code that the model writes."""
        return any(task.config.unsafe_code for task in self.tasks.values())

    @property
    def is_chat(self) -> bool:
        """Whether a task asks as in a chat, which only a chat template can write."""
        return any((task.config.metadata or {}).get("chat", False) for task in self.tasks.values())

    @cached_property
    def fingerprint(self) -> str:
        """A hash of what the tasks do, the same in every process and every clone.

        Read it before a task runs: running a task changes its config.
        """
        configs = {name: task.config.to_dict(keep_callable=True) for name, task in self.tasks.items()}
        for config in configs.values():
            config.pop("metadata", None)  # holds the path of the task's file, which is another in another clone
        return hash_string(json.dumps(configs, default=_identify_function, sort_keys=True))

    @cached_property
    def rows(self) -> str:
        """A hash of the rows that are asked about, and of those that examples are drawn from."""
        digest = hashlib.sha256()
        for name, task in self.tasks.items():
            row_sets = [task.eval_docs]
            if task.config.num_fewshot:
                row_sets.append(task.fewshot_docs())
            for rows in row_sets:
                digest.update(name.encode())
                # A data set is read in batches, for speed; some tasks hold a list, or have no rows for examples.
                batches = rows.iter(1000) if isinstance(rows, Dataset) else [[] if rows is None else list(rows)]
                for batch in batches:
                    digest.update(json.dumps(batch, default=str, sort_keys=True).encode())
        return digest.hexdigest()

    def request(self) -> Group | Task:
        """Return what `lm_eval.simple_evaluate` takes as one of its tasks."""
        if list(self.tasks) == [self.name]:
            return self.tasks[self.name]
        group = Group.from_config(
            {
                "group": self.name,
                "group_alias": self.title,
                "aggregate_metric_list": [{"metric": self.metric, "filter_list": self.filter}],
            }
        )
        for task in self.tasks.values():
            group.add(task)
        return group


def _identify_function(function: Any) -> Any:
    """Identify a task's function by its name and the source of its file, for it may call the file's other functions."""
    if isinstance(function, partial):
        return [_identify_function(function.func), function.args, function.keywords]
    return [function.__qualname__, hash_string(Path(inspect.getsourcefile(function)).read_text(encoding="utf-8"))]


@cache
def task_manager() -> TaskManager:
    """Return the index of the harness's tasks and ours, read once: its 14,000 files take seconds."""
    return TaskManager(include_path=TASKS)


def names_of(manager: TaskManager, names: list[str]) -> list[str]:
    """Replace lists of benchmarks (attnres_paper, attnres_core), which have no score of their own, by what they list.

    Raises:
        EvalError: a name is not known.
    """
    benchmarks = []
    for name in names:
        entry = manager.task_index.get(name)
        if entry is None:
            ours = ", ".join(sorted(path.stem for path in TASKS.glob("*.yaml")))
            raise EvalError(f"{name!r} is no task; ours are {ours}; `lm_eval ls tasks` lists the harness's.")
        if entry.kind is Kind.GROUP and "aggregate_metric_list" not in entry.cfg:
            listed = [item if isinstance(item, str) else item["task"] for item in entry.cfg["task"]]
            benchmarks += names_of(manager, listed)
        elif entry.kind is Kind.TAG:
            benchmarks += sorted(entry.tags)
        else:
            benchmarks.append(name)
    return list(dict.fromkeys(benchmarks))  # without duplicates, in the order asked for


def build(manager: TaskManager, names: list[str], missing: list[str]) -> list[Benchmark]:
    """Build each benchmark with its data.

    Args:
        missing: filled, as tasks are built, with the files that were looked for in vain (see `data.local`).

    Raises:
        DataError: names all files that are missing, or all that are malformed; or the first one that the hub, which
            cannot be reached, should have given.
    """
    benchmarks, problems = [], []
    unreached: dict[str, list[str]] = {}  # tasks, by what the hub did not give
    for name in names:
        # Task by task, so that one that cannot be built does not hide what is wrong with the others.
        tasks: dict[str, Task] = {}
        for member in _members(manager, name, {}):
            before = len(missing)
            try:
                tasks |= manager.load([{"group": name, "task": [member]}])["tasks"]
            except UserError as error:
                problems.append(str(error))
            except ConnectionError as error:
                unreached.setdefault(one_line(str(error)), []).append(member["task"])
                if not is_offline_mode():  # every other data set would wait for the hub just as long, in vain
                    raise DataError(f"{member['task']}: {error}. {WITHOUT_NETWORK}") from error
            except Exception as error:
                if len(missing) == before:  # else it failed because its rows are missing, which is reported below
                    problems.append(f"{member['task']} cannot be built: {type(error).__name__}: {one_line(str(error))}")
        if tasks:
            benchmarks.append(_describe(manager, name, tasks))
    # Missing files first: without their rows, other errors mean little.
    if missing:
        raise DataError("These files are missing:\n  " + "\n  ".join(dict.fromkeys(missing)))
    if unreached:
        problems += [f"{_some(tasks)}: {error}." for error, tasks in unreached.items()]
        problems[-1] += f" {WITHOUT_NETWORK}"
    if problems:
        raise DataError("\n".join(dict.fromkeys(problems)))
    return benchmarks


def _some(names: list[str]) -> str:
    """Name the first of many, and how many more there are."""
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def _members(manager: TaskManager, name: str, overrides: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the single tasks of a name in the harness's form of a group's members: a name and the fields to change."""
    entry = manager.task_index[name]
    # A tag only collects tasks: it sets nothing for them.
    if entry.kind is Kind.TAG:
        for task in sorted(entry.tags):
            yield {**overrides, "task": task}
    elif entry.kind is Kind.GROUP:
        group = load_yaml(entry.yaml_path)
        # Fields that are not the group's own are set for all members; what an outer group sets goes before them.
        group_overrides = {key: value for key, value in group.items() if key not in GROUP_FIELD_NAMES} | overrides
        for item in group["task"]:
            # A member is a name, or a task or group with fields of its own, which go before all others.
            item = {"task": item} if isinstance(item, str) else item
            member = item.get("task") or item["group"]
            member_overrides = {key: value for key, value in item.items() if key not in ("task", "group")}
            yield from _members(manager, member, group_overrides | member_overrides)
    else:
        yield {**overrides, "task": name}


def _describe(manager: TaskManager, name: str, tasks: dict[str, Task]) -> Benchmark:
    """Make a benchmark of built tasks: a group's file names its metric, a single task reports its first."""
    config, first = manager.task_index[name].cfg, next(iter(tasks.values()))
    if "aggregate_metric_list" in config:
        aggregate = config["aggregate_metric_list"][0]
        metric, filter_name = aggregate["metric"], aggregate.get("filter_list", "none")
    else:
        metric, filter_name = next(iter(first.aggregation())), first_filter(first)
    paper = (config.get("metadata") or {}).get("paper")
    return Benchmark(
        name=name,
        title=config.get("group_alias") or config.get("task_alias") or name,
        tasks=tasks,
        metric=metric,
        filter=filter_name if isinstance(filter_name, str) else filter_name[0],
        paper=(paper["baseline"], paper["attnres"]) if paper else None,
    )
