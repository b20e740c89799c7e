"""rllm_lightning.lab.compare: what is said about groups of runs, and what is warned of."""

import json
import math

import pytest

import rllm_lightning.lab
import rllm_lightning.lab.compare as compare
from rllm_lightning.lab.compare import compare_runs, comparison_data
from tests.lab.made_runs import ESTIMATOR, make_run, make_sweep

# the last values of five seeds
APART = {"rloo": [0.80, 0.86, 0.82, 0.84, 0.83], "grpo": [0.70, 0.74, 0.73, 0.73, 0.74]}
ALIKE = {"rloo": [0.80, 0.86, 0.82, 0.84, 0.83], "grpo": [0.85, 0.80, 0.84, 0.78, 0.86]}
EQUAL = {"rloo": [0.800, 0.860, 0.820, 0.840, 0.830], "grpo": [0.801, 0.859, 0.822, 0.839, 0.828]}


def compared(tmp_path, **keywords):
    return compare_runs([tmp_path], [ESTIMATOR], **keywords)


def test_every_exported_name_exists():
    for package in (rllm_lightning.lab, compare):
        for name in package.__all__:
            assert getattr(package, name) is vars(package)[name]


# --------------------------------------------------------------------------------------------------------------- conclusions


def test_groups_that_differ_are_told_apart(tmp_path):
    found = compared(make_sweep(tmp_path, APART))
    assert [result.label for result in found.groups] == ["rloo", "grpo"]
    # differences .10 .12 .09 .11 .09: mean .102, sd .0130384, half width 2.776445 * .0130384 / sqrt(5) = .0161893
    assert found.pairs[0].difference == pytest.approx((0.102, 0.0858107, 0.1181893), abs=1e-6)
    assert found.conclusions == ["rloo is better than grpo by 0.102 [0.086, 0.118] (p < 0.001; 5 shared seeds)."]
    assert found.caveats == []


def test_groups_that_cannot_be_told_apart_are_told_how_many_seeds_it_takes(tmp_path):
    (sentence,) = compared(make_sweep(tmp_path, ALIKE)).conclusions
    assert sentence.startswith("rloo and grpo cannot be told apart with 5 shared seeds: difference 0.004 [")
    needed = compared(tmp_path).pairs[0].needed
    assert sentence.endswith(f"About {needed} seeds would be needed to see a difference of 0.03 in 80% of the cases.")
    assert compared(tmp_path, difference=0.1).pairs[0].needed < needed


def test_groups_whose_interval_lies_within_what_matters_are_about_equal(tmp_path):
    (sentence,) = compared(make_sweep(tmp_path, EQUAL)).conclusions
    assert sentence.startswith("rloo and grpo are about equal")
    assert "is below 0.03 either way" in sentence
    assert "cannot be told apart" in compared(tmp_path, difference=0.0005).conclusions[0]


def test_to_be_about_equal_is_corrected_for_many_comparisons_too(tmp_path):
    found = compared(make_sweep(tmp_path, {**EQUAL, **{str(k): [0.1 * k, 0.5, 0.2 * k, 0.3, 0.7] for k in range(8)}}), difference=0.0031)
    pair = found.pair("rloo", "grpo")
    # d = -.001 .001 -.002 .001 .002: within .0031 alone (mean .0002, half width .0020), not so surely among 45 pairs
    assert -0.0031 < pair.difference.low < pair.difference.high < 0.0031
    assert pair.p_equal > 0.05


def test_where_smaller_is_better_the_smaller_is_better(tmp_path):
    found = compared(make_sweep(tmp_path, APART), smaller_is_better=True)
    assert found.conclusions[0].startswith("grpo is better than rloo by 0.102 [0.086, 0.118]")
    assert found.pairs[0].improvement.value > 0.99
    assert (found.pairs[0].wins, found.pairs[0].chances) == (5, 5)


def test_two_seeds_conclude_nothing(tmp_path):
    found = compared(make_sweep(tmp_path, {name: values[:2] for name, values in APART.items()}))
    assert found.conclusions == ["rloo and grpo: 2 and 2 seeds are too few to conclude anything; the means differ by 0.110."]
    assert found.caveats == ["fewer than 3 seeds, too few to conclude anything from: rloo (2), grpo (2)"]


def test_one_seed_has_values_and_no_intervals(tmp_path):
    found = compared(make_sweep(tmp_path, {"rloo": [0.8], "grpo": [0.7]}))
    summary = found.groups[0].summaries["final"]
    assert (summary.mean.value, summary.interquartile_mean.value) == (0.8, 0.8)
    assert math.isnan(summary.mean.low)
    assert math.isnan(found.pairs[0].p_holm)


def test_many_comparisons_are_corrected_and_summed_up(tmp_path):
    found = compared(make_sweep(tmp_path, {**APART, "maxrl": ALIKE["grpo"], "opo": EQUAL["grpo"]}))
    assert found.conclusions[0] == "Of 6 pairs: 3 told apart, 1 about equal, 2 undecided."
    assert "after Holm's correction for 6 comparisons" in found.conclusions[1]
    assert all(pair.p_holm >= pair.p for pair in found.pairs)


def test_a_single_interval_without_zero_among_many_is_no_finding(tmp_path):
    # differences .01 .02 .03 .02 .00 against a: p = .034 alone, .10 after Holm's correction for three
    ends = {"a": [0.5, 0.6, 0.5, 0.6, 0.5], "b": [0.51, 0.62, 0.53, 0.62, 0.50], "c": [0.55, 0.53, 0.58, 0.52, 0.57]}
    pair = compared(make_sweep(tmp_path, ends)).pair("a", "b")
    assert pair.p < 0.05 < pair.p_holm
    sentence = next(s for s in compared(tmp_path).conclusions if s.startswith("b and a"))
    assert "cannot be told apart" in sentence
    assert "among so many comparisons" in sentence


def test_one_group_is_compared_with_nothing(tmp_path):
    found = compared(make_sweep(tmp_path, {"rloo": APART["rloo"]}))
    assert found.conclusions == ["There is one group only: nothing to compare it with."]
    assert found.pairs == []


def test_equal_values_in_all_seeds_have_no_interval_and_are_warned_of(tmp_path):
    found = compared(make_sweep(tmp_path, {"rloo": [0.8] * 5, "grpo": [0.7] * 5}))
    assert found.pairs[0].p == 0.0625  # 2 of the 32 ways to flip signs
    assert found.conclusions == [
        "rloo and grpo cannot be told apart with 5 shared seeds: difference 0.100, the same in all seeds, p = 0.062. "
        "Without spread between the seeds nobody can say how many would be needed."
    ]
    assert found.caveats == [
        "rloo: all 5 seeds came to 0.800; without spread there is no interval",
        "grpo: all 5 seeds came to 0.700; without spread there is no interval",
    ]


def test_groups_without_shared_seeds_are_compared_as_independent(tmp_path):
    for seed, end in enumerate(APART["rloo"]):
        make_run(tmp_path / f"a{seed}", seed=seed, estimator="rloo", values={0: 0.2, 4: end})
        make_run(tmp_path / f"b{seed}", seed=seed + 10, estimator="grpo", values={0: 0.2, 4: APART["grpo"][seed]})
    found = compared(tmp_path)
    assert found.pairs[0].seeds == []
    assert (found.pairs[0].wins, found.pairs[0].chances) == (25, 25)
    assert "5 and 5 seeds" in found.conclusions[0]
    assert found.caveats == ["unequal seeds: rloo has 0-4, grpo has 10-14"]


# -------------------------------------------------------------------------------------------------- measures and thresholds


def test_the_default_threshold_is_half_way_to_the_best_group(tmp_path):
    found = compared(make_sweep(tmp_path, APART))
    assert found.threshold == pytest.approx((0.2 + 0.83) / 2)  # all begin at .2, rloo ends at .83 on average
    reach = found.groups[0].median_reach()
    assert (reach.step, reach.samples, reach.seconds) == (4, 8, 2)


def test_the_median_cost_is_never_where_most_seeds_never_reach_the_threshold(tmp_path):
    found = compared(make_sweep(tmp_path, APART), threshold=0.825)
    assert [math.isfinite(reach.step) for reach in found.groups[0].reaches.values()] == [False, True, False, True, True]
    assert found.groups[0].median_reach().step == 4
    assert found.groups[1].median_reach().step == math.inf


@pytest.mark.parametrize(("measure", "expected"), [("final", 0.5), ("best", 0.9), ("auc", 0.6)])
def test_the_compared_measure_can_be_chosen(tmp_path, measure, expected):
    make_run(tmp_path / "run", values={0: 0.1, 2: 0.9, 4: 0.5})  # trapezoids: (1.0 + 1.4) / 4
    found = compared(tmp_path, measure=measure)
    assert found.groups[0].summaries[measure].mean.value == pytest.approx(expected)
    assert any("luckiest" in caveat for caveat in found.caveats) == (measure == "best")


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"measure": "last"}, "measure: expected one of final, best, auc"),
        ({"difference": 0.0}, "difference: must be above 0"),
        ({"metric": "val/none"}, "val/none: no run has this metric"),
        ({"done_only": True}, "none of the 1 runs is done"),
    ],
)
def test_a_wrong_request_is_refused(tmp_path, keywords, message):
    make_run(tmp_path / "run", values={0: 0.1, 1: 0.1}, status="failed")
    with pytest.raises(ValueError, match=message):
        compared(tmp_path, **keywords)


# ------------------------------------------------------------------------------------------------------------------- caveats


def caveats(tmp_path, **keywords):
    return compared(tmp_path, **keywords).caveats


def test_a_run_that_ended_early_is_counted_and_warned_of(tmp_path):
    """B54: what failed does not leave the denominator."""
    make_sweep(tmp_path, APART)
    make_run(tmp_path / "broken", seed=5, estimator="rloo", values={0: 0.2, 1: 0.1}, status="failed")
    found = compared(tmp_path)
    assert found.group("rloo").summaries["final"].values[5] == 0.1
    assert found.caveats == [
        "rloo: 1 of 6 runs failed, counted with the last value (--done-only leaves such runs out): broken (step 1)",
        "unequal seeds: grpo has 0-4, rloo has 0-5",
        "unequal steps, last measured: grpo at 4, rloo at 1 or 4",
    ]
    without = compared(tmp_path, done_only=True)
    assert 5 not in without.group("rloo").summaries["final"].values
    assert without.caveats == ["1 run left out that did not come to the end: those that fail may be those that do badly"]


def test_a_run_without_a_last_value_is_named(tmp_path):
    make_sweep(tmp_path, APART)
    make_run(tmp_path / "blank", seed=5, estimator="rloo", status="running")
    make_run(tmp_path / "nan", seed=6, estimator="rloo", values={0: 0.2, 4: math.nan})
    found = caveats(tmp_path)
    assert "rloo: 1 of 7 runs running (under way, or killed), counted with the last value" in found[0]
    assert found[1] == "rloo: 2 runs without a final value of val/spell/pass@1, not counted: blank, nan"


def test_a_further_key_that_differs_is_named_and_said_in_the_conclusion(tmp_path):
    make_sweep(tmp_path, {"grpo": APART["grpo"]})
    make_sweep(tmp_path, {"rloo": APART["rloo"]}, training__learning_rate=0.1)
    found = compared(tmp_path)
    assert found.caveats == [f"the configs differ in more than {ESTIMATOR}: training.learning_rate (rloo: 0.1; grpo: 1e-06)"]
    assert found.conclusions[0].endswith("But they also differ in training.learning_rate: the difference may be due to it.")


def test_an_empty_mapping_against_one_with_keys_is_told_by_the_keys_and_what_trains_comes_first(tmp_path):
    make_sweep(tmp_path, {"grpo": APART["grpo"]}, data__train_batch_size=2)
    make_sweep(tmp_path, {"rloo": APART["rloo"]}, data__train_batch_size=4, rllm__algorithm__estimator_kwargs={"margin": 0.1})
    found = compared(tmp_path)
    assert found.caveats[0] == (
        f"the configs differ in more than {ESTIMATOR}: rllm.algorithm.estimator_kwargs.margin (rloo: 0.1; grpo: (not set)); "
        "data.train_batch_size (rloo: 4; grpo: 2)"
    )
    assert "also differ in rllm.algorithm.estimator_kwargs.margin, data.train_batch_size:" in found.conclusions[0]


def test_an_empty_mapping_against_null_is_told(tmp_path):
    make_sweep(tmp_path, {"grpo": APART["grpo"]}, rllm__algorithm__estimator_kwargs=None)
    make_sweep(tmp_path, {"rloo": APART["rloo"]})
    assert "rllm.algorithm.estimator_kwargs (rloo: {}; grpo: null)" in caveats(tmp_path)[0]


def test_a_key_that_differs_within_every_group_alike_is_no_confound(tmp_path):
    for lr in (0.1, 0.2):
        make_sweep(tmp_path / str(lr), APART, training__learning_rate=lr)
    found = compared(tmp_path)
    assert "training.learning_rate (within every group: 0.1, 0.2)" in found.caveats[0]
    assert "several runs of one seed, counted as one by their mean: seed 0, 1, 2, 3, 4" in found.caveats[1]
    assert found.conclusions == ["rloo is better than grpo by 0.102 [0.086, 0.118] (p < 0.001; 5 shared seeds)."]


def test_where_a_run_is_written_does_not_matter(tmp_path):
    make_sweep(tmp_path, {"grpo": APART["grpo"]}, run_root="a", wandb__group="x", rllm__trainer__experiment_name="x")
    make_sweep(tmp_path, {"rloo": APART["rloo"]}, run_root="b", wandb__group="y", rllm__trainer__experiment_name="y")
    assert caveats(tmp_path) == []


def test_a_loss_that_follows_the_estimator_is_warned_of(tmp_path):
    make_sweep(tmp_path, {"grpo": APART["grpo"]}, loss="ppo")
    make_sweep(tmp_path, {"rloo": APART["rloo"]}, loss="importance_sampling")
    found = compared(tmp_path)
    assert found.caveats == [
        "the loss differs (rloo: importance_sampling, grpo: ppo), so a difference may be the loss's; fix rllm.algorithm.loss_fn in all runs"
    ]
    assert found.conclusions[0].endswith("But they also differ in the loss: the difference may be due to it.")


def test_a_loss_that_is_compared_is_not_warned_of(tmp_path):
    for loss in ("ppo", "cispo"):
        make_sweep(tmp_path / loss, {"grpo": APART["grpo"]}, loss=loss, rllm__algorithm__loss_fn=loss)
    assert compare_runs([tmp_path], ["rllm.algorithm.loss_fn"]).caveats == []


def test_other_validation_questions_are_warned_of_by_what_was_asked(tmp_path):
    make_sweep(tmp_path, {"grpo": APART["grpo"]}, questions=["1 + 1", "1 + 2"])
    make_sweep(tmp_path, {"rloo": APART["rloo"]}, questions=["1 + 1", "1 + 3"])
    assert caveats(tmp_path) == ["not validated on the same questions: rloo and grpo"]


def test_questions_may_differ_from_seed_to_seed_where_seeds_are_paired(tmp_path):
    for seed, end in enumerate(APART["rloo"]):
        for estimator in ("rloo", "grpo"):
            values = {0: 0.2, 4: end - 0.1 * (estimator == "grpo") + 0.01 * seed}
            make_run(tmp_path / f"{estimator}{seed}", seed=seed, estimator=estimator, values=values, questions=[f"question {seed}"])
    assert caveats(tmp_path) == []


def test_runs_of_other_software_are_warned_of(tmp_path):
    make_sweep(tmp_path, {"grpo": APART["grpo"]}, commit="a" * 40)
    make_sweep(tmp_path, {"rloo": APART["rloo"]}, commit="b" * 40)
    assert caveats(tmp_path) == ["made by different software: commit aaaaaaaaaa, bbbbbbbbbb"]


def test_runs_of_one_seed_that_begin_otherwise_are_warned_of(tmp_path):
    make_sweep(tmp_path, {"grpo": APART["grpo"]})
    for seed, end in enumerate(APART["rloo"]):
        first = 0.25 if seed == 1 else 0.2
        make_run(tmp_path / f"rloo{seed}", seed=seed, estimator="rloo", values={0: first, 4: end})
    assert caveats(tmp_path) == [
        "runs of one seed that do not begin alike, by val/spell/pass@1 before training: seed 1 (0.200, 0.250). They started from other "
        "weights (a warm start made on another machine, or with another number of threads), so these pairs share less luck"
    ]


def test_runs_of_other_models_need_not_begin_alike(tmp_path):
    for first, model in ((0.2, "small"), (0.3, "large")):
        for seed in range(3):
            make_run(tmp_path / f"{model}{seed}", seed=seed, values={0: first, 4: first + 0.1 * seed}, model__name=model)
    assert compare_runs([tmp_path], ["model.name"]).caveats == []


def test_runs_measured_at_other_steps_are_warned_of(tmp_path):
    make_sweep(tmp_path, APART)
    make_run(tmp_path / "more", seed=5, estimator="rloo", values={0: 0.2, 2: 0.5, 4: 0.8})
    assert "not all runs were measured at the same steps" in caveats(tmp_path)[-1]


def test_scores_at_the_end_of_the_scale_are_warned_of(tmp_path):
    make_sweep(tmp_path, {"rloo": [0.97, 0.98, 0.95], "grpo": [0.5, 0.6, 0.7]})
    assert caveats(tmp_path) == [
        "close to the end of the scale, where seeds are skewed and the interval of a mean holds some 92% of the time: rloo"
    ]


# ---------------------------------------------------------------------------------------------------------------------- data


def test_the_data_are_strict_json_with_every_run_and_number(tmp_path):
    make_sweep(tmp_path, APART)
    make_run(tmp_path / "nan", seed=6, estimator="rloo", values={0: 0.2, 4: math.nan})
    data = json.loads(json.dumps(comparison_data(compared(tmp_path)), allow_nan=False))
    rloo = data["groups"][0]
    assert rloo["final"]["values"] == dict(zip("01234", APART["rloo"], strict=True))
    assert rloo["final"]["mean"]["value"] == pytest.approx(0.83)
    assert [run["final"] for run in rloo["runs"] if run["seed"] == 6] == [None]
    assert data["pairs"][0]["paired_by_seeds"] == [0, 1, 2, 3, 4]
    assert data["pairs"][0]["verdict"] == "told apart"
    assert data["num_resamples"] == 9999
