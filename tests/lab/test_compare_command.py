"""experiments/compare.py: exit codes, what it writes, and that nothing from a run reaches the page as markup."""

import base64
import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from experiments import compare as command
from rllm_lightning.lab.compare import compare_runs, comparison_page, coverage, figures_of, print_comparison
from tests.lab.html_page import Page
from tests.lab.made_runs import ESTIMATOR, make_run, make_sweep
from tests.tracking.offline import offline_run, records, values

ROOT = Path(__file__).parents[2]
ENDS = {"rloo": [0.80, 0.86, 0.82], "grpo": [0.70, 0.74, 0.73], "opo": [0.75, 0.70, 0.78]}
EVIL = '<script>alert("$x$")</script>_'


def test_it_runs_as_a_command_and_says_the_most_important_first(tmp_path):
    make_sweep(tmp_path / "project", ENDS)
    argv = [sys.executable, "experiments/compare.py", str(tmp_path), "--by", ESTIMATOR]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == f"{ESTIMATOR}: 3 groups, 9 runs, seeds 0-2 · final val/spell/pass@1"
    assert lines[1].startswith("  - rloo is better than grpo by 0.103 [")
    assert "Student's t" in done.stdout
    data = json.loads((tmp_path / "comparison.json").read_text(encoding="utf-8"))
    assert [group["label"] for group in data["groups"]] == ["rloo", "opo", "grpo"]
    assert (tmp_path / "comparison.html").read_text(encoding="utf-8").startswith("<!doctype html>")


def test_every_seed_is_shown(tmp_path, capsys):
    make_sweep(tmp_path, ENDS)
    assert command.main([str(tmp_path), "--by", ESTIMATOR, "--out", str(tmp_path / "out")]) == 0
    out = capsys.readouterr().out
    assert all(f"{value:.3f}" in out for values in ENDS.values() for value in values)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"comparison.json", "comparison.html", "figures"}
    assert {path.suffix for path in (tmp_path / "out" / "figures").iterdir()} == {".svg"}


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["EMPTY", "--by", ESTIMATOR], "no run folder here or below"),
        (["MISSING", "--by", ESTIMATOR], "not a folder"),
        (["RUNS", "--by", "rllm.algorithm.adv_estimatr"], "did you mean rllm.algorithm.adv_estimator?"),
        (["RUNS", "--by", ESTIMATOR, "--metric", "val/x"], "val/x: no run has this metric"),
        (["SILENT", "--by", ESTIMATOR], "the runs have none at all"),
        (["RUNS", "--by", ESTIMATOR, "--out", "RUNS/a/config.yaml/x"], "config.yaml"),
    ],
)
def test_a_mistake_exits_with_2_and_one_line(tmp_path, capsys, argv, message):
    (tmp_path / "EMPTY").mkdir()
    make_run(tmp_path / "RUNS" / "a", values={0: 0.2})
    make_run(tmp_path / "SILENT" / "a")
    paths = [str(tmp_path / word) if word.partition("/")[0] in ("EMPTY", "MISSING", "RUNS", "SILENT") else word for word in argv]
    assert command.main(paths) == 2
    err = capsys.readouterr().err
    assert message in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize("argv", [[], ["."], ["--by", ESTIMATOR]])
def test_a_command_line_that_lacks_something_exits_with_2(argv, capsys):
    with pytest.raises(SystemExit) as stop:
        command.main(argv)
    assert stop.value.code == 2
    assert "a config key with --by (not needed for a folder of sweep.py" in capsys.readouterr().err


def sweep_folder(folder, parameters):
    """A folder as sweep.py leaves it: its YAML, and below it the runs."""
    make_sweep(folder / "trials" / "0001" / "project", ENDS)
    (folder / "sweep.yaml").write_text(yaml.safe_dump({"method": "grid", "parameters": parameters}))
    return folder


@pytest.mark.parametrize("below", ["", "trials/0001"])
def test_the_runs_of_a_sweep_are_compared_by_the_keys_that_vary(tmp_path, capsys, below):
    nested = {"training": {"parameters": {"learning_rate": {"value": 0.1}}}}
    sweep_folder(tmp_path, {ESTIMATOR: {"values": list(ENDS)}, "seed": {"values": [0, 1, 2]}, **nested})
    assert command.main([str(tmp_path / below)]) == 0
    assert capsys.readouterr().out.startswith(f"{ESTIMATOR}: 3 groups, 9 runs, seeds 0-2")


def test_several_keys_of_a_sweep_and_those_of_several_sweeps_are_all_taken(tmp_path):
    nested = {"training": {"parameters": {"learning_rate": {"min": 0.1, "max": 0.2}}}}
    a = sweep_folder(tmp_path / "a", {ESTIMATOR: {"values": list(ENDS)}, **nested})
    b = sweep_folder(tmp_path / "b", {ESTIMATOR: {"values": list(ENDS)}, "data.seed": {"values": [0, 1]}})
    assert command.parse([str(a), str(b)]).by == [ESTIMATOR, "training.learning_rate", "data.seed"]
    assert command.parse([str(a), "--by", "model.name"]).by == ["model.name"]


@pytest.mark.parametrize(
    ("text", "message"),
    [("parameters: {seed: {values: [0, 1]}}", "a config key with --by"), ("a: [", "not the YAML of a sweep"), ("[]", "not the YAML")],
)
def test_a_sweep_that_varies_nothing_but_the_seed_or_cannot_be_read_says_so(tmp_path, capsys, text, message):
    (sweep_folder(tmp_path, {}) / "sweep.yaml").write_text(text)
    with pytest.raises(SystemExit) as stop:
        command.main([str(tmp_path)])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("named", "home"),
    [(["."], "."), (["project"], "project"), (["project/grpo-0"], "project"), (["project/grpo-0", "project/rloo-0"], "project")],
)
def test_the_files_are_written_into_the_one_folder_that_is_named_unless_it_is_a_run(tmp_path, named, home):
    make_sweep(tmp_path / "project", ENDS)
    assert command.main([*(str(tmp_path / name) for name in named), "--by", ESTIMATOR]) == 0
    assert [path.parent for path in tmp_path.rglob("comparison.html")] == [tmp_path / home]


# --------------------------------------------------------------------------------------------------------------------- page


def pictures(page):
    sources = [attributes["src"] for tag, attributes in Page(page).elements if tag == "img"]
    assert all(source.startswith("data:image/svg+xml;base64,") for source in sources)
    return [base64.b64decode(source.partition(",")[2]).decode("utf-8") for source in sources]


@pytest.fixture
def evil(tmp_path):
    """Names that are markup, mathematics, and hidden to legends."""
    make_sweep(tmp_path, {"plain": ENDS["rloo"]})
    for seed in range(3):
        make_run(tmp_path / f"evil{seed}", seed=seed, estimator=f"_{EVIL}", values={0: 0.2, 4: 0.1 * seed}, metric="val/a$b$<b>/pass@1")
        (tmp_path / f"evil{seed}").rename(tmp_path / f"<i>{seed}")
    return tmp_path


def test_what_comes_from_runs_is_text_on_the_page(evil):
    page = comparison_page(compare_runs([evil], [ESTIMATOR]))
    tags = {tag for tag, _ in Page(page).elements}
    assert not tags & {"script", "b", "i", "iframe", "link"}
    assert "&lt;script&gt;" in page
    figures = pictures(page)
    assert len(figures) == 4
    for figure in figures:
        assert not [element for element in ET.fromstring(figure).iter() if element.tag.endswith("script")]
    assert f"_{EVIL}" in "".join(ET.fromstring(figures[0]).itertext())  # in the legend, letter by letter


def test_the_page_needs_nothing_else(evil):
    page = comparison_page(compare_runs([evil], [ESTIMATOR]))
    assert "default-src 'none'" in page
    assert not re.search(r'(src|href)="(?!data:)', page)


def test_the_page_is_the_same_when_made_again(tmp_path):
    make_sweep(tmp_path, ENDS)
    assert comparison_page(compare_runs([tmp_path], [ESTIMATOR])) == comparison_page(compare_runs([tmp_path], [ESTIMATOR]))


def test_every_group_stands_in_the_terminal_as_it_is_named(evil, capsys):
    print_comparison(compare_runs([evil], [ESTIMATOR]), Console(width=400))
    assert f"_{EVIL}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("ends", "num_figures"),
    [({"rloo": [0.8]}, 3), ({"rloo": [0.8, 0.8], "grpo": [0.8, 0.8]}, 4), ({f"a long name {k}": [0.1 * k, 0.2] for k in range(1, 15)}, 4)],
)
def test_figures_are_drawn_of_one_seed_of_equal_values_and_of_many_groups(tmp_path, ends, num_figures):
    make_sweep(tmp_path, ends)
    assert len(figures_of(compare_runs([tmp_path], [ESTIMATOR]))) == num_figures


def test_without_any_value_there_is_a_page_and_no_figure(tmp_path):
    make_run(tmp_path / "run", values={0: float("nan")})
    comparison = compare_runs([tmp_path], [ESTIMATOR])
    assert figures_of(comparison) == []
    assert "without a final value" in comparison_page(comparison)


# ---------------------------------------------------------------------------------------------------------- W&B, coverage


def test_a_wandb_run_holds_the_tables_and_the_page(tmp_path, capsys):
    make_sweep(tmp_path, ENDS)
    assert command.main([str(tmp_path), "--by", ESTIMATOR, "--wandb"]) == 0
    rows, exit_code = offline_run(tmp_path / "wandb")
    assert exit_code == 0
    logged = {key for row in rows for key in row}
    assert {"groups", "pairs", "every_seed", "page"} <= {key.partition(".")[0] for key in logged}
    summary = {}
    for record in records(tmp_path / "wandb", "summary"):
        summary |= values(record.update)
    assert summary["group/rloo/final"] == pytest.approx(0.8266666)
    assert summary["pair/rloo-grpo/verdict"] == "told apart"


def test_the_coverage_is_printed_for_every_distribution(capsys, monkeypatch):
    monkeypatch.setattr(coverage, "NUM_TRUTH", 1_000)
    coverage.print_coverage(Console(width=300), num=20)
    out = capsys.readouterr().out
    assert out.count("heavy tails") == 5
