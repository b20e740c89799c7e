"""Tasks from a Hugging Face data set (package datasets): of the hub, or a local folder. What a row may hold stands in `rows.py`.

task.name=huggingface task.path=openai/gsm8k task.subset=main task.val_split=test[:200] task.answer_pattern='#### (.*)'
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rllm_lightning.registry import register_task
from rllm_lightning.tasks.rows import Answering, RowFile, make_task_set
from rllm_lightning.tasks.scoring import Extract
from rllm_lightning.tasks.task import TaskSet


@register_task("huggingface")
def huggingface(
    seed: int,
    *,
    path: str,
    subset: str | None = None,
    train_split: str = "train",
    val_split: str | None = None,
    val_fraction: float = 0.0,
    columns: dict[str, str] | None = None,
    answer_pattern: str = "",
    scorer: str = "exact",
    scorer_args: dict[str, Any] | None = None,
    extract: Extract = "response",
    instruction: str = "",
) -> TaskSet:
    """Tasks from a Hugging Face data set.

    Args:
        seed, val_fraction: see `rows.make_task_set`.
        path: name on the hub, folder of data files (JSON Lines, CSV, Parquet), or folder that `save_to_disk` wrote.
        subset: configuration of the data set, where it has several.
        train_split, val_split: such as `train`, or a part of it (`train[:500]`).
        columns, answer_pattern, scorer, scorer_args, extract, instruction: see `rows.Answering`.

    Raises:
        ValueError: the package or the data set is not there, it has malformed rows (each named by split and row, from 0), or nothing
            is left to train on.
    """
    if val_split and val_fraction:
        raise ValueError("task.val_split, task.val_fraction: give one of them")
    answering = Answering(columns, answer_pattern, scorer, scorer_args, extract, instruction)
    val = _rows("val_split", path, subset, val_split) if val_split else None
    train = _rows("train_split", path, subset, train_split)
    return make_task_set(train, val, val_fraction, seed, answering, Path(path).name)


def _rows(key: str, path: str, subset: str | None, split: str) -> RowFile:
    try:
        import datasets
        from datasets.exceptions import DatasetsError
    except ImportError as error:
        raise ValueError("task.name: huggingface needs the package datasets: pip install 'rllm-lightning[datasets]'") from error
    try:
        saved = Path(path).expanduser() / "dataset_dict.json"
        data = datasets.load_from_disk(str(saved.parent))[split] if saved.is_file() else datasets.load_dataset(path, subset, split=split)
    except (OSError, ValueError, KeyError, DatasetsError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"task.path, task.subset, task.{key}: cannot load {split!r} of {path}: {type(error).__name__}: {reason}"
        ) from error
    return RowFile(key, f"{path} {split}", enumerate(data))
