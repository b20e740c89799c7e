"""`distill`: on-policy distillation. The model answers, and a teacher says of each sampled token how likely it finds it.

    task --> the student's answer, its tokens and their log-probs --> the teacher's log-probs of the same tokens
                                                                            └── adv_estimator=distill: teacher's minus student's

The mean of that difference over the student's own samples is minus the reverse KL divergence KL(student || teacher), so that a policy
gradient with it brings the student to the teacher where the student goes. Tokens are never encoded again: both models must have
one vocabulary.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from concurrent.futures import Executor
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

from rllm_lightning import schema
from rllm_lightning.config import ConfigError, ModelConfig
from rllm_lightning.registry import register_workflow
from rllm_lightning.rollout.engine import RolloutEngine, current_request
from rllm_lightning.types import Episode
from rllm_lightning.workflows.reward import RewardFunction
from rllm_lightning.workflows.single_turn import SingleTurnWorkflow

KEY = "rllm.workflow.workflow_args.teacher"
_OF_MODEL = re.compile(rf"(?<![\w./-])model\.(?=(?:{'|'.join(field.name for field in dataclasses.fields(ModelConfig))})\b)")


@register_workflow("distill")
class DistillWorkflow(SingleTurnWorkflow):
    """One model call a task, as in `single_turn`, whose tokens a teacher scores; for `rllm.algorithm.adv_estimator=distill`.

    Each step gets `info["teacher_logprobs"]`, one a response token, of the teacher's distribution at the student's sampling
    temperature (1 where that is greedy). The task's own reward is measured and logged; the estimator does not look at it.

    Args:
        teacher: a model as in `model.name`, or a mapping with keys of `model` (`{name: ..., dtype: bfloat16}`). It must have the student's
            vocabulary; it is given the student's prompt as it is.
        reward_function, system_prompt: as in `single_turn`.

    Metrics of an episode: `reverse_kl`, the student's log-prob minus the teacher's, averaged over the response's tokens.
    """

    provides: ClassVar[frozenset[str]] = frozenset({"teacher_logprobs"})

    def __init__(
        self,
        rollout_engine: RolloutEngine,
        executor: Executor,
        reward_function: RewardFunction,
        teacher: str | Mapping[str, Any] | None = None,
        **kwargs: Any,
    ):
        super().__init__(rollout_engine, executor, reward_function, **kwargs)
        self._teacher = teacher_of(rollout_engine, teacher_config(teacher))

    @classmethod
    def check_arguments(cls, arguments: Mapping[str, Any]) -> None:
        from rllm_lightning.models.load import check_model

        config = teacher_config(arguments.get("teacher"))
        try:
            check_model(config)
        except ConfigError as error:
            raise _about_the_teacher(error) from error

    async def run(self, task: dict[str, Any], uid: str, **kwargs: Any) -> Episode:
        temperature = self.rollout_engine.params_for(current_request(), kwargs).temperature or 1.0
        episode = await super().run(task, uid, **kwargs)
        for trajectory in episode.trajectories:
            for step in trajectory.steps:
                step.info["teacher_logprobs"] = scores = self._teacher.logprobs(step.prompt_ids, step.response_ids, temperature)
                episode.metrics["reverse_kl"] = sum(own - its for own, its in zip(step.logprobs, scores, strict=True)) / len(scores)
        return episode


def teacher_config(given: str | Mapping[str, Any] | None) -> ModelConfig:
    """The teacher as it is to be loaded.

    Raises:
        ConfigError: there is none, or a key or value is not one of `model`.
    """
    if not given:
        raise ConfigError([f"{KEY}: name the model to learn from, as in model.name; for instance RUN_DIR/checkpoints/model of another run"])
    problems: list[str] = []
    config = schema.build(ModelConfig, {"name": given} if isinstance(given, str) else given, problems, f"{KEY}.", ModelConfig)
    if problems:
        raise ConfigError(problems)
    return config


# One teacher for all the workflows of an engine, for as long as the engine is there.
_teachers: WeakKeyDictionary[RolloutEngine, dict[str, Any]] = WeakKeyDictionary()


def teacher_of(engine: RolloutEngine, config: ModelConfig) -> Any:
    """The teacher, beside the student that the engine samples from.

    Raises:
        ConfigError: the engine does not sample from a model whose tokenizer is known, or the teacher cannot be used with it.
    """
    model, tokenizer = engine.setup.model, engine.setup.tokenizer
    if model is None or tokenizer is None:
        raise ConfigError(["rollout_engine.name: distillation needs the tokens of the model that is trained; choose hf"])
    loaded = _teachers.setdefault(engine, {})
    if (key := repr(config)) not in loaded:
        from rllm_lightning.rollout.teacher import Teacher

        try:
            loaded[key] = Teacher(config, tokenizer, next(model.parameters()).device)
        except ConfigError as error:
            raise _about_the_teacher(error) from error
    return loaded[key]


def _about_the_teacher(error: ConfigError) -> ConfigError:
    """What is said of the keys of `model`, said of the teacher's."""
    return ConfigError([_OF_MODEL.sub(f"{KEY}.", problem) for problem in error.problems])
