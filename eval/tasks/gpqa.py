"""Order GPQA's choices by a shuffle that depends on the question alone, so that every reading gives the same."""

import random

from lm_eval.tasks.gpqa.n_shot.utils import preprocess


ANSWERS = ("Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")


def with_choices(dataset):
    """Add `choice1` … `choice4` and `answer`, one of (A) … (D), to each question of a `datasets.Dataset`."""

    def choose(question: dict) -> dict:
        columns = list(ANSWERS)
        random.Random(question["Question"]).shuffle(columns)
        choices = {f"choice{i}": preprocess(question[column]) for i, column in enumerate(columns, 1)}
        return choices | {"answer": f"({'ABCD'[columns.index('Correct Answer')]})"}

    return dataset.map(choose)
