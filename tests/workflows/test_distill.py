"""On-policy distillation: what a teacher says of the student's own tokens, and that the student comes nearer to it."""

import asyncio
import csv
import json
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import AutoModelForCausalLM

from experiments import run as run_script
from rllm_lightning.algorithms.advantage import collect_reward_and_advantage_from_trajectory_groups
from rllm_lightning.algorithms.transform import transform_episodes_to_trajectory_groups
from rllm_lightning.config import AlgorithmConfig, Config, ConfigError, TransformConfig, load_config
from rllm_lightning.models.tiny import tiny_model
from rllm_lightning.rollout.engine import EngineSetup, SamplingParams
from rllm_lightning.rollout.hf import HFEngine
from rllm_lightning.rollout.scripted import ScriptedEngine
from rllm_lightning.trainer.policy import Policy
from rllm_lightning.trainer.warm_start import warm_start
from rllm_lightning.workflows.distill import DistillWorkflow
from rllm_lightning.workflows.engine import UnifiedWorkflowEngine, check_workflow_args

TASK = {"id": "t", "question": "say a", "data_source": "letters"}
TEACHER = "rllm.workflow.workflow_args.teacher"


def reward(task, response):
    return 1.0


def save(folder, model, tokenizer):
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """A model that has been taught to answer with one or two letters; a fresh one finds all tokens about equally likely."""
    policy = Policy(*tiny_model(3))
    settings = ["warm_start.steps=40", "warm_start.batch_size=16", "warm_start.learning_rate=3e-3"]
    tasks = [{"id": f"{i}", "question": f"say {i}", "solution": "ab"[: 1 + i % 2]} for i in range(8)]
    asyncio.run(warm_start(policy, tasks, Config.from_config(load_config(settings))))
    folder = tmp_path_factory.mktemp("teacher")
    policy.save(folder)
    return str(folder)


@pytest.fixture
def student():
    return tiny_model(0)


@pytest.fixture
def play(student):
    """play(teacher, temperature) -> the episodes of four rollouts of one task."""

    def run(teacher, temperature=1.0, **overrides):
        sampling = SamplingParams(temperature=temperature, max_tokens=8)
        engine = HFEngine(EngineSetup(*student, train=sampling, val=sampling))
        workflows = UnifiedWorkflowEngine(DistillWorkflow, {"reward_function": reward, "teacher": teacher}, engine, raise_on_error=True)
        return asyncio.run(workflows.execute_tasks([TASK] * 4, **overrides))

    return run


def loaded(folder):
    return AutoModelForCausalLM.from_pretrained(folder)


def steps_of(episodes):
    return [step for episode in episodes for trajectory in episode.trajectories for step in trajectory.steps]


def by_definition(model, step, temperature):
    """log softmax(logits / temperature) of all positions, in float64, at the sampled tokens."""
    model = model.double()
    with torch.no_grad():
        all_logprobs = (model(torch.tensor([step.prompt_ids + step.response_ids])).logits[0] / temperature).log_softmax(-1)
    first = len(step.prompt_ids)
    return [float(all_logprobs[first + t - 1, token]) for t, token in enumerate(step.response_ids)]


# ---------------------------------------------------------------------------------------------------------------- numbers


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_advantages_are_the_teachers_log_probs_minus_the_students_token_by_token(play, teacher, student, temperature):
    episodes = play(teacher, temperature)
    groups, _ = transform_episodes_to_trajectory_groups(episodes, TransformConfig())
    collect_reward_and_advantage_from_trajectory_groups(groups, AlgorithmConfig(estimator="distill"))
    steps = steps_of(episodes)
    assert len({tuple(step.response_ids) for step in steps}) > 1
    for episode, step in zip(episodes, steps, strict=True):
        its, own = by_definition(loaded(teacher), step, temperature), by_definition(student[0], step, temperature)
        assert step.info["teacher_logprobs"] == pytest.approx(its, abs=1e-4)
        assert step.advantage == pytest.approx([i - o for i, o in zip(its, own, strict=True)], abs=2e-4)
        assert episode.metrics["reverse_kl"] == pytest.approx(-sum(step.advantage) / len(step.advantage))
        assert max(map(abs, step.advantage)) > 1


def test_a_student_that_is_its_teacher_has_nothing_to_learn(play, student, tmp_path):
    for step in steps_of(play(save(tmp_path, *student), temperature=0.7)):
        assert step.info["teacher_logprobs"] == pytest.approx(step.logprobs, abs=1e-4)


def test_greedy_answers_are_scored_at_temperature_1(play, teacher):
    step = steps_of(play(teacher, temperature=0.5, mode="greedy"))[0]
    assert step.info["teacher_logprobs"] == pytest.approx(by_definition(loaded(teacher), step, 1.0), abs=1e-4)


# --------------------------------------------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, rf"{TEACHER}: name the model to learn from"),
        ({"teacher": "builtin:huge"}, rf"{TEACHER}\.name: no built-in model 'builtin:huge'"),
        ({"teacher": "./models/model.name"}, rf"{TEACHER}\.name: no folder './models/model\.name'"),
        ({"teacher": {"name": "builtin:tiny", "dtipe": "float32"}}, rf"{TEACHER}\.dtipe: unknown key; did you mean {TEACHER}\.dtype"),
        ({"teacher": {"dtype": "int8"}}, rf"{TEACHER}\.dtype"),
    ],
)
def test_a_teacher_that_cannot_be_is_refused_before_there_is_a_model(given, message):
    with pytest.raises(ValueError, match=message):
        check_workflow_args(DistillWorkflow, {"reward_function": reward, **given})


def test_a_teacher_with_another_vocabulary_is_refused(play, tmp_path):
    """Its token 20 is another text than the student's."""
    model, tokenizer = tiny_model(3)
    tokenizer.add_tokens(["ab"])
    model.resize_token_embeddings(len(tokenizer))
    with pytest.raises(ConfigError, match=rf"{TEACHER}\.name: the teacher .* another vocabulary than the student: 104 and 103 .* as 'ab'"):
        play(save(tmp_path, model, tokenizer))


def test_an_engine_without_the_trained_model_is_refused():
    engine = ScriptedEngine(EngineSetup(), answers=["a"])
    with ThreadPoolExecutor(1) as executor, pytest.raises(ConfigError, match=r"rollout_engine\.name: distillation needs"):
        DistillWorkflow(engine, executor, reward, "builtin:tiny")


def test_a_prompt_and_response_beyond_the_teachers_positions_are_an_error(play, tmp_path):
    model, tokenizer = tiny_model(3)
    model.config.max_position_embeddings = 4
    with pytest.raises(Exception, match=r"4 positions, fewer than the .* lower data"):
        play(save(tmp_path, model, tokenizer))


# ------------------------------------------------------------------------------------------------------------------- runs


@pytest.fixture
def run(tmp_path, capfd):
    def call(*argv):
        common = ["rllm.trainer.logger=[csv]", "rllm.trainer.test_freq=-1", "rllm.trainer.val_before_train=false", f"run_root={tmp_path}"]
        code = run_script.main(["distill", *common, "data.train_batch_size=8", "task.train_size=64", "task.val_size=2", *argv])
        assert code == 0, capfd.readouterr().err
        (folder,) = (tmp_path / "rllm-lightning").glob("*")
        with open(folder / "metrics.csv", newline="") as file:
            return folder, list(csv.DictReader(file))

    return call


def test_the_preset_distill_runs(run, teacher):
    folder, rows = run("rllm.trainer.total_batches=2", "warm_start.steps=2", f"{TEACHER}={teacher}")
    assert [row["step"] for row in rows] == ["1", "2"]
    episodes = [json.loads(line) for line in (folder / "episodes" / "train_step_1.jsonl").read_text().splitlines()]
    for episode in episodes:
        (step,) = episode["trajectories"][0]["steps"]
        expected = [its - own for its, own in zip(step["info"]["teacher_logprobs"], step["logprobs"], strict=True)]
        assert step["advantage"] == pytest.approx(expected)


def test_the_student_comes_nearer_to_its_teacher(run, teacher):
    """Rewards are not looked at: nobody here can spell."""
    learning = ["training.learning_rate=3e-3", "data.max_response_length=3", "rllm.trainer.total_batches=15"]
    _, rows = run(*learning, "warm_start.steps=0", "rllm.algorithm.lr_schedule=constant", f"{TEACHER}={teacher}")
    divergence = [float(row["batch/reverse_kl"]) for row in rows]
    assert sum(divergence[-3:]) < 0.6 * sum(divergence[:3])
