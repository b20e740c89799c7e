"""Replaying a run's episodes: grouped and filtered as in training, in order, each estimator with what it needs."""

import gc
import math
import subprocess
import sys
import weakref

import pytest

from rllm_lightning.config import AlgorithmConfig
from rllm_lightning.lab.replay import batches as batches_module
from rllm_lightning.lab.replay import caveats, conclusions, headline, replay_run
from rllm_lightning.lab.replay.sentences import relation
from rllm_lightning.lab.replay.subjects import parse_subjects, split_estimators
from rllm_lightning.types import Step, TerminationReason, Trajectory
from tests.lab.made_episodes import make_episode, make_log

MIXED = {"a": [1, 0, 0, 0], "b": [1, 1, 0, 0]}


def test_rloo_is_dr_grpo_times_n_over_n_minus_1(tmp_path):
    replay = replay_run(make_log(tmp_path, [MIXED, {"a": [1, 1, 1, 0]}]), ["rloo", "dr_grpo"])
    pair = replay.pair("rloo", "dr_grpo")
    for batch in pair.batches:
        assert batch.factor == pytest.approx(4 / 3, rel=1e-14)
        assert batch.pearson == pytest.approx(1, abs=1e-14)
        assert batch.flips == 0
    assert relation(pair) == "factor"
    assert conclusions(replay)[0] == "rloo is dr_grpo times 1.333: the same direction, another size of step"
    assert pair.extremes.largest() == []  # in units of their size they weigh alike


def test_groups_of_different_sizes_make_rloo_more_than_a_factor(tmp_path):
    # factors 2 and 4/3: dr_grpo (.5, -.5, .75, -.25 x3), rloo (1, -1, 1, -1/3 x3)
    pair = replay_run(make_log(tmp_path, [{"a": [1, 0], "b": [1, 0, 0, 0]}]), ["rloo", "dr_grpo"]).pair("rloo", "dr_grpo")
    dot, rloo, dr_grpo = 1 + 0.75 + 0.25, 3 + 1 / 3, 0.5 + 0.75
    assert pair.batches[0].pearson == pytest.approx(dot / math.sqrt(rloo * dr_grpo))
    assert relation(pair) == "similar"  # .9798


def test_the_lab_exports_it_and_importing_it_loads_no_torch():
    names = "Replay, print_replay, replay_data, replay_page, replay_run"
    source = f"import sys; from rllm_lightning.lab import {names}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_the_same_estimator_twice_is_the_same(tmp_path, register):
    def copy_of_rloo(rewards, **kwargs):
        from rllm_lightning.algorithms.advantage import calculate_rloo_advantages

        return calculate_rloo_advantages(rewards)

    replay = replay_run(make_log(tmp_path, [MIXED]), ["rloo", register(copy_of_rloo)])
    assert relation(replay.pairs[0]) == "same"
    assert "are the same" in conclusions(replay)[0]


def test_an_estimator_with_the_signs_turned_flips_all(tmp_path, register):
    def turned(rewards, **kwargs):
        return [r.mean() - r for r in rewards], rewards

    replay = replay_run(make_log(tmp_path, [MIXED]), ["dr_grpo", register(turned)])
    assert replay.pairs[0].mean("flips").value == 1
    assert replay.pairs[0].mean("pearson").value == pytest.approx(-1)
    assert "signs flip in 100.0% of the trajectories" in conclusions(replay)[0]


def test_means_over_batches_have_the_standard_error_of_their_scatter(tmp_path):
    # reinforce on [1, 0] keeps 1 of 2, on [1, 1, 1, 0] 3 of 4: mean .625, error |.75 - .5| / 2
    replay = replay_run(make_log(tmp_path, [{"a": [1, 0]}, {"a": [1, 1, 1, 0]}]), ["reinforce"])
    assert replay.estimators[0].summary("effective") == pytest.approx((0.625, 0.125))
    assert replay.pairs == []
    assert math.isnan(replay_run(replay.path, ["reinforce"], steps="1").estimators[0].summary("effective").error)


# ------------------------------------------------------------------------------------------------------------- as in training


def test_batches_are_grouped_and_filtered_by_the_runs_own_settings(tmp_path):
    episodes = [
        *(make_episode("a", i, r) for i, r in enumerate([1, 0, 0])),
        make_episode("a", 3, 0, reason=TerminationReason.ERROR),
        make_episode("b", 0, 1),
    ]
    plain = replay_run(make_log(tmp_path, [episodes]), ["dr_grpo"])
    assert (plain.num_groups, plain.num_trajectories, plain.num_failed, plain.num_single) == (2, 5, 1, 1)
    masked = "rllm.compact_filtering={enable: true, mask_error: true}"
    rejecting = ["rllm.rejection_sample={enable: true, mode: group, min_trajs_per_group: 2}", masked]
    filtered = replay_run(make_log(tmp_path, [episodes], *rejecting), ["dr_grpo"])
    assert (filtered.num_groups, filtered.num_trajectories, filtered.num_failed) == (1, 3, 1)
    assert filtered.estimators[0].sizes == pytest.approx([math.sqrt(2) / 3])  # 2/3, -1/3, -1/3
    assert any("1 of 5 episodes ended in an error or a time-out" in sentence for sentence in caveats(filtered))


def test_batches_that_waited_for_each_other_are_one(tmp_path):
    """B37: two partly solved tasks release both batches, once."""
    rejection = "rllm.rejection_sample={enable: true, mode: episode, min_partial_solve_tasks: 2}"
    path = make_log(tmp_path, [{"a": [1, 0]}, {"b": [1, 0, 0]}, {"c": [1, 0]}], rejection)
    replay = replay_run(path, ["rloo"])
    assert (replay.steps, replay.empty, replay.num_trajectories) == ([2], [1, 3], 5)
    assert replay_run(path, ["rloo"], steps="2").num_trajectories == 5  # what waited is read, though it is not asked for


def test_a_state_keeping_estimator_sees_all_batches_in_order(tmp_path):
    path = make_log(tmp_path, [{"a": [1, 1]}, {"a": [0, 0]}, {"a": [1, 0]}])
    whole = replay_run(path, ["rae", "reinforce"])
    assert whole.steps == [1, 2, 3]
    part = replay_run(path, ["rae", "reinforce"], steps="3")
    assert part.steps == [3]
    assert part.estimators[0].sizes == whole.estimators[0].sizes[2:]
    alone = replay_run(make_log(tmp_path / "alone", [{"a": [1, 0]}]), ["rae"])
    assert alone.estimators[0].sizes != part.estimators[0].sizes  # its state made a difference


def test_a_gap_in_the_episodes_is_named(tmp_path):
    replay = replay_run(make_log(tmp_path, [MIXED, None, MIXED]), ["rloo"])
    assert replay.steps == [1, 3]
    assert "no episodes of step 2" in caveats(replay)


def test_memory_is_that_of_one_batch(tmp_path, monkeypatch):
    alive, read = [], batches_module.read_step

    def watched(path):
        assert not [ref for ref in alive if ref() is not None], "the batch before is still held"
        episodes = read(path)
        alive.extend(weakref.ref(episode.trajectories[0]) for episode in episodes)
        return episodes

    monkeypatch.setattr(batches_module, "read_step", watched)
    gc.disable()  # nothing may need the cycle collector to go
    try:
        assert len(replay_run(make_log(tmp_path, [MIXED] * 3), ["rloo", "grpo"]).steps) == 3
    finally:
        gc.enable()


def test_what_a_model_call_holds_twice_is_held_once(tmp_path):
    from rllm_lightning.lab.replay.episodes import read_step
    from rllm_lightning.types import ModelOutput

    episode = make_episode("a", 0, 1)
    episode.trajectories[0].steps = [Step(model_output=ModelOutput(prompt_ids=[1], completion_ids=[2, 3], logprobs=[-1.0, -2.0]))]
    path = make_log(tmp_path, [[episode]]) / "episodes" / "train_step_1.jsonl"
    step = read_step(path)[0].trajectories[0].steps[0]
    assert step.response_ids is step.model_output.completion_ids
    assert step.logprobs is step.model_output.logprobs
    assert step.response_ids == [2, 3]


def test_the_advantages_that_the_run_wrote_down_come_out_again(tmp_path, caplog):
    right = [make_episode("a", i, r, advantage=a) for i, (r, a) in enumerate([(1, 1.0), (0, -1.0)])]
    run = ["rllm.algorithm.adv_estimator=rloo"]
    found = replay_run(make_log(tmp_path, [right], *run), ["grpo"]).reproduction
    assert (found.num_batches, found.num_steps, found.worst) == (1, 2, 0)
    assert caplog.records == []  # what was written is taken off first: nothing is overwritten
    wrong = [make_episode("a", i, r, advantage=a) for i, (r, a) in enumerate([(1, 1.0), (0, -0.5)])]
    replay = replay_run(make_log(tmp_path, [wrong], *run), ["grpo"])
    assert replay.reproduction.worst == pytest.approx(0.5)
    assert any("do not come out again (relative difference up to 0.500)" in sentence for sentence in caveats(replay))


# --------------------------------------------------------------------------------------------------------------------- needs


def test_what_an_episode_log_supplies_is_used(tmp_path):
    infos = {"greedy_reward": 0.25, "rewards": {"x": 1.0, "y": 0.0}}
    inner = {"values": [0.5, 0.5], "teacher_logprobs": [-0.25, -0.25], "state_key": "s"}
    episodes = [make_episode("a", i, r, info=dict(infos, rewards={"x": float(r), "y": 0.0}), step_info=inner) for i, r in enumerate([1, 0])]
    names = ["remax", "gdpo", "gae", "distill", "gigpo", "turn_level", "opo"]
    replay = replay_run(make_log(tmp_path, [episodes]), names)
    assert (replay.failures, replay.labels) == ({}, names)
    assert replay.estimators[0].sizes == pytest.approx([math.sqrt((0.75**2 + 0.25**2) / 2)])  # 1 - .25, 0 - .25
    assert replay.estimators[3].sizes == pytest.approx([0.25])  # teacher -.25, student -.5, each token


@pytest.mark.parametrize("name", ["remax", "gdpo", "gae", "distill", "gigpo"])
def test_what_it_lacks_is_said_by_the_estimators_name(tmp_path, name):
    replay = replay_run(make_log(tmp_path, [MIXED]), [name, "rloo"])
    assert replay.labels == ["rloo"]
    assert f"estimator '{name}', role 'solver': needs" in replay.failures[name]
    assert caveats(replay)[0].startswith(f"{name} is left out: step 1")


def test_advantages_of_tokens_count_with_their_mean(tmp_path, register):
    def ramp(rewards, lengths, **kwargs):
        return [[[list(map(float, range(n)))] for n in of_group] for of_group in lengths], rewards

    episodes = [make_episode("a", 0, 1, length=3), make_episode("a", 1, 0, length=1)]
    replay = replay_run(make_log(tmp_path, [episodes]), [register(ramp, per="token")])
    assert replay.estimators[0].sizes == pytest.approx([math.sqrt(0.5)])  # means 1 and 0


# -------------------------------------------------------------------------------------------------------- estimators that fail


def test_an_estimator_that_fails_is_left_out_and_the_others_go_on(tmp_path, register):
    def raises(rewards, **kwargs):
        return {}["nothing"]

    def short(rewards, **kwargs):
        return rewards[:1], rewards

    def breaks_down(rewards, **kwargs):  # 1 / 0 in the second batch
        return [r / r.sum() for r in rewards], rewards

    names = [register(function) for function in (raises, short, breaks_down)]
    replay = replay_run(make_log(tmp_path, [MIXED, {"a": [0, 0]}]), [*names, "rloo", "grpo"])
    assert replay.failures["raises"] == "step 1: KeyError: 'nothing'"
    assert "got 1 for 2 groups" in replay.failures["short"]
    assert replay.failures["breaks_down"].startswith("step 2: ")
    assert replay.labels == ["rloo", "grpo"]
    assert [(pair.a, pair.b, len(pair.batches)) for pair in replay.pairs] == [("rloo", "grpo", 2)]


def test_where_no_estimator_is_left_the_reasons_are(tmp_path):
    replay = replay_run(make_log(tmp_path, [MIXED]), ["remax"])
    assert (replay.labels, replay.pairs) == ([], [])
    assert caveats(replay)[0].startswith("remax is left out")


def test_a_dropped_group_is_counted_as_dropped(tmp_path):
    episodes = {"a": [1, 0], "b": [1]}
    replay = replay_run(make_log(tmp_path, [episodes]), ["grpo:singleton=drop", "grpo"])
    assert replay.estimators[0].dropped == pytest.approx([1 / 3])
    assert replay.pairs[0].batches[0].cosine == pytest.approx(1)


# ------------------------------------------------------------------------------------------------------------ degenerate runs


def test_a_run_without_episodes_is_refused(tmp_path):
    path = make_log(tmp_path, [])
    with pytest.raises(ValueError, match="no episodes"):
        replay_run(path, ["grpo"])
    with pytest.raises(ValueError, match="not a run directory"):
        replay_run(tmp_path, ["grpo"])


def test_a_damaged_line_is_named(tmp_path):
    path = make_log(tmp_path, [MIXED])
    file = path / "episodes" / "train_step_1.jsonl"
    file.write_text(file.read_text() + '{"id": "a:9", "tra', encoding="utf-8")
    with pytest.raises(ValueError, match=r"train_step_1\.jsonl, line 9: not an episode"):
        replay_run(path, ["grpo"])


def test_equal_rewards_leave_nothing_to_compare(tmp_path):
    replay = replay_run(make_log(tmp_path, [{"a": [1, 1], "b": [0, 0]}]), ["grpo", "rloo"])
    assert replay.num_uniform == 2
    assert replay.estimators[0].effective == [0]
    assert replay.estimators[0].zero == [1]
    assert relation(replay.pairs[0]) == "none"
    said = conclusions(replay)
    assert "cannot be compared" in said[0]
    assert "grpo pushes nothing: all its advantages are 0" in said
    assert any("2 of 2 groups have equal rewards" in sentence for sentence in caveats(replay))


def test_groups_of_one_are_counted(tmp_path):
    replay = replay_run(make_log(tmp_path, [{"a": [1], "b": [0], "c": [1]}]), ["rloo", "dr_grpo"])
    assert replay.num_single == 3
    assert replay.estimators[1].zero == [1]  # dr_grpo: zero; rloo: the reward itself
    assert any("3 of 3 groups hold one trajectory only" in sentence for sentence in caveats(replay))


def test_failed_episodes_without_steps_are_no_trajectories(tmp_path):
    broken = make_episode("a", 2, 0, reason=TerminationReason.ERROR)
    broken.trajectories = [Trajectory(name="solver")]
    timed_out = make_episode("a", 3, 0, reason=TerminationReason.TIMEOUT)
    timed_out.trajectories = []
    replay = replay_run(make_log(tmp_path, [[make_episode("a", 0, 1), make_episode("a", 1, 0), broken, timed_out]]), ["rloo"])
    assert (replay.num_trajectories, replay.num_failed, replay.num_episodes) == (2, 2, 4)


def test_a_step_of_failures_only_is_empty(tmp_path):
    broken = make_episode("a", 0, 0, reason=TerminationReason.ERROR)
    broken.trajectories = []
    replay = replay_run(make_log(tmp_path, [[broken], MIXED]), ["rloo"])
    assert (replay.steps, replay.empty) == ([2], [1])
    nothing = replay_run(make_log(tmp_path, [[broken], []]), ["rloo", "grpo"])
    assert conclusions(nothing) == ["there is nothing to compare: no batch had anything to train on"]
    assert "0 batches" in headline(nothing)


def test_a_reward_that_is_no_number_leaves_its_batch_out(tmp_path):
    """B05: the scorer of one trajectory failed; its batch is named, the others are looked at."""
    replay = replay_run(make_log(tmp_path, [MIXED, {"a": [1, math.nan]}]), ["rloo"])
    assert replay.steps == [1]
    assert "its reward is nan" in replay.unusable[2]
    assert any(sentence.startswith("step 2 cannot be replayed: group 'a:solver'") for sentence in caveats(replay))


# ----------------------------------------------------------------------------------------------------------------- trajectories


def test_the_trajectories_that_are_weighed_most_differently_are_shown(tmp_path):
    # opo's baseline is the mean reward by length: a long wrong answer is nearly what is to be expected
    episodes = [
        *(make_episode("even", i, r, length=2) for i, r in enumerate([1, 0])),
        make_episode("odd", 0, 1, length=1, text="short"),
        make_episode("odd", 1, 0, length=99, text="long"),
    ]
    found = replay_run(make_log(tmp_path, [episodes]), ["opo", "dr_grpo"]).pairs[0].extremes.largest()
    assert [extreme.task_id for extreme in found] == ["odd", "even"]  # one of each group
    first = found[0]
    assert (first.a, first.b, first.reward) == (-0.01, -0.5, 0.0)  # 0 - 1/100; 0 - 1/2
    assert (first.prompt, first.response, first.rollout_idx) == ("what is odd?", "long", "1")
    size = math.sqrt((0.25 + 0.25 + 0.99**2 + 0.01**2) / 4)
    assert first.difference == pytest.approx(1 - 0.01 / size)


def test_no_more_than_five_of_them_are_kept_the_largest_first(tmp_path):
    episodes = [make_episode(f"t{n}", i, r, length=(n if i else 1)) for n in range(2, 12) for i, r in enumerate([1, 0])]
    found = replay_run(make_log(tmp_path, [episodes]), ["opo", "dr_grpo"]).pairs[0].extremes.largest()
    gaps = [abs(extreme.difference) for extreme in found]
    assert len(found) == 5
    assert gaps == sorted(gaps, reverse=True)


# --------------------------------------------------------------------------------------------------------------- naming them


def test_keywords_stand_behind_the_name(tmp_path):
    path = make_log(tmp_path, [MIXED])
    replay = replay_run(path, ["grpo:norm_adv_by_std_in_grpo=false", "dr_grpo", "pass_at_k:k=2"])
    assert relation(replay.pair("grpo:norm_adv_by_std_in_grpo=false", "dr_grpo")) == "same"
    assert split_estimators("a, b:k=[1,2],c") == ["a", "b:k=[1,2]", "c"]


def test_the_runs_own_keywords_go_with_its_own_estimator_only():
    run = AlgorithmConfig(estimator="grpo", estimator_kwargs={"epsilon": 0.5})
    own, other = parse_subjects(["grpo", "grpo_trl"], run)
    assert own.algorithm.estimator_kwargs == {"epsilon": 0.5}
    assert other.algorithm.estimator_kwargs == {}
    assert parse_subjects(["grpo:epsilon=0.25"], run)[0].algorithm.estimator_kwargs == {"epsilon": 0.25}


def test_a_keyword_without_a_default_must_be_given(register):
    def shifted(rewards, by, **kwargs):
        return [r - by for r in rewards], rewards

    register(shifted)
    with pytest.raises(ValueError, match="shifted needs a value for by; write shifted:by="):
        parse_subjects(["shifted"], AlgorithmConfig())
    assert parse_subjects(["shifted:by=0.5"], AlgorithmConfig())[0].algorithm.estimator_kwargs == {"by": 0.5}


def test_all_are_trained_with_the_loss_that_the_run_had():
    """`loss_fn: null` means ppo for grpo and importance_sampling for others: a comparison pins one."""
    run = AlgorithmConfig(estimator="grpo", estimator_map={"judge": ("rloo", "cispo")})
    subject = parse_subjects(["rloo"], run)[0]
    assert subject.algorithm.loss_of("solver") == "ppo"
    assert subject.algorithm.loss_of("judge") == "cispo"
    assert subject.algorithm.estimator_of("judge") == "rloo"
    assert subject.algorithm.estimator_of("solver") == "rloo"


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([], "name at least one"),
        (["grpo", "grpo"], "named twice"),
        (["grppo"], "--estimators: unknown advantage estimator 'grppo'; did you mean 'grpo'?"),
        (["rloo:k=3"], "rloo has no keyword 'k'"),
        (["grpo:norm_adv_by_std_in_grpo=3"], "must be true or false"),
    ],
)
def test_names_and_keywords_that_do_not_fit_are_refused(labels, message):
    with pytest.raises(ValueError) as refusal:
        parse_subjects(labels, AlgorithmConfig())
    assert message in str(refusal.value)
