"""No dead knob: each leaf of the config is flipped, and something that the library does with it changes, or the flip is refused.

A new leaf belongs into `FLIPS`, where what is set up before a model is loaded shows it (`seen`), or into `ELSEWHERE`, with the test file
that shows what it does in a run.
"""

from pathlib import Path

import datasets
import pytest
import torch

from experiments import run as run_script
from rllm_lightning.tasks.huggingface import huggingface
from rllm_lightning.tracking.run_directory import RunDirectory, root_of, safe_name
from rllm_lightning.tracking.wandb_settings import choose_mode, run_arguments
from rllm_lightning.trainer.backend import LightningBackend
from rllm_lightning.trainer.module import UnifiedLightningModule
from rllm_lightning.trainer.optimization import make_optimizer, schedule_factor, warmup_steps_of
from rllm_lightning.trainer.protocol import TrainerState
from rllm_lightning.trainer.unified_trainer import UnifiedTrainer
from rllm_lightning.types import TerminationReason
from tests.fuzz.configs import all_leaves
from tests.quick import QUICK

TESTS = Path(__file__).parents[1]
HERE = "experiments/test_every_leaf.py"

COSINE = ["rllm.algorithm.lr_schedule=cosine"]
REJECTING = ["rllm.rejection_sample.enable=true"]
FILTERING = ["rllm.compact_filtering.enable=true"]
WANDB = ["wandb.mode=offline"]
GRIDWORLD = ["task.name=gridworld", "task.train_size=8", "task.val_size=2", "task.dataset=", "task.params="]
# leaf -> the value it is flipped to, and what is given beside it, before and after
FLIPS: dict[str, tuple[str, list[str]]] = {
    "data.seed": ("3", []),
    "data.shuffle": ("false", []),
    "data.train_batch_size": ("3", []),
    "data.max_response_length": ("9", []),
    "lightning.accelerator": ("tpu", []),
    "lightning.devices": ("3", []),
    "lightning.num_nodes": ("0", []),
    "lightning.precision": ("64-true", []),
    "lightning.strategy": ("deepspeed", []),
    "model.name": ("builtin:huge", []),
    "plugins": ("[no_such_module]", []),
    "rllm.algorithm.adv_estimator": ("gdpo", []),
    "rllm.algorithm.estimator_kwargs": ("{nonsense: 1}", []),
    "rllm.algorithm.estimator_map": ("{solver: rloo}", []),
    "rllm.algorithm.loss_fn": ("cispo", []),
    "rllm.algorithm.loss_fn_map": ("{solver: cispo}", []),
    "rllm.algorithm.loss_kwargs": ("{nonsense: 1}", []),
    "rllm.algorithm.lr_schedule": ("cosine", []),
    "rllm.algorithm.value_coeff": ("0", ["rllm.algorithm.adv_estimator=gae"]),
    "rllm.algorithm.warmup_steps": ("3", COSINE),
    "rllm.algorithm.warmup_steps_ratio": ("0.5", [*COSINE, "rllm.algorithm.warmup_steps=-1"]),
    "rllm.compact_filtering.enable": ("true", ["rllm.compact_filtering.mask_error=true"]),
    **{f"rllm.compact_filtering.mask_{reason.value}": ("true", FILTERING) for reason in TerminationReason},
    "rllm.rejection_sample.enable": ("false", [*REJECTING, "rllm.rejection_sample.mode=group"]),
    "rllm.rejection_sample.multiplier": ("2", REJECTING),
    "rllm.rollout.n": ("1", ["rllm.algorithm.adv_estimator=pass_at_k"]),
    "rllm.trainer.experiment_name": ("other", []),
    "rllm.trainer.logger": ("[tensorboard, csw]", []),
    "rllm.trainer.project_name": ("other", WANDB),
    "rllm.trainer.resume": ("/nowhere", []),
    "rllm.trainer.total_batches": ("7", []),
    "rllm.trainer.total_epochs": ("3", ["rllm.trainer.total_batches=-1"]),
    "rllm.trainer.val_only": ("true", ["task.val_size=0"]),
    "rllm.workflow.name": ("distill", []),
    "rllm.workflow.workflow_args": ("{nonsense: 1}", []),
    "rollout_engine.name": ("nonsense", []),
    "run_root": ("elsewhere", []),
    "sampling.train.temperature": ("0.5", []),
    "sampling.train.top_k": ("3", []),
    "sampling.train.top_p": ("0.5", []),
    "sampling.val.temperature": ("0.5", []),
    "sampling.val.top_k": ("3", []),
    "sampling.val.top_p": ("0.5", []),
    "seed": ("3", []),
    "task.dataset": ("letter_counting", ["task.params={}"]),
    "task.instruction": ("Think.", []),
    "task.name": ("jsonl", ["task.train_file=nowhere.jsonl", "task.dataset=", "task.params="]),
    "task.params": ("{min_word_len: 5, max_word_len: 6}", []),
    "task.train_size": ("5", []),
    "task.val_size": ("3", []),
    "training.beta1": ("0.5", []),
    "training.beta2": ("0.5", []),
    "training.eps": ("0.5", []),
    "training.learning_rate": ("0.5", []),
    "training.optimizer": ("sgd", []),
    "training.weight_decay": ("0.5", []),
    "wandb.entity": ("somebody", []),
    "wandb.group": ("some", []),
    "wandb.id": ("some", []),
    "wandb.job_type": ("some", []),
    "wandb.mode": ("disabled", []),
    "wandb.notes": ("some", []),
    "wandb.resume": ("must", []),
    "wandb.tags": ("[some]", []),
}
# leaf -> the test file that shows what it does in a run, or in the task or engine that it is a key of
ELSEWHERE = {
    "data.max_prompt_length": "workflows/test_runs.py",
    "data.val_batch_size": HERE,
    "model.attn_implementation": "models/test_load.py",
    "model.chat_template_kwargs": "models/test_load.py",
    "model.compile": "ddp/test_fsdp.py",
    "model.dtype": "ddp/test_equality.py",
    "model.gradient_checkpointing": "trainer/test_adapters.py",
    "model.lora_rank": "trainer/test_adapters.py",
    "model.trust_remote_code": "models/test_load.py",
    "rllm.algorithm.entropy_coeff": "trainer/test_loop.py",
    "rllm.algorithm.kl_beta": "trainer/test_loop.py",
    "rllm.algorithm.kl_estimator": "trainer/test_loop.py",
    "rllm.algorithm.kl_in": "trainer/test_loop.py",
    "rllm.algorithm.loss_agg_mode": "trainer/test_loop.py",
    "rllm.algorithm.loss_norm_length": "algorithms/test_aggregation.py",
    "rllm.algorithm.norm_adv_by_std_in_grpo": "algorithms/test_collect.py",
    "rllm.algorithm.rollout_correction.bypass_mode": HERE,
    "rllm.algorithm.rollout_correction.cap": "algorithms/test_losses_correction.py",
    "rllm.algorithm.rollout_correction.level": "algorithms/test_losses_correction.py",
    "rllm.algorithm.rollout_correction.mode": "algorithms/test_losses_correction.py",
    "rllm.algorithm.use_precomputed_advantage": "workflows/test_runs.py",
    "rllm.algorithm.use_rllm": "trainer/test_loop.py",
    "rllm.episode_logging.episode_log_dir": "tracking/test_report.py",
    "rllm.episode_logging.log_episodes": "experiments/test_run.py",
    "rllm.rejection_sample.filter_uniform_groups": "trainer/test_loop.py",
    "rllm.rejection_sample.min_partial_solve_tasks": "trainer/test_loop.py",
    "rllm.rejection_sample.min_trajs_per_group": "algorithms/test_rejection_sampling.py",
    "rllm.rejection_sample.mode": "trainer/test_loop.py",
    "rllm.rollout.n_val": "trainer/test_loop.py",
    "rllm.stepwise_advantage.mode": "config/test_problems.py",
    "rllm.stepwise_advantage.norm_adv_by_std_in_grpo": "config/test_switches.py",
    "rllm.trainer.keep_checkpoints": "trainer/test_resume.py",
    "rllm.trainer.save_freq": "trainer/test_loop.py",
    "rllm.trainer.test_freq": "trainer/test_loop.py",
    "rllm.trainer.val_before_train": "trainer/test_loop.py",
    "rllm.workflow.gamma": "workflows/test_engine.py",
    "rllm.workflow.n_parallel_tasks": "workflows/test_engine.py",
    "rllm.workflow.raise_on_error": "workflows/test_engine.py",
    "rllm.workflow.retry_limit": "workflows/test_engine.py",
    "rllm.workflow.reward_bonus_coeff": "workflows/test_engine.py",
    "rllm.workflow.timeout": "workflows/test_engine.py",
    **dict.fromkeys(["rollout_engine.fast", "rollout_engine.kept_state_mb"], "rollout/test_packed.py"),
    "rollout_engine.answers": "rollout/test_scripted.py",
    **{
        f"rollout_engine.{key}": "rollout/test_openai.py"
        for key in (
            *("api_key_env", "base_url", "extra_body", "max_open_requests", "max_retries", "model", "timeout", "tokens", "weights_folder"),
        )
    },
    **{
        f"rollout_engine.{key}": "rollout/test_vllm.py"
        for key in ("dtype", "enforce_eager", "engine_args", "gpu_memory_utilization", "max_batch_size", "sleep", "tensor_parallel_size")
    },
    **{f"task.{key}": "tasks/test_columns.py" for key in ("answer_pattern", "columns", "train_split", "val_split", "train_file")},
    **{f"task.{key}": "tasks/test_jsonl.py" for key in ("val_file", "val_fraction")},
    **{f"task.{key}": "tasks/test_docs.py" for key in ("curriculum", "scorer", "scorer_args", "extract")},
    **{f"task.{key}": "workflows/test_verifiers.py" for key in ("env_id", "env_args")},
    "task.mixture": "tasks/test_mixture.py",
    "task.partial_credit": "tasks/test_reasoning_gym.py",
    "task.path": "tasks/test_columns.py",
    "task.subset": HERE,
    "task.size": "workflows/test_environments.py",
    "training.max_grad_norm": "trainer/test_loop.py",
    "training.micro_batch_tokens": "trainer/test_loop.py",
    "training.num_epochs_per_batch": "trainer/test_loop.py",
    "training.num_minibatches": "trainer/test_loop.py",
    "training.tree": "trainer/test_loop.py",
    "wandb.log_model": "tracking/test_wandb_tracker.py",
    **{f"warm_start.{key}": "trainer/test_warm_start.py" for key in ("batch_size", "learning_rate", "steps", "wrong_solutions")},
}


def test_every_leaf_is_flipped_here_or_in_the_test_that_is_named():
    leaves = set(all_leaves())
    assert sorted(leaves - set(FLIPS) - set(ELSEWHERE)) == []
    assert sorted((set(FLIPS) | set(ELSEWHERE)) - leaves) == []
    for key, file in ELSEWHERE.items():
        assert key.rpartition(".")[2] in (TESTS / file).read_text(encoding="utf-8"), (key, file)


@pytest.fixture
def seen(monkeypatch, tmp_path, capfd):
    """seen(*argv) -> whatever a run has set up when it would load its model, or why it is refused."""
    made = []
    monkeypatch.setattr(UnifiedTrainer, "fit", lambda trainer: made.append(trainer))
    monkeypatch.chdir(tmp_path)

    def see(*argv):
        made.clear()
        code = run_script.main([*QUICK, "rllm.trainer.total_epochs=2", *argv])
        if code == 2:
            return capfd.readouterr().err
        assert code == 0
        (trainer,) = made
        cfg, algorithm, lightning = trainer.cfg, trainer.cfg.rllm.algorithm, trainer.lightning
        loader = trainer.backend.get_dataloader(trainer.train_dataset, TrainerState())
        optimizer = make_optimizer(torch.nn.Linear(1, 1), cfg.training)
        factor = schedule_factor(algorithm.lr_schedule, warmup_steps_of(algorithm, 10), 10)
        run = RunDirectory(root_of(cfg) / safe_name(cfg.rllm.trainer.project_name) / safe_name(cfg.rllm.trainer.experiment_name))
        return [
            trainer.train_dataset,
            trainer.val_dataset,
            (len(loader), next(iter(loader)).tasks),
            (type(lightning.strategy), type(lightning.accelerator), lightning.num_devices, lightning.num_nodes, lightning.precision),
            (trainer.backend._sampling(cfg.sampling.train), trainer.backend._sampling(cfg.sampling.val)),
            (type(optimizer), [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]),
            [factor(step) for step in range(10)],
            [(role, algorithm.estimator_of(role), algorithm.loss_of(role)) for role in ("", "solver")],
            [cfg.rllm.compact_filtering.should_mask(reason) for reason in TerminationReason],
            (choose_mode(cfg), run_arguments(cfg, run)),
            trainer.workflow_class,
            run.path,
        ]

    return see


SOME = sorted(FLIPS)[::8]


@pytest.mark.parametrize("key", [key if key in SOME else pytest.param(key, marks=pytest.mark.long) for key in sorted(FLIPS)])
def test_a_flip_changes_what_is_set_up_or_is_refused(key, seen):
    value, together = FLIPS[key]
    assert seen(*together, f"{key}={value}") != seen(*together)


def test_what_is_set_up_is_the_same_twice(seen):
    assert seen() == seen()


def test_validation_batches_are_as_large_as_asked_for(monkeypatch, tmp_path):
    sizes, rollouts = [], UnifiedLightningModule.rollouts

    def record(module, tasks, is_validation=False):
        sizes.append((len(tasks), is_validation))
        return rollouts(module, tasks, is_validation)

    monkeypatch.setattr(UnifiedLightningModule, "rollouts", record)
    run = [*QUICK, f"run_root={tmp_path}", "rllm.trainer.val_only=true"]
    assert run_script.main(run) == 0
    assert run_script.main([*run, "data.val_batch_size=1"]) == 0
    assert sizes == [(2, True), (1, True), (1, True)]


def test_in_bypass_mode_the_old_log_probs_are_the_samplers(monkeypatch, tmp_path):
    same, update = [], LightningBackend.update_policy

    def record(backend, state):
        same.append([row.old_logprobs == row.rollout_logprobs for row in state.backend_batch.rows])
        update(backend, state)

    monkeypatch.setattr(LightningBackend, "update_policy", record)
    run = [*QUICK, f"run_root={tmp_path}", "rllm.trainer.total_batches=1", "rllm.algorithm.adv_estimator=reinforce"]
    run += ["rllm.algorithm.loss_fn=ppo", "training.num_epochs_per_batch=2"]
    assert run_script.main([*run, "rllm.algorithm.rollout_correction.bypass_mode=true"]) == 0
    assert run_script.main([*run, "rllm.algorithm.rollout_correction.bypass_mode=false"]) == 0
    assert all(same[0])
    assert not all(same[1])


def test_the_configuration_of_a_data_set_reaches_its_library(monkeypatch):
    asked = []

    def refuse(*args, **kwargs):
        asked.append(args)
        raise ValueError("no such set")

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    with pytest.raises(ValueError, match="no such set"):
        huggingface(0, path="owner/set", subset="hard")
    assert asked == [("owner/set", "hard")]
