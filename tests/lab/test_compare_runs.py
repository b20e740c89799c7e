"""rllm_lightning.lab.compare: run folders, measures of a run, groups and their seeds."""

import json
import math

import numpy as np
import pytest
import yaml

from rllm_lightning.lab.compare.groups import NOT_SET, make_groups, shared_seeds, value_of
from rllm_lightning.lab.compare.measures import NEVER, Curve, Metric, Reach, check_metric, curve_of, reach
from rllm_lightning.lab.compare.runs import find_runs, read_run
from tests.lab.made_runs import ESTIMATOR, METRIC, make_run

# ------------------------------------------------------------------------------------------------------------------- folders


def test_runs_are_found_one_by_one_and_below_a_root_each_once(tmp_path):
    a, b = make_run(tmp_path / "sweep" / "project" / "a"), make_run(tmp_path / "sweep" / "b")
    assert find_runs([tmp_path]) == find_runs([b, a, tmp_path / "sweep"]) == sorted([a, b])


def test_the_config_that_wandb_keeps_inside_a_run_is_no_run(tmp_path):
    run = make_run(tmp_path / "run")
    make_run(run / "wandb" / "inner")
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "config.yaml").write_text("learning_rate: 1\n")
    assert find_runs([tmp_path]) == [run]


def test_a_path_without_runs_is_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match=r"nothing: not a folder"):
        find_runs([tmp_path / "nothing"])
    with pytest.raises(ValueError, match="no run folder here or below"):
        find_runs([tmp_path])


def test_a_broken_file_is_named(tmp_path):
    run = make_run(tmp_path / "run", values={0: 0.2}, questions=["a"])
    (run / "episodes" / "val_step_0.jsonl").write_text("{\n")
    with pytest.raises(ValueError, match=r"val_step_0.jsonl: not a file of episodes"):
        read_run(run)
    (run / "summary.json").write_text("[]")
    with pytest.raises(ValueError, match=r"summary.json: not the summary of a run"):
        read_run(run)
    (run / "config.yaml").write_text("a: [")
    with pytest.raises(ValueError, match=r"config.yaml: cannot be read"):
        find_runs([tmp_path])


def test_a_run_that_never_began_has_no_summary_and_no_metrics(tmp_path):
    run = read_run(make_run(tmp_path / "run", status=None))
    assert (run.status, run.loss, run.rows, run.last_step) == ("unknown", None, [], 0)


def test_questions_are_the_same_in_any_order_and_other_tasks_are_others(tmp_path):
    first, second, third = (
        read_run(make_run(tmp_path / name, questions=questions)).questions
        for name, questions in {"a": ["x", "y"], "b": ["y", "x"], "c": ["x", "z"]}.items()
    )
    assert first == second != third


# ------------------------------------------------------------------------------------------------------------------ measures


def curve(values, sign=1, steps=(0, 2, 6)):
    steps = np.array(steps)
    return Curve(steps, np.array(values), 2.0 * steps, 0.5 * steps, sign)


def test_the_measures_of_a_curve_are_worked_out_by_hand():
    # trapezoids: 2 steps of mean .4 and 4 of mean .5 make 2.8, over 6 steps
    found = curve([0.2, 0.6, 0.4])
    assert (found.final, found.best, found.auc) == (0.4, 0.6, pytest.approx(2.8 / 6))


def test_the_best_of_a_smaller_is_better_metric_is_the_smallest():
    assert curve([0.2, 0.1, 0.4], sign=-1).best == 0.1


def test_a_curve_of_one_point_is_that_point_and_of_none_nothing():
    one, none = curve([0.3], steps=[4]), curve([], steps=[])
    assert (one.final, one.best, one.auc) == (0.3, 0.3, 0.3)
    assert all(map(math.isnan, (none.final, none.best, none.auc)))


def test_a_last_value_that_is_no_number_is_not_replaced_by_an_earlier_one():
    found = curve([0.2, 0.6, math.nan])
    assert found.best == 0.6
    assert math.isnan(found.final)
    assert math.isnan(found.auc)


def test_the_threshold_is_reached_at_the_first_step_that_is_as_good():
    assert reach(curve([0.2, 0.6, 0.7]), 0.6) == Reach(2, 4, 1)
    assert reach(curve([0.2, 0.6, 0.7]), 0.8) == NEVER
    assert reach(curve([0.9, 0.6, 0.5], sign=-1), 0.6) == Reach(2, 4, 1)
    assert reach(curve([0.2, math.nan, 0.7]), 0.6) == Reach(6, 12, 3)


def test_a_curve_holds_what_had_been_spent(tmp_path):
    run = read_run(make_run(tmp_path / "run", values={0: 0.2, 3: 0.5}))
    found = curve_of(run, Metric())
    assert found.steps.tolist() == [0, 3]
    assert found.samples.tolist() == [0, 6]  # 3 steps of 2
    assert found.seconds.tolist() == [0, 1.5]


@pytest.mark.parametrize(("status", "steps"), [("failed", []), ("running", []), ("done", [0])])
def test_a_run_that_broke_off_before_its_first_step_has_no_curve(tmp_path, status, steps):
    run = read_run(make_run(tmp_path / "run", values={0: 0.2}, status=status))
    assert curve_of(run, Metric()).steps.tolist() == steps


def test_a_run_with_several_sources_counts_their_mean_and_lacks_it_where_one_is_missing(tmp_path):
    run = read_run(make_run(tmp_path / "run", values={0: 0.2, 1: 0.4}))
    run.rows[0]["val/sums/pass@1"] = 0.6
    assert curve_of(run, Metric()).values.tolist() == [pytest.approx(0.4), pytest.approx(math.nan, nan_ok=True)]
    assert curve_of(run, Metric(METRIC)).values.tolist() == [0.2, 0.4]


def test_a_metric_that_no_run_has_is_refused_with_those_there_are(tmp_path):
    run = read_run(make_run(tmp_path / "run", metric="reward/solver/mean", values={1: 0.5}))
    with pytest.raises(ValueError, match=r"val/\*/pass@1: no run has this metric.*--metric: reward/solver/mean"):
        check_metric(Metric(), [run])


# -------------------------------------------------------------------------------------------------------------------- groups


def runs_of(tmp_path, *configs):
    return [read_run(make_run(tmp_path / str(k), **{"values": {0: 0.2, 1: 0.5}, **config})) for k, config in enumerate(configs)]


def test_runs_that_agree_in_all_keys_are_a_group(tmp_path):
    runs = runs_of(tmp_path, {"estimator": "rloo"}, {"estimator": "grpo"}, {"estimator": "rloo", "seed": 1})
    assert [(g.label, len(g.members)) for g in make_groups(runs, [ESTIMATOR], Metric())] == [("grpo", 1), ("rloo", 2)]


def test_the_label_of_several_keys_names_them_in_full_only_where_needed(tmp_path):
    (run,) = runs_of(tmp_path, {})
    (group,) = make_groups([run], [ESTIMATOR, "training.learning_rate"], Metric())
    assert group.label == "adv_estimator=grpo, learning_rate=1e-06"
    (group,) = make_groups([run], ["sampling.train.top_k", "sampling.val.top_k"], Metric())
    assert group.label == "sampling.train.top_k=0, sampling.val.top_k=0"


def test_a_value_may_be_a_whole_section_or_missing(tmp_path):
    runs = runs_of(tmp_path, {"rllm__algorithm__estimator_kwargs": {"k": 4}}, {})
    labels = [group.label for group in make_groups(runs, ["rllm.algorithm.estimator_kwargs"], Metric())]
    assert labels == ['{"k": 4}', "{}"]
    assert value_of({"a": {"b": 1}}, "a.c") == value_of({"a": 1}, "a.b") == NOT_SET


def test_a_key_that_no_run_has_is_refused_with_the_nearest(tmp_path):
    runs = runs_of(tmp_path, {})
    with pytest.raises(ValueError, match=r"no run has this key; did you mean rllm.algorithm.adv_estimator"):
        make_groups(runs, ["rllm.algorithm.adv_estimatr"], Metric())
    with pytest.raises(ValueError, match="a comparison is over seeds"):
        make_groups(runs, ["seed"], Metric())


def test_runs_of_one_seed_are_one_value_their_mean(tmp_path):
    runs = runs_of(tmp_path, {"values": {0: 0.2, 1: 0.4}}, {"values": {0: 0.2, 1: 0.8}}, {"seed": 3, "values": {0: 0.2, 1: math.nan}})
    (group,) = make_groups(runs, [ESTIMATOR], Metric())
    assert group.values("final") == {0: pytest.approx(0.6)}
    assert group.reaches(0.5) == {0: NEVER, 3: NEVER}  # one of the two runs of seed 0 never reached it


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ([0, 1, 2], [2, 1, 0], [0, 1, 2]),
        ([0, 1, 2, 3], [1, 2, 3], [1, 2, 3]),
        ([0, 1], [0, 1], []),  # two shared seeds leave one degree of freedom, two independent groups two
        ([0, 1, 2], [0, 1, 2, 3, 4, 5, 6], []),  # more than half of the larger group would be thrown away
        ([0, 1, 2], [3, 4, 5], []),
    ],
)
def test_groups_are_paired_where_they_share_enough_seeds(a, b, expected):
    assert shared_seeds(dict.fromkeys(a, 0.5), dict.fromkeys(b, 0.5)) == expected


def test_made_runs_are_what_a_run_writes(tmp_path):
    run = make_run(tmp_path / "run", values={0: 0.2})
    assert {"seed", "rllm", "task"} <= yaml.safe_load((run / "config.yaml").read_text()).keys()
    assert json.loads((run / "summary.json").read_text())["status"] == "done"
