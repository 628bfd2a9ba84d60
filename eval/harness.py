"""The private parts of lm-eval that this package needs, all here; tested with lm-eval 0.4.13.

The harness has no public way to ask what a name stands for without building it, or which filter a task reports first:

- `Kind`: whether an entry of `TaskManager.task_index` is a task, a group of tasks or a tag that tasks carry.
- `load_yaml`: a group's file with its includes and functions, which the index holds unresolved.
- `GROUP_FIELD_NAMES`: the fields of such a file that are the group's own; the others are set for each of its tasks.
- `first_filter`: reads `Task._filters`, in the order of the task's file.
"""

from lm_eval.api.task import Task
from lm_eval.tasks._factory import GROUP_FIELD_NAMES
from lm_eval.tasks._index import Kind
from lm_eval.tasks._yaml_loader import load_yaml


__all__ = ["GROUP_FIELD_NAMES", "Kind", "first_filter", "load_yaml"]


def first_filter(task: Task) -> str:
    """Return the name of the filter whose values a task reports first."""
    return task._filters[0].name
