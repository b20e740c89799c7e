"""The tasks of an environment of the package verifiers, for the workflow of the same name.

task.name=verifiers task.env_id=my-env rllm.workflow.name=verifiers rllm.workflow.workflow_args.env_id=my-env
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rllm_lightning.registry import register_task
from rllm_lightning.tasks.task import TaskSet
from rllm_lightning.types import to_plain
from rllm_lightning.workflows.verifiers_environment import INPUT_KEYS, load_environment


@register_task("verifiers")
def verifiers(
    seed: int,
    *,
    env_id: str,
    env_args: dict[str, Any] | None = None,
    train_size: int | None = None,
    val_size: int | None = None,
) -> TaskSet:
    """The data sets of an environment: `dataset` to train on, `eval_dataset` to validate.

    A task holds the environment's own `prompt`, `answer`, `info`, `task` and `example_id`; its `data_source` is `task`. Answers are
    scored by the workflow `verifiers`, through the environment's rubric, and by nothing else.

    Args:
        seed: not used; the environment chooses its examples.
        env_id, env_args: as in `rllm.workflow.workflow_args`.
        train_size, val_size: the first so many examples (null: all). Without an `eval_dataset`, the last `val_size` of `dataset` are
            held back (null: none).

    Raises:
        ValueError: no such environment or package, an environment without `dataset`, or fewer examples than are asked for.
    """
    if train_size is not None and train_size < 1:
        raise ValueError(f"task.train_size: must be at least 1 (null: all), got {train_size}")
    if val_size is not None and val_size < 0:
        raise ValueError(f"task.val_size: must be at least 0 (null: all of eval_dataset), got {val_size}")
    environment = load_environment(env_id, env_args, "task")
    train, val = environment.build_dataset(), environment.build_eval_dataset()
    if train is None:
        raise ValueError(f"task.env_id: the environment {env_id!r} has no dataset to train on")
    examples = list(train)
    if val is None:
        held_back = len(examples) - (val_size or 0)
        if held_back < 1:
            raise ValueError(f"task.val_size: {val_size} of {len(examples)} examples leave none to train on")
        examples, val_examples = examples[:held_back], examples[held_back:]
    else:
        val_examples = _first(val, val_size, "val_size")
    return TaskSet(_tasks(_first(examples, train_size, "train_size"), "train", env_id), _tasks(val_examples, "val", env_id), _unscored)


def _first(examples: Iterable[Mapping[str, Any]], size: int | None, key: str) -> list[Mapping[str, Any]]:
    rows = list(examples)
    if size is not None and size > len(rows):
        raise ValueError(f"task.{key}: {size}, but the environment has {len(rows)} examples for it")
    return rows[:size]


def _tasks(examples: Iterable[Mapping[str, Any]], part: str, env_id: str) -> list[dict[str, Any]]:
    return [_task(f"{env_id}:{part}:{position}", example) for position, example in enumerate(examples)]


def _task(task_id: str, example: Mapping[str, Any]) -> dict[str, Any]:
    inputs = {key: to_plain(example[key]) for key in INPUT_KEYS if example.get(key) is not None}
    # rows of one data set have the same keys in every message, None where one has no use for it
    messages = [{key: value for key, value in message.items() if value is not None} for message in inputs["prompt"]]
    return {"answer": None} | inputs | {"id": task_id, "prompt": messages, "messages": messages, "data_source": str(inputs["task"])}


def _unscored(task: dict[str, Any], response: str) -> float:
    raise ValueError("rllm.workflow.name: the tasks of task.name=verifiers are scored by the workflow verifiers, through the rubric")
