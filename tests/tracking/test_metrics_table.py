import csv
import math
import signal
import subprocess
import sys
import tracemalloc

import numpy as np
import pytest
import torch

from rllm_lightning.tracking.metrics_table import MetricsReader, MetricsTable, as_numbers, read_metrics


@pytest.fixture
def path(tmp_path):
    return tmp_path / "metrics.csv"


def test_every_step_is_one_row_and_new_metrics_are_new_columns(path):
    table = MetricsTable(path)
    table.append(0, {"val/a": 0.5})
    table.append(1, {"reward": 1.0, "loss": 2})
    table.append(2, {"loss": 3, "val/a": 0.25})
    assert path.read_text() == "step,val/a,reward,loss\n0,0.5,,\n1,,1.0,2\n2,0.25,,3\n"
    assert read_metrics(path) == [{"step": 0, "val/a": 0.5}, {"step": 1, "reward": 1.0, "loss": 2}, {"step": 2, "loss": 3, "val/a": 0.25}]


def test_floats_come_back_to_the_last_bit(path):
    numbers = [0.1, 1 / 3, 1e-300, 5e-324, 1.7976931348623157e308, -0.0, float(np.float32(0.1)), 123456789.123456789, 2.0**53]
    table = MetricsTable(path)
    for step, number in enumerate(numbers):
        table.append(step, {"x": number})
    read = [row["x"] for row in read_metrics(path)]
    assert [n.hex() for n in read] == [n.hex() for n in numbers]


def test_nan_and_infinities_are_defined(path):
    MetricsTable(path).append(1, {"a": math.nan, "b": math.inf, "c": -math.inf})
    assert path.read_text().splitlines()[1] == "1,nan,inf,-inf"
    row = read_metrics(path)[0]
    assert math.isnan(row["a"])
    assert (row["b"], row["c"]) == (math.inf, -math.inf)


def test_keys_with_commas_and_quotes_survive(path):
    MetricsTable(path).append(0, {'val/a,"b"/pass@1': 1.0})
    assert read_metrics(path) == [{"step": 0, 'val/a,"b"/pass@1': 1.0}]


def test_more_metrics_of_the_same_step_join_its_row(path):
    """B45: train and validation of step 2 on the same step."""
    table = MetricsTable(path)
    table.append(2, {"reward": 1.0})
    table.append(2, {"val/a": 0.5})
    assert read_metrics(path) == [{"step": 2, "reward": 1.0, "val/a": 0.5}]


def test_steps_never_go_backwards(path):
    """B45"""
    table = MetricsTable(path)
    table.append(3, {"a": 1.0})
    with pytest.raises(ValueError, match="step 2 come after those of step 3"):
        table.append(2, {"a": 1.0})


def test_a_resumed_run_keeps_the_rows_up_to_its_checkpoint_and_goes_on(path):
    table = MetricsTable(path)
    for step in range(5):
        table.append(step, {"x": step / 3})
    before = path.read_text().splitlines()
    again = MetricsTable(path)
    again.truncate_after(2)
    again.append(3, {"y": 1.0})
    lines = path.read_text().splitlines()
    assert [line.split(",")[:2] for line in lines[:4]] == [line.split(",") for line in before[:4]]
    assert [row["step"] for row in read_metrics(path)] == [0, 1, 2, 3]


def test_truncating_a_table_that_does_not_exist_makes_none(path):
    MetricsTable(path).truncate_after(0)
    assert not path.exists()


def test_an_unfinished_last_line_is_dropped_and_the_table_goes_on(path):
    path.write_text("step,x\n0,0.5\n1,0.12")
    assert read_metrics(path) == [{"step": 0, "x": 0.5}]
    table = MetricsTable(path)
    table.append(1, {"x": 0.125})
    assert read_metrics(path) == [{"step": 0, "x": 0.5}, {"step": 1, "x": 0.125}]


def test_a_killed_process_leaves_every_row_it_had_appended(path):
    """The process is killed (no clean-up of any kind) right after row 2."""
    program = (
        "import os, signal, pathlib, sys\n"
        "from rllm_lightning.tracking.metrics_table import MetricsTable\n"
        "table = MetricsTable(pathlib.Path(sys.argv[1]))\n"
        "for step in range(3): table.append(step, {'x': step / 2})\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    ended = subprocess.run([sys.executable, "-c", program, str(path)])
    assert ended.returncode == -signal.SIGKILL
    assert read_metrics(path) == [{"step": 0, "x": 0.0}, {"step": 1, "x": 0.5}, {"step": 2, "x": 1.0}]


def test_scalars_of_numpy_and_torch_are_numbers():
    numbers = as_numbers(
        {"a": np.float32(0.5), "b": np.int64(3), "c": np.bool_(True), "d": torch.tensor(0.25), "e": True, "f": np.array(2.0)}
    )
    assert numbers == {"a": 0.5, "b": 3, "c": 1, "d": 0.25, "e": 1, "f": 2.0}
    assert {type(value) for value in numbers.values()} == {int, float}


@pytest.mark.parametrize("value", ["0.5", None, [1.0], np.zeros(2)])
def test_what_is_not_one_number_is_refused_by_its_key(value):
    """B43: text and missing objectives never reach an optimiser."""
    with pytest.raises(ValueError, match="metric 'val/x'"):
        as_numbers({"val/x": value})


def test_any_csv_reader_sees_a_rectangle(path):
    table = MetricsTable(path)
    table.append(0, {"a": 1.0})
    table.append(1, {"b": 1.0})
    table.append(2, {"a": 1.0})
    with path.open(newline="") as file:
        assert {len(row) for row in csv.reader(file)} == {3}


def test_a_file_of_something_else_is_named(path):
    path.write_text("epoch,loss\n1,2\n")
    with pytest.raises(ValueError, match=r"metrics\.csv"):
        read_metrics(path)


def test_a_reader_follows_a_table_as_it_grows_and_as_it_is_written_anew(path):
    """Rows that are appended, a metric that joins (a new file), a row that is still being written, steps that a resumed run does again."""
    reader = MetricsReader(path)
    assert reader.read() == []
    table = MetricsTable(path)
    for step in range(3):
        table.append(step, {"a": step / 2})
        assert reader.read() == read_metrics(path)
    table.append(2, {"b": 1.0})
    assert reader.read() == read_metrics(path)
    with path.open("a") as file:
        file.write("3,0.7")
    assert [row["step"] for row in reader.read()] == [0, 1, 2]
    table = MetricsTable(path)
    table.truncate_after(0)
    table.append(1, {"a": 9.0, "b": 2.0})
    assert reader.read() == [{"step": 0, "a": 0.0}, {"step": 1, "a": 9.0, "b": 2.0}]


def test_a_reader_does_not_read_again_what_it_has_read(path):
    """What stands before the last row it read is not looked at: it may be anything."""
    reader, table = MetricsReader(path), MetricsTable(path)
    for step in range(3):
        table.append(step, {"a": 0.5})
    reader.read()
    path.write_bytes(path.read_bytes().replace(b"0,0.5\n", b"?,?.?\n", 1))
    table.append(3, {"a": 0.25})
    assert [row["a"] for row in reader.read()] == [0.5, 0.5, 0.5, 0.25]


def test_a_long_table_is_read_in_little_more_memory_than_its_rows_take(path):
    """3,000 steps of 40 metrics are 2.4 MB of text: beside it and its bytes nothing of that size is held while it is read."""
    columns = [f"area/metric{i}" for i in range(40)]
    lines = [",".join([str(step), *(repr(math.sin(step + i)) for i in range(40))]) for step in range(3_000)]
    path.write_text("\n".join([",".join(["step", *columns]), *lines, ""]))
    tracemalloc.start()
    try:
        rows = read_metrics(path)
        kept, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (len(rows), rows[-1]["area/metric39"]) == (3_000, math.sin(2_999 + 39))
    assert peak - kept < 2.5 * path.stat().st_size
    table = MetricsTable(path)
    table.append(3_000, {"new": 1.0})
    assert read_metrics(path)[-2:] == [rows[-1], {"step": 3_000, "new": 1.0}]
