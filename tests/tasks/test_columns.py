"""Rows under other names, from JSON Lines, Parquet and Hugging Face data sets: one mapping, the same tasks, the same errors."""

import datetime
import json
import logging
import sys

import pytest

from rllm_lightning.registry import TASKS
from rllm_lightning.tasks.huggingface import huggingface
from rllm_lightning.tasks.jsonl import jsonl
from rllm_lightning.tasks.parquet import parquet

ROWS = [
    {"problem": "6 * 7?", "worked": "6 * 7 = 42 #### 42", "uid": "a", "level": 1},
    {"problem": "2 + 3?", "worked": "2 + 3 = 5 #### 5", "uid": "b", "level": 2},
]
MAPPING = {"question": "problem", "answer": "worked", "id": "uid"}


def save_jsonl(folder, rows):
    file = folder / "sums.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"train_file": str(file)}, f"{file}:2"


def save_parquet(folder, rows):
    import pyarrow
    import pyarrow.parquet

    file = folder / "sums.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    return {"train_file": str(file)}, f"{file}: row 1"


def save_dataset(folder, rows):
    """A folder as `save_to_disk` writes it."""
    import datasets

    datasets.DatasetDict({"train": datasets.Dataset.from_list(rows)}).save_to_disk(folder / "sums")
    return {"path": str(folder / "sums")}, f"{folder / 'sums'} train: row 1"


def save_data_files(folder, rows):
    """A folder of data files, as the hub holds them."""
    (folder / "sums").mkdir()
    save_parquet(folder / "sums", rows)
    (folder / "sums" / "sums.parquet").rename(folder / "sums" / "train-0.parquet")
    return {"path": str(folder / "sums")}, f"{folder / 'sums'} train: row 1"


SOURCES = [(jsonl, save_jsonl), (parquet, save_parquet), (huggingface, save_dataset), (huggingface, save_data_files)]


@pytest.fixture(params=SOURCES, ids=lambda source: source[1].__name__)
def source(request, tmp_path):
    """A function (rows, **settings) -> task set, and where it says that the second row is."""
    maker, save = request.param
    place = {}

    def load(rows, **settings):
        where, place["second"] = save(tmp_path, rows)
        return maker(0, **where, **settings)

    return load, place


def test_columns_are_mapped_and_the_others_stay_in_the_task(source):
    load, _ = source
    task_set = load(ROWS, columns=MAPPING, scorer="numeric")
    assert task_set.train == [
        {
            "data_source": "sums",
            "level": row["level"],
            "question": row["problem"],
            "answer": row["worked"],
            "id": f"sums:train:{row['uid']}",
            "solution": row["worked"],
        }
        for row in ROWS
    ]
    assert [task_set.reward_function(task_set.train[0], text) for text in ("42", "41")] == [1.0, 0.0]


def test_a_pattern_takes_the_answer_out_of_its_column(source):
    """As in GSM8K: the worked solution is taught, the number behind it is the answer."""
    load, _ = source
    columns = MAPPING | {"solution": "worked"}
    task_set = load(ROWS, columns=columns, answer_pattern="#### (.*)", scorer="numeric", extract="last_number", val_fraction=0.5)
    (task,), (held_out,) = task_set.train, task_set.val
    assert {task["answer"], held_out["answer"]} == {"42", "5"}
    assert task["solution"].endswith(f"#### {task['answer']}")
    assert task_set.reward_function(task, task["solution"]) == 1.0


@pytest.mark.parametrize(
    ("columns", "change", "message"),
    [
        (MAPPING | {"answer": "target"}, {}, "task.columns.answer: there is no column 'target'; there are: "),
        ({"question": "problem"}, {}, "`answer` is missing or null; there are the columns "),
        (MAPPING, {"problem": " "}, "`question` must be text, got ' '"),
        (MAPPING, {"uid": "a"}, "the id 'a' stands in "),
    ],
)
def test_a_wrong_row_is_named_by_key_file_and_row(source, columns, change, message):
    load, place = source
    with pytest.raises(ValueError) as error:
        load([ROWS[0], ROWS[1] | change], columns=columns)
    (line,) = [line for line in str(error.value).splitlines() if place["second"] in line]
    key = line.split(":")[0]
    assert key in ("task.train_file", "task.train_split")
    assert line.startswith(f"{key}: {place['second']}: {message}")


def test_a_part_that_no_task_has_is_refused(source):
    load, _ = source
    with pytest.raises(ValueError, match=r"task\.columns\.questoin: a task has no such part; there are question, answer, id"):
        load(ROWS, columns={"questoin": "problem"})


def test_a_pattern_that_is_not_found_names_the_row(source):
    load, place = source
    with pytest.raises(ValueError) as error:
        load([ROWS[0], ROWS[1] | {"worked": "5"}], columns=MAPPING, answer_pattern="#### (.*)")
    assert str(error.value).endswith(f"{place['second']}: task.answer_pattern: '#### (.*)' is not found in the answer '5'")


def test_columns_that_json_cannot_hold_are_left_out_with_a_warning(tmp_path, caplog):
    where, _ = save_parquet(tmp_path, [ROWS[0] | {"made": datetime.date(2026, 11, 30), "picture": b"\x00"}])
    with caplog.at_level(logging.WARNING):
        (task,) = parquet(0, **where, columns=MAPPING).train
    assert json.loads(json.dumps(task)) == task
    assert "level" in task
    assert "the columns made, picture hold what JSON cannot" in caplog.text


def test_a_split_validates(tmp_path):
    import datasets

    parts = {"train": datasets.Dataset.from_list(ROWS), "test": datasets.Dataset.from_list([ROWS[1]])}
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "sums")
    task_set = huggingface(0, path=str(tmp_path / "sums"), val_split="test", columns=MAPPING)
    assert [task["question"] for task in task_set.train] == ["6 * 7?"]  # the other is asked in validation
    assert [task["id"] for task in task_set.val] == ["sums:val:b"]


def test_a_split_that_is_not_there_is_named(tmp_path):
    for save in (save_dataset, save_data_files):
        folder = tmp_path / save.__name__
        folder.mkdir()
        where, _ = save(folder, ROWS)
        with pytest.raises(ValueError, match=r"task\.path, task\.subset, task\.train_split: cannot load 'tst' of .*sums"):
            huggingface(0, **where, train_split="tst")


def test_a_data_set_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"task\.path, .*: cannot load 'train' of .*nowhere"):
        huggingface(0, path=str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match=r"task\.train_file: cannot read .*nowhere\.parquet"):
        parquet(0, train_file=str(tmp_path / "nowhere.parquet"))


def test_a_file_that_is_no_parquet_is_named(tmp_path):
    (tmp_path / "x.parquet").write_text("question,answer\n")
    with pytest.raises(ValueError, match=r"task\.train_file: cannot read .*x\.parquet"):
        parquet(0, train_file=str(tmp_path / "x.parquet"))


@pytest.mark.parametrize(("name", "package"), [("parquet", "pyarrow"), ("huggingface", "datasets")])
def test_without_the_package_the_extra_is_named(monkeypatch, name, package):
    monkeypatch.setitem(sys.modules, package, None)
    first = {"train_file": "x"} if name == "parquet" else {"path": "x"}
    with pytest.raises(ValueError, match=rf"task\.name: {name} needs the package {package}: pip install 'rllm-lightning\[datasets\]'"):
        TASKS.get(name)(0, **first)
