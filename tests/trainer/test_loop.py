"""The loop: counting, validating, saving, stopping, and batches that have nothing to train."""

import asyncio
import importlib
import itertools
import math
import os
import pickle
import signal
import sys
import threading

import pytest
import torch

from rllm_lightning.algorithms.estimator import register_rllm_adv_estimator
from rllm_lightning.config import ConfigError
from rllm_lightning.registry import ESTIMATORS
from rllm_lightning.tracking.episode_logger import read_episodes, read_token_texts
from rllm_lightning.trainer.backend import LightningBackend
from rllm_lightning.trainer.interruption import Interrupted
from rllm_lightning.types import RewardOutput, TerminationEvent, TerminationReason
from rllm_lightning.workflows.single_turn import SingleTurnWorkflow
from rllm_lightning.workflows.workflow import Workflow
from tests.trainer.conftest import Run, make_tasks, vowel_reward


class Recorder(LightningBackend):
    """Remembers what the loop asked for, in order."""

    def __init__(self, config, **kwargs):
        super().__init__(config, **kwargs)
        self.calls = []

    def called(self, name):
        return [detail for call, detail in self.calls if call == name]

    async def generate_episodes(self, batch, agent_workflow_engine, is_validation=False):
        episodes = await super().generate_episodes(batch, agent_workflow_engine, is_validation)
        self.calls.append(
            ("validate" if is_validation else "generate", (agent_workflow_engine.global_step, [task["id"] for task in batch]))
        )
        return episodes

    def update_policy(self, trainer_state):
        self.calls.append(("update", trainer_state.global_step))
        super().update_policy(trainer_state)

    async def on_epoch_start(self, trainer_state):
        self.calls.append(("epoch_start", trainer_state.epoch))

    async def on_epoch_end(self, trainer_state):
        self.calls.append(("epoch_end", trainer_state.epoch))

    async def on_batch_end(self, trainer_state):
        self.calls.append(("batch_end", trainer_state.global_step))


def test_batches_are_counted_not_optimizer_steps(fit):
    """B30: 8 batches of 4 updates each with total_batches=8: 8 batches run, step 8, and 32 optimizer steps are counted apart."""
    run = fit("rllm.trainer.total_batches=8", "training.num_minibatches=2", "training.num_epochs_per_batch=2", backend=Recorder)
    assert run.state.global_step == 8
    assert run.trainer.backend.called("update") == list(range(1, 9))
    assert run.column("step") == list(range(1, 9))
    assert run.column("optim/steps") == [4.0 * k for k in range(1, 9)]


def test_a_run_whose_batches_are_all_filtered_out_ends_too(fit):
    """B30: a step limit is reached although no optimizer step is ever taken; the parameters do not move."""
    run = fit(
        "rllm.trainer.total_batches=3",
        "rllm.rejection_sample.enable=true",
        "rllm.rejection_sample.mode=group",
        "rllm.rejection_sample.filter_uniform_groups=true",
        reward=lambda task, response: 1.0,
        backend=Recorder,
    )
    assert run.state.global_step == 3
    assert run.trainer.backend.called("update") == []
    assert run.trainer.backend.called("batch_end") == [1, 2, 3]  # hooks and logging still run
    assert run.column("batch/skipped") == [1.0, 1.0, 1.0]
    assert run.column("batch/groups_after_filter") == [0.0] * 3


@pytest.mark.parametrize("limit", [["rllm.trainer.total_batches=4"], ["rllm.trainer.total_epochs=2"]])
def test_validations_happen_once_each_and_the_last_step_is_saved(fit, limit):
    """B35: 4 batches, test_freq=2, with and without total_batches: validations at 0, 2, 4, once each; a checkpoint for 4."""
    run = fit(*limit, "rllm.trainer.test_freq=2", "rllm.trainer.val_before_train=true", val=make_tasks(3, "held"), backend=Recorder)
    assert [step for step, _ in run.trainer.backend.called("validate")] == [0, 2, 4]
    assert [row["step"] for row in run.rows if "val/held/pass@1" in row] == [0, 2, 4]
    assert run.column("step") == [0, 1, 2, 3, 4]  # train and validation of a step share a row
    assert (run.directory.checkpoints / "step_4.ckpt").is_file()
    assert (run.directory.checkpoints / "last.ckpt").is_file()


def test_the_last_step_is_validated_even_where_test_freq_does_not_divide_it(fit):
    run = fit("rllm.trainer.total_batches=3", "rllm.trainer.test_freq=2", val=make_tasks(1, "held"), backend=Recorder)
    assert [step for step, _ in run.trainer.backend.called("validate")] == [2, 3]


def test_val_only_validates_and_stops(fit):
    run = fit("rllm.trainer.val_only=true", "rllm.rollout.n_val=4", train=[], val=make_tasks(2, "held"), backend=Recorder)
    assert run.trainer.backend.called("generate") == []
    assert [row["step"] for row in run.rows] == [0]
    assert {"val/held/pass@1", "val/held/pass@2", "val/held/pass@4", "val/reward/solver/mean", "time/testing"} <= set(run.rows[0])
    assert run.directory.summary_json.is_file()


def test_a_backend_can_skip_a_validation(fit):
    class Skipping(Recorder):
        async def on_validation_start(self, trainer_state):
            return trainer_state.global_step == 2

    run = fit("rllm.trainer.total_batches=2", "rllm.trainer.test_freq=1", val=make_tasks(1, "held"), backend=Skipping)
    assert [step for step, _ in run.trainer.backend.called("validate")] == [2]


def test_n_rollouts_of_each_task_make_one_group_each(fit):
    """B21: 3 tasks, n=4: exactly 12 episodes in 3 groups of 4."""
    run = fit("rllm.trainer.total_batches=1", "data.train_batch_size=3", train=make_tasks(3))
    row = run.rows[0]
    assert (row["groups/num_trajs_before_filter"], row["groups/num_groups"]) == (12, 3)
    assert row["groups/min_group_size"] == row["groups/max_group_size"] == 4
    assert row["rollout/num_model_calls"] == 12
    ids = [episode.id for episode in run.state.episodes]
    assert sorted(ids) == sorted(f"letters:{t}:{k}" for t in range(3) for k in range(4))


def test_epochs_go_over_all_tasks_in_new_orders(fit):
    run = fit("rllm.trainer.total_epochs=2", train=make_tasks(5), backend=Recorder)
    batches = [ids for _, ids in run.trainer.backend.called("generate")]
    assert [len(ids) for ids in batches] == [2, 2, 1, 2, 2, 1]
    first, second = ([i for ids in part for i in ids] for part in (batches[:3], batches[3:]))
    assert sorted(first) == sorted(second) == [f"letters:{i}" for i in range(5)]
    assert first != second
    assert run.trainer.backend.called("epoch_start") == run.trainer.backend.called("epoch_end") == [0, 1]


def test_a_batch_larger_than_the_data_holds_all_of_them_and_says_so(fit, caplog):
    run = fit("rllm.trainer.total_batches=2", "data.train_batch_size=64", train=make_tasks(3), backend=Recorder)
    assert [len(ids) for _, ids in run.trainer.backend.called("generate")] == [3, 3]
    assert "data.train_batch_size" in caplog.text


def test_a_greedy_validation_divides_by_no_temperature(fit):
    """B12: at sampling.val.temperature=0 each answer is the likeliest, so all rollouts of a task are alike."""
    run = fit(
        "rllm.trainer.total_batches=1",
        "sampling.val.temperature=0",
        "rllm.rollout.n_val=3",
        "data.max_response_length=12",
        val=make_tasks(2, "held"),
    )
    episodes = read_episodes(run.directory.episodes / "val_step_1.jsonl")
    answers = {(episode.task_id, tuple(episode.trajectories[0].steps[0].response_ids)) for episode in episodes}
    assert (len(episodes), len(answers)) == (6, 2)
    assert all(math.isfinite(logprob) for episode in episodes for logprob in episode.trajectories[0].steps[0].logprobs)


def test_episodes_are_written_where_the_config_puts_them(fit, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    run = fit("rllm.trainer.total_batches=1", "rllm.episode_logging.episode_log_dir=~/elsewhere")
    assert [path.name for path in (tmp_path / "elsewhere").glob("*.jsonl")] == ["train_step_1.jsonl"]
    assert not run.directory.episodes.exists()


def test_the_multiplier_draws_more_tasks(fit):
    run = fit(
        "rllm.trainer.total_batches=1",
        "rllm.rejection_sample.enable=true",
        "rllm.rejection_sample.mode=group",
        "rllm.rejection_sample.multiplier=2",
        backend=Recorder,
    )
    assert [len(ids) for _, ids in run.trainer.backend.called("generate")] == [4]


def test_one_task_and_one_rollout_train(fit):
    """The sole member of a group: GRPO leaves its raw reward, mode `none` drops nothing."""
    before = fit("rllm.trainer.total_batches=1", "rllm.rollout.n=1", "training.learning_rate=0", train=make_tasks(1))
    after = fit("rllm.trainer.total_batches=1", "rllm.rollout.n=1", train=make_tasks(1))
    assert after.rows[0]["groups/max_group_size"] == 1
    assert after.rows[0]["batch/skipped"] == 0
    moved = [
        not torch.equal(a, b)
        for a, b in zip(before.trainer.module.policy.parameters(), after.trainer.module.policy.parameters(), strict=True)
    ]
    assert any(moved)


def test_episode_mode_waits_for_partly_solved_tasks(fit):
    """B37: min_partial_solve_tasks=2, one partly solved task a batch: no update, one over both batches, then none."""
    seen = []

    def one_of_two(task, response):
        seen.append(task["id"])
        return float(len(seen) % 2)

    run = fit(
        "rllm.trainer.total_batches=3",
        "data.train_batch_size=1",
        "rllm.rollout.n=2",
        "rllm.rejection_sample.enable=true",
        "rllm.rejection_sample.mode=episode",
        "rllm.rejection_sample.min_partial_solve_tasks=2",
        reward=one_of_two,
        backend=Recorder,
    )
    assert run.trainer.backend.called("update") == [2]
    assert run.column("batch/groups_after_filter") == [0, 2, 0]


def test_when_everything_is_masked_nothing_is_trained(fit):
    """B10: every response is truncated and masked: a finite run, and no step."""
    run = fit(
        "rllm.trainer.total_batches=2",
        "rllm.compact_filtering.enable=true",
        "rllm.compact_filtering.mask_max_response_length_exceeded=true",
        "rllm.compact_filtering.mask_env_done=true",
        backend=Recorder,
    )
    assert run.trainer.backend.called("update") == []
    assert run.column("groups/num_trajs_after_filter") == [0, 0]


# --------------------------------------------------------------------------------------------------- failing workflows


class Failing(Workflow):
    """Fails in the way that the task's id asks for; else answers."""

    def __init__(self, rollout_engine, executor, how="raise", **kwargs):
        super().__init__(rollout_engine, executor, **kwargs)
        self.how = how
        self.inner = SingleTurnWorkflow(rollout_engine, executor, vowel_reward)

    async def run(self, task, uid, **kwargs):
        if task["id"].endswith(":0"):
            if self.how == "raise":
                raise KeyError("lost")
            if self.how == "sleep":
                await asyncio.sleep(60)
            if self.how == "terminate":
                raise TerminationEvent(TerminationReason.MAX_TURNS_EXCEEDED)
            return None
        return await self.inner.run(task, uid, **kwargs)


@pytest.mark.parametrize(
    ("how", "reason", "extra"),
    [
        ("raise", "error", []),
        ("sleep", "timeout", ["rllm.workflow.timeout=0.5"]),
        ("terminate", "max_turns_exceeded", []),
        ("nothing", "error", []),
    ],
)
def test_a_run_goes_on_without_the_episodes_that_failed(fit, how, reason, extra):
    run = fit(
        "rllm.trainer.total_batches=1",
        "rllm.workflow.raise_on_error=false",
        *extra,
        train=make_tasks(2),
        workflow=Failing,
        workflow_args={"how": how},
    )
    row = run.rows[0]
    assert row[f"batch/termination_reason/{reason}"] == 0.5
    assert row["groups/num_groups"] == 1
    assert row["batch/num_tasks"] == 2  # a task counts over all its episodes, failed ones too


def test_with_raise_on_error_the_run_fails_with_the_workflows_own_error(make_trainer):
    trainer = make_trainer("rllm.trainer.total_batches=1", train=make_tasks(2), workflow=Failing, workflow_args={"how": "raise"})
    with pytest.raises(Exception, match="lost") as caught:
        trainer.fit()
    assert isinstance(caught.value.__cause__, KeyError)
    assert '"failed"' in trainer.run_directory.summary_json.read_text()


def test_a_prompt_that_is_too_long_ends_its_episode_with_a_reason(fit):
    """B26: never cut: the episode is left out, and its reason counted."""
    tasks = make_tasks(2)
    tasks[0]["question"] = "x" * 100
    run = fit("rllm.trainer.total_batches=1", train=tasks)
    assert run.rows[0]["batch/termination_reason/max_prompt_length_exceeded"] == 0.5
    assert run.rows[0]["groups/num_groups"] == 1


def test_a_batch_of_prompts_that_are_all_too_long_names_the_key(fit, caplog):
    fit("rllm.trainer.total_batches=1", "data.max_prompt_length=3")
    assert "max_prompt_length_exceeded; raise data.max_prompt_length, which is 3" in caplog.text


@pytest.mark.parametrize(("num_batches", "num_warnings"), [(4, 0), (7, 1)])
def test_a_run_without_any_advantage_is_told_so_once(fit, caplog, num_batches, num_warnings):
    fit(f"rllm.trainer.total_batches={num_batches}", reward=lambda task, response: 0.0)
    assert caplog.text.count("step 5: all advantages of the last 5 batches were 0") == caplog.text.count("all advantages") == num_warnings


def test_batches_with_advantages_in_between_are_no_reason_to_warn(fit, caplog):
    """Eight answers a batch: those of every third batch differ."""
    answered = itertools.count()
    fit("rllm.trainer.total_batches=7", reward=lambda task, response: float((number := next(answered)) // 8 % 3 == 2 and number % 2))
    assert "all advantages" not in caplog.text


# ---------------------------------------------------------------------------------------------------- numbers that must hold


def test_two_runs_of_one_config_write_the_same_metrics(fit):
    args = ("rllm.trainer.total_batches=3", "rllm.trainer.test_freq=1", "rllm.trainer.val_before_train=true")
    first, second = fit(*args, val=make_tasks(2, "held")), fit(*args, val=make_tasks(2, "held"))
    assert first.deterministic_rows() == second.deterministic_rows()
    assert fit(*args, "seed=1", val=make_tasks(2, "held")).deterministic_rows() != first.deterministic_rows()


def test_without_an_update_the_ratio_is_one_and_sampler_and_trainer_agree(fit):
    """B12, B17: lr 0, mixed lengths, temperature 0.7 on both sides, several updates a batch: |ratio - 1| <= 1e-5, nothing clipped, KL 0."""
    run = fit(
        "rllm.trainer.total_batches=2",
        "training.learning_rate=0",
        "training.num_epochs_per_batch=2",
        "sampling.train.temperature=0.7",
        "data.max_response_length=12",
    )
    for row in run.rows:
        assert row["actor/ratio_gap/max"] <= 1e-5
        assert abs(row["actor/approx_kl"]) <= 1e-5
        assert row["actor/clip_frac"] == 0
        assert row["rollout/correction/gap/max"] <= 2e-5
        assert abs(row["rollout/correction/kl_k3"]) <= 1e-5


def test_modes_are_eval_eval_train_and_restored(fit):
    """B23: eval while sampling and in the old-log-prob pass, training mode in the update (with every dropout at 0), and back."""
    modes = []

    class Watching(LightningBackend):
        async def generate_episodes(self, *args, **kwargs):
            modes.append(("before rollout", self.policy.training))
            return await super().generate_episodes(*args, **kwargs)

        def bind(self, policy, optimizer, backward, ranks):
            super().bind(policy, optimizer, backward, ranks)
            policy.model.register_forward_pre_hook(lambda module, args: modes.append(("rollout", module.training)))
            policy.register_forward_pre_hook(lambda module, args: modes.append(("pass", module.training)))

        def update_policy(self, state):
            modes.append(("update", None))
            super().update_policy(state)
            modes.append(("after update", self.policy.training))

    fit(
        "rllm.trainer.total_batches=2",
        "rllm.trainer.test_freq=1",
        "training.num_minibatches=2",
        val=make_tasks(1, "held"),
        backend=Watching,
    )
    in_update = False
    for name, training in modes:
        in_update = {"update": True, "after update": False}.get(name, in_update)
        if training is not None and name != "after update":
            assert training is in_update, (name, training)
    assert ("pass", False) in modes  # the old-log-prob pass
    assert ("pass", True) in modes
    assert ("after update", False) in modes


def test_kl_to_the_reference_is_zero_at_first_and_grows(fit):
    """At any temperature: reference and policy are divided by the same."""
    args = ("rllm.trainer.total_batches=4", "rllm.algorithm.kl_beta=0.1", "training.learning_rate=1e-2")
    kl = fit(*args, "sampling.train.temperature=0.7").column("actor/kl_ref")
    assert kl[0] == pytest.approx(0, abs=1e-6)
    assert kl[-1] > 1e-4


def test_kl_to_the_reference_is_trained_and_not_only_logged(fit):
    """B13: two steps on both runs are alike, for there is no distance in the first; then the pull holds the policy back."""
    args = ("rllm.trainer.total_batches=4", "training.optimizer=sgd", "training.learning_rate=0.3", "training.max_grad_norm=0")
    weak, strong = (fit(*args, f"rllm.algorithm.kl_beta={beta}").column("actor/kl_ref") for beta in (1e-9, 0.3))
    assert strong[:2] == pytest.approx(weak[:2], rel=1e-4, abs=1e-7)
    assert 0 < strong[-1] < 0.6 * weak[-1]


def test_the_entropy_bonus_is_trained_and_not_only_logged(fit):
    """Equal rewards teach nothing by themselves."""
    norms = [
        fit("rllm.trainer.total_batches=1", f"rllm.algorithm.entropy_coeff={coefficient}", reward=lambda task, response: 1.0).rows[0][
            "optim/grad_norm"
        ]
        for coefficient in (0.0, 0.1)
    ]
    assert norms[0] == 0
    assert norms[1] > 1e-4


def test_kl_in_the_reward_changes_the_rewards_only(fit):
    run = fit(
        "rllm.trainer.total_batches=3",
        "rllm.algorithm.kl_beta=0.5",
        "rllm.algorithm.kl_in=reward",
        "rllm.algorithm.kl_estimator=k1",
        "training.learning_rate=1e-2",
    )
    assert run.column("reward/kl_penalty/mean")[0] == pytest.approx(0, abs=1e-5)
    assert run.column("reward/kl_penalty/mean")[-1] != pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize(
    "how", [["training.micro_batch_tokens=40"], ["training.tree=false"], ["training.tree=false", "training.micro_batch_tokens=40"]]
)
@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "prompt-mean"])
def test_the_result_does_not_depend_on_how_rows_are_laid_out(fit, how, mode):
    """B09: micro-batches of any size, trees or padded rows: the same parameters."""
    args = ("rllm.trainer.total_batches=2", "training.optimizer=sgd", "training.learning_rate=1.0", f"rllm.algorithm.loss_agg_mode={mode}")
    plain, other = fit(*args), fit(*args, *how)
    for a, b in zip(plain.trainer.module.policy.parameters(), other.trainer.module.policy.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=2e-6)
    start = fit(*args, "training.learning_rate=0")
    assert any(
        not torch.equal(a, b)
        for a, b in zip(plain.trainer.module.policy.parameters(), start.trainer.module.policy.parameters(), strict=True)
    )


@pytest.mark.parametrize("loss", ["kl_cov", "clip_cov"])
def test_losses_that_compare_all_tokens_see_the_whole_minibatch(fit, loss):
    """Which tokens they pick does not depend on micro-batches."""
    args = ["rllm.trainer.total_batches=2", "training.optimizer=sgd", "training.learning_rate=1.0", f"rllm.algorithm.loss_fn={loss}"]
    args += ["rllm.algorithm.loss_kwargs={fraction: 0.3}", "training.num_epochs_per_batch=2"]
    plain, split = fit(*args), fit(*args, "training.micro_batch_tokens=40", "training.tree=false")
    for a, b in zip(plain.trainer.module.policy.parameters(), split.trainer.module.policy.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=2e-6)
    share = {"kl_cov": "actor/kl_frac", "clip_cov": "actor/cov_frac"}[loss]
    assert split.column(share) == plain.column(share)
    if loss == "kl_cov":
        assert all(0.25 < value <= 0.3 for value in plain.column(share))


def test_the_warm_up_is_logged_step_by_step(fit):
    """B32: 4 batches of 2 updates are 8 optimizer steps; ratio .5 warms up over 4. The logged rate is that of a batch's last step."""
    run = fit(
        "rllm.trainer.total_batches=4",
        "training.num_epochs_per_batch=2",
        "rllm.algorithm.warmup_steps_ratio=0.5",
        "rllm.trainer.test_freq=1",
        "training.learning_rate=8e-4",
        val=make_tasks(1, "held"),
    )
    assert run.column("optim/learning_rate") == pytest.approx([4e-4, 8e-4, 8e-4, 8e-4])


# -------------------------------------------------------------------------------------------------------- what is left behind


def test_the_final_model_is_in_hugging_face_format(fit):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run = fit("rllm.trainer.total_batches=1")
    folder = run.directory.checkpoints / "model"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("say a", return_tensors="pt", add_special_tokens=False)["input_ids"]
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, run.trainer.module.policy.model(ids).logits)


def test_a_lora_adapter_trains_alone_and_is_merged_at_the_end(fit):
    run = fit("rllm.trainer.total_batches=1", "model.lora_rank=2", "training.learning_rate=1e-2", "rllm.algorithm.kl_beta=0.1")
    trained = [name for name, p in run.trainer.module.policy.named_parameters() if p.requires_grad]
    assert trained
    assert all("lora_" in name for name in trained)
    assert (run.directory.checkpoints / "model" / "model.safetensors").is_file()


def test_a_resumed_run_ends_where_an_uninterrupted_one_does(fit):
    """Also at the edge of an epoch, with a schedule and several updates a batch (B31, B32)."""
    args = (
        "training.num_epochs_per_batch=2",
        "rllm.algorithm.lr_schedule=linear",
        "rllm.trainer.save_freq=1",
        "rllm.trainer.keep_checkpoints=0",
    )
    whole = fit("rllm.trainer.total_batches=4", *args)
    for step in (1, 2, 3):  # 2 is the end of the first epoch of 4 tasks
        resumed = fit(
            "rllm.trainer.total_batches=4",
            *args,
            f"rllm.trainer.resume={whole.directory.checkpoints / f'step_{step}.ckpt'}",
            backend=Recorder,
        )
        assert [number for number, _ in resumed.trainer.backend.called("generate")] == list(range(step + 1, 5))
        assert resumed.deterministic_rows() == whole.deterministic_rows()
        for a, b in zip(whole.trainer.module.policy.parameters(), resumed.trainer.module.policy.parameters(), strict=True):
            assert torch.equal(a, b)


class Rates(Recorder):
    """Notes the learning rate of every optimizer step."""

    def _clip(self):
        self.calls.append(("rate", self.scheduler.get_last_lr()[0]))
        return super()._clip()


def test_the_warm_up_goes_step_by_step_also_over_a_resume(fit):
    """B32: 8 batches of 2 updates, ratio .25: factors .25, .5, .75, 1 and then 1; validations between them change nothing."""
    args = (
        "rllm.trainer.total_batches=8",
        "training.num_epochs_per_batch=2",
        "rllm.algorithm.warmup_steps_ratio=0.25",
        "training.learning_rate=8e-4",
        "rllm.trainer.test_freq=1",
        "rllm.trainer.save_freq=1",
        "rllm.trainer.keep_checkpoints=0",
    )
    whole = fit(*args, val=make_tasks(1, "held"), backend=Rates)
    assert whole.trainer.backend.called("rate") == pytest.approx([2e-4, 4e-4, 6e-4, *[8e-4] * 13])
    checkpoint = whole.directory.checkpoints / "step_1.ckpt"
    resumed = fit(*args, f"rllm.trainer.resume={checkpoint}", val=make_tasks(1, "held"), backend=Rates)
    assert resumed.trainer.backend.called("rate") == pytest.approx([6e-4, *[8e-4] * 13])


@pytest.mark.parametrize("killed_after", [3, 8])
def test_a_resume_reads_what_is_left_of_the_data(fit, killed_after):
    """B31: 8 samples, 2 epochs, killed after 3 and after 8: each sample once an epoch, the second in the order of an uninterrupted
    run, and the same final weights."""
    args = ("rllm.trainer.total_epochs=2", "data.train_batch_size=1", "rllm.rollout.n=2", "rllm.trainer.save_freq=1")
    args = (*args, "rllm.trainer.keep_checkpoints=0")
    whole = fit(*args, train=make_tasks(8), backend=Recorder)
    order = [ids for _, ids in whole.trainer.backend.called("generate")]
    assert sorted(order[:8]) == sorted(order[8:]) == [[f"letters:{i}"] for i in range(8)]
    checkpoint = whole.directory.checkpoints / f"step_{killed_after}.ckpt"
    resumed = fit(*args, f"rllm.trainer.resume={checkpoint}", train=make_tasks(8), backend=Recorder)
    assert [ids for _, ids in resumed.trainer.backend.called("generate")] == order[killed_after:]
    for a, b in zip(whole.trainer.module.policy.parameters(), resumed.trainer.module.policy.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_finished_run_can_be_made_longer(fit):
    """B31: a resume at the end of the data trains on, and does not exit with zero steps."""
    short = fit("rllm.trainer.total_batches=2")
    longer = fit("rllm.trainer.total_batches=4", f"rllm.trainer.resume={short.directory.path}", backend=Recorder)
    assert [number for number, _ in longer.trainer.backend.called("generate")] == [3, 4]
    assert longer.column("step") == [1, 2, 3, 4]
    assert longer.directory.path == short.directory.path


def test_old_checkpoints_are_pruned(fit):
    run = fit("rllm.trainer.total_batches=5", "rllm.trainer.save_freq=1", "rllm.trainer.keep_checkpoints=2")
    assert sorted(path.name for path in run.directory.checkpoints.glob("*.ckpt")) == ["last.ckpt", "step_4.ckpt", "step_5.ckpt"]


class _Touch:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


def test_a_hostile_checkpoint_is_refused_and_runs_nothing(make_trainer, tmp_path):
    """B56: a checkpoint whose pickle opens a file for writing."""
    hostile, target = tmp_path / "hostile.ckpt", tmp_path / "owned"
    with open(hostile, "wb") as file:
        pickle.dump(_Touch(target), file)
    zipped = tmp_path / "zipped.ckpt"
    torch.save({"state_dict": {}, "x": _Touch(target)}, zipped)
    with pytest.raises(ConfigError, match="is no whole checkpoint"):
        make_trainer("rllm.trainer.total_batches=1", f"rllm.trainer.resume={hostile}")
    with pytest.raises(ConfigError, match=r"rllm\.trainer\.resume: .* cannot be read as plain data"):
        make_trainer("rllm.trainer.total_batches=1", f"rllm.trainer.resume={zipped}")
    assert not target.exists()


def test_own_checkpoints_hold_plain_containers_only(fit):
    """B56: they load with `weights_only`, under default settings."""
    run = fit("rllm.trainer.total_batches=1")
    loaded = torch.load(run.directory.checkpoints / "last.ckpt", weights_only=True)
    assert loaded["rllm_lightning"]["global_step"] == 1


# ------------------------------------------------------------------------------------------------------------- interruption


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_during_a_rollout_stops_at_the_last_finished_batch(make_trainer, signum):
    class Stopping(LightningBackend):
        async def generate_episodes(self, batch, engine, is_validation=False):
            if engine.global_step == 3:
                os.kill(os.getpid(), signum)
                await asyncio.sleep(60)
            return await super().generate_episodes(batch, engine, is_validation)

    former = signal.getsignal(signum)
    trainer = make_trainer("rllm.trainer.total_batches=5", backend=Stopping)
    with pytest.raises(Interrupted) as caught:
        trainer.fit()
    assert caught.value.exit_code == 128 + signum
    assert signal.getsignal(signum) == former
    run = Run(trainer)
    assert run.column("step") == [1, 2]
    assert torch.load(run.directory.checkpoints / "last.ckpt", weights_only=True)["rllm_lightning"]["global_step"] == 2
    assert '"interrupted"' in run.directory.summary_json.read_text()


def test_a_signal_during_an_update_lets_the_batch_end(make_trainer):
    class Stopping(LightningBackend):
        def update_policy(self, state):
            if state.global_step == 2:
                os.kill(os.getpid(), signal.SIGTERM)
            super().update_policy(state)

    trainer = make_trainer("rllm.trainer.total_batches=5", backend=Stopping)
    with pytest.raises(Interrupted):
        trainer.fit()
    assert Run(trainer).column("step") == [1, 2]


def test_fit_inside_a_running_loop_points_to_fit_async(make_trainer):
    trainer = make_trainer("rllm.trainer.total_batches=1")

    async def notebook():
        with pytest.raises(RuntimeError, match="fit_async"):
            trainer.fit()
        await trainer.fit_async()

    asyncio.run(notebook())
    assert Run(trainer).column("step") == [1]


def test_cancelling_fit_async_stops_the_run_and_leaves_no_thread(make_trainer):
    class Slow(LightningBackend):
        async def generate_episodes(self, *args, **kwargs):
            started.set()
            await asyncio.sleep(60)

    started = threading.Event()
    trainer = make_trainer("rllm.trainer.total_batches=5", backend=Slow)

    async def notebook():
        task = asyncio.ensure_future(trainer.fit_async())
        await asyncio.to_thread(started.wait)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(notebook())
    assert '"interrupted"' in trainer.run_directory.summary_json.read_text()
    assert not [t for t in threading.enumerate() if t.name.startswith("workflow")]


def test_shutdown_is_idempotent_and_done_when_fit_fails(make_trainer):
    class Broken(LightningBackend):
        closed = 0

        def update_policy(self, state):
            raise RuntimeError("broken")

        def shutdown(self):
            type(self).closed += 1
            super().shutdown()

    trainer = make_trainer("rllm.trainer.total_batches=1", backend=Broken)
    with pytest.raises(RuntimeError, match="broken"):
        trainer.fit()
    assert Broken.closed >= 1
    trainer.shutdown()
    trainer.shutdown()


# ------------------------------------------------------------------------------------------------------------- bad input


def test_what_cannot_run_is_refused_before_anything_expensive(make_trainer):
    with pytest.raises(ConfigError, match="train_dataset: the data set is empty"):
        make_trainer(train=[])
    with pytest.raises(ConfigError, match="same id"):
        make_trainer(train=[{"id": "a", "question": "x"}, {"id": "a", "question": "y"}])
    with pytest.raises(TypeError, match="colour"):
        make_trainer(colour="red")
    with pytest.raises(ConfigError, match="use_rllm"):
        make_trainer(traj_group_adv_estimator_map={"solver": "rloo"})
    with pytest.raises(ValueError, match=r"workflow_args\.rewards"):
        make_trainer(workflow_args={"rewards": vowel_reward})
    with pytest.raises(ConfigError, match=r"rllm\.trainer\.resume"):
        make_trainer("rllm.trainer.resume=/nowhere.ckpt")
    with pytest.raises(ConfigError, match="val_only"):
        make_trainer("rllm.trainer.val_only=true")


def test_a_switch_that_is_documented_does_something(fit):
    """B48: rllm.algorithm.norm_adv_by_std_in_grpo=false leaves the std out of the run's advantages."""
    with_std = fit("rllm.trainer.total_batches=1", "data.max_response_length=12").rows[0]
    without = fit("rllm.trainer.total_batches=1", "data.max_response_length=12", "rllm.algorithm.norm_adv_by_std_in_grpo=false").rows[0]
    assert with_std["reward/solver/max"] == without["reward/solver/max"]
    assert without["advantage/solver/max"] < with_std["advantage/solver/max"]


def test_what_a_workflow_provides_an_estimator_can_use(fit):
    """gdpo needs a reward vector: refused at the start where nobody provides it, at work where the reward function says it does."""

    def two_rewards(task, response):
        letters = vowel_reward(task, response)
        return RewardOutput(letters, metadata={"rewards": {"letters": letters, "short": 1.0 / (1 + len(response))}})

    args = ("rllm.trainer.total_batches=1", "rllm.algorithm.adv_estimator=gdpo")
    with pytest.raises(ConfigError, match=r"'gdpo' needs reward_components, which SingleTurnWorkflow does not provide"):
        fit(*args, reward=two_rewards)
    two_rewards.provides = {"reward_components"}
    assert fit(*args, reward=two_rewards).rows[0]["advantage/solver/std"] > 0


def test_the_estimator_map_gives_a_role_its_estimator(fit):
    run = fit(
        "rllm.trainer.total_batches=1",
        "rllm.algorithm.use_rllm=true",
        traj_group_adv_estimator_map={"solver": ("reinforce", "importance_sampling")},
    )
    assert run.trainer.cfg.rllm.algorithm.estimator_of("solver") == "reinforce"
    assert run.rows[0]["advantage/solver/mean"] == pytest.approx(run.rows[0]["reward/solver/mean"])
    with_map = run.trainer.config.rllm.algorithm.estimator_map.solver
    assert list(with_map) == ["reinforce", "importance_sampling"]


def test_a_dropped_group_counts_in_no_denominator(fit):
    """Groups of one under singleton=drop: nothing is left to train, and the optimizer takes no step."""
    args = ("rllm.trainer.total_batches=1", "rllm.rollout.n=1", "rllm.algorithm.adv_estimator=dr_grpo")
    run = fit(*args, "rllm.algorithm.estimator_kwargs.singleton=drop")
    assert run.rows[0]["actor/skipped"] == 1.0  # every group has one member
    assert fit(*args).rows[0]["actor/skipped"] == 0.0


def test_a_users_grouping_is_used(fit):
    from rllm_lightning.types import TrajectoryGroup

    def all_together(episodes, transform_config, compact_filtering_config=None):
        return [TrajectoryGroup([t for e in episodes for t in e.trajectories], group_id="all:solver")]

    run = fit("rllm.trainer.total_batches=1", traj_grouping_hook=all_together)
    assert run.rows[0]["groups/num_groups"] == 1
    assert run.rows[0]["groups/max_group_size"] == 8


@pytest.mark.parametrize("strategy", ["fsdp", "deepspeed_stage_2"])
def test_other_strategies_that_shard_the_model_are_refused(make_trainer, strategy):
    with pytest.raises(ConfigError, match=r"lightning\.strategy: .* use fsdp2 to shard the model, else ddp"):
        make_trainer(f"lightning.strategy={strategy}", "lightning.accelerator=cpu", "lightning.devices=2")


def test_what_lightning_refuses_is_named_by_the_keys_that_were_given(make_trainer):
    with pytest.raises(ConfigError) as caught:
        make_trainer("lightning.accelerator=abacus").fit()
    (problem,) = caught.value.problems
    assert problem.startswith("lightning.accelerator=abacus: Lightning refuses it here: ")
    assert problem.endswith("(lightning.accelerator=auto or cpu works on every machine)")
    with pytest.raises(
        ConfigError, match=r"^lightning\.accelerator=cpu, lightning\.devices=-5: Lightning refuses .* should be an int > 0\.$"
    ):
        make_trainer("lightning.accelerator=cpu", "lightning.devices=-5").fit()


@pytest.mark.parametrize(("body", "reason"), [("return undefined", "NameError: .*"), ("raise ValueError('too few')", ".*: too few")])
def test_an_estimator_that_raises_at_the_start_is_told_with_its_line(make_trainer, monkeypatch, tmp_path, body, reason):
    source = f"def helper(rewards):\n    {body}\n\n\ndef raising(rewards):\n    return helper(rewards)\n"
    (tmp_path / "my_estimators.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_estimators", raising=False)
    monkeypatch.setattr(ESTIMATORS, "_entries", dict(ESTIMATORS.items()))
    register_rllm_adv_estimator("raising")(importlib.import_module("my_estimators").raising)
    end = rf"'raising' fails on groups of 4: {reason} \(my_estimators\.py:2\)$"
    with pytest.raises(ConfigError, match=rf"^rllm\.algorithm\.adv_estimator: {end}"):
        make_trainer("rllm.algorithm.adv_estimator=raising")


@pytest.mark.parametrize(
    ("n", "name", "is_warned"),
    [(1, "dr_grpo", True), (1, "maxrl", True), (2, "dr_grpo", False), (1, "reinforce", False), (1, "grpo", False)],
)
def test_an_estimator_that_compares_answers_warns_of_groups_of_one(make_trainer, caplog, n, name, is_warned):
    """`grpo` is none of them: as in rLLM, a lone answer is weighed by its reward."""
    make_trainer(f"rllm.rollout.n={n}", f"rllm.algorithm.adv_estimator={name}")
    start = f"rllm.algorithm.adv_estimator: '{name}' compares the answers to one question, and rllm.rollout.n=1 gives it one"
    assert [message.startswith(start) for message in caplog.messages if "rllm.rollout.n" in message] == [True] * is_warned


@pytest.mark.parametrize("num_minibatches", [1, 2])
def test_logged_episodes_hold_the_trainers_log_probs_before_the_update(fit, num_minibatches):
    """With one minibatch the update's own pass finds them, with two a pass before it; before any update they are the sampler's."""
    run = fit(f"training.num_minibatches={num_minibatches}", "rllm.trainer.total_batches=1")
    steps = [
        step
        for episode in read_episodes(run.directory.episodes / "train_step_1.jsonl")
        for trajectory in episode.trajectories
        for step in trajectory.steps
    ]
    assert len(steps) == 8
    for step in steps:
        assert step.info["old_logprobs"] == pytest.approx(step.logprobs, abs=1e-4)
    texts = read_token_texts(run.directory.episodes)
    assert "".join(texts[str(i)] for i in steps[0].response_ids).startswith(steps[0].model_response)
