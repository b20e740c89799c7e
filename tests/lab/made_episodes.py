"""Run folders that hold nothing but a config and training episodes: `make_log(folder, [{"a": [1, 0]}, ...])`."""

from rllm_lightning.config import Config, load_config
from rllm_lightning.tracking.episode_logger import EpisodeLogger
from rllm_lightning.tracking.run_directory import RunDirectory
from rllm_lightning.types import Episode, Step, TerminationReason, Trajectory

KEYS = ["model.name=builtin:tiny", "task.name=reasoning_gym", "rllm.trainer.logger=[csv]"]


def make_episode(task, index, reward, *, length=2, text="", reason=TerminationReason.ENV_DONE, advantage=None, info=None, step_info=None):
    """One trajectory of one step; `reward` None leaves it without."""
    step = Step(
        prompt_ids=[1, 2],
        response_ids=[3] * length,
        logprobs=[-0.5] * length,
        chat_completions=[{"role": "user", "content": f"what is {task}?"}],
        model_response=text or f"answer {index}",
        reward=reward,
        advantage=advantage,
        info=step_info or {},
    )
    trajectory = Trajectory(uid=f"{task}-{index}", name="solver", steps=[step], reward=reward, info=info or {})
    return Episode(id=f"{task}:{index}", trajectories=[trajectory], termination_reason=reason, is_correct=reward == 1)


def make_log(folder, batches, *overrides):
    """A run folder; `batches`: for each step task -> rewards, or a list of episodes; None: no file. Returns its path."""
    config = Config.from_config(load_config([*KEYS, f"run_root={folder}", *overrides]))
    run = RunDirectory.create(config)
    logger = EpisodeLogger(run.episodes)
    for step, batch in enumerate(batches, start=1):
        if isinstance(batch, dict):
            batch = [make_episode(task, i, reward) for task, rewards in batch.items() for i, reward in enumerate(rewards)]
        if batch is not None:
            logger.log(batch, "train", step)
    return run.path
