# SPDX-License-Identifier: Apache-2.0
"""Documents of a task for lm-eval, made from a seed instead of downloaded."""

import random

from datasets import Dataset

from tests.accuracy.texts import document

COUNT = 40
SHORTEST, LONGEST = 40, 290  # characters before the question; the training texts have up to 304


def documents(task: str, count: int = COUNT, **_) -> dict[str, Dataset]:
    rng = random.Random(f"documents of {task}")
    found = [document(rng, task, rng.randint(SHORTEST, LONGEST)) for _ in range(count)]
    return {"test": Dataset.from_list(found)}
