"""`solver_judge`: several answers to one task, and a judge, the same model, that chooses among them.

    task --the same question, n times--> n answers --"which one is right?"--> a number --> the chosen answer

Each role has trajectories of its own, so each can have an estimator and a loss of its own:

    rllm.algorithm.estimator_map={solver: rloo, judge: [reinforce_plus_plus_baseline, ppo]}
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from typing import Any

from rllm_lightning.registry import register_workflow
from rllm_lightning.rollout.engine import EngineSetup, RolloutEngine
from rllm_lightning.rollout.scripted import ScriptedEngine
from rllm_lightning.types import Episode, Step, TerminationReason, Trajectory
from rllm_lightning.workflows.reward import RewardFunction, score
from rllm_lightning.workflows.single_turn import chat_of
from rllm_lightning.workflows.workflow import Workflow

SOLVER, JUDGE = "solver", "judge"
JUDGE_PROMPT = "{question}\n\n{answers}\n\nWhich of these answers is right? Reply with its number."
_PLACE = re.compile(r"\{question\}|\{answers\}")
_NUMBER = re.compile(r"\d+")


@register_workflow("solver_judge")
class SolverJudgeWorkflow(Workflow):
    """`n_solvers` trajectories called `solver` and one called `judge`, each of one step.

    A solver's reward is the score of its answer; the judge's is the score of the answer that it chose, 0 where its reply names none.
    The episode is correct where the chosen answer is, and ends as `MAX_RESPONSE_LENGTH_EXCEEDED` where any reply was cut. A judge's
    prompt over the limit ends it as `MAX_PROMPT_LENGTH_EXCEEDED`, with the solvers' trajectories.

    Args:
        reward_function: `(task, response) -> float | RewardOutput`, may be async.
        n_solvers: answers to choose from.
        judge_prompt: what the judge is asked; `{question}` and `{answers}` are filled in, the answers numbered from 1.
        judge_advantage: the judge's step brings its own advantage: its reward minus the mean score of the answers, which is what a
            blind choice gets. Taken where `rllm.algorithm.use_precomputed_advantage` is true; solvers go through their estimator.
        system_prompt: system message put before each solver's messages.

    Metrics of an episode: `solver_acc`, `judge_acc`, `best_solver_acc` (the best answer's score, what a perfect judge would get)
    and `judge_readable` (1 where the reply names an answer). Keywords of `run` are sampling overrides.
    """

    def __init__(
        self,
        rollout_engine: RolloutEngine,
        executor: Executor,
        reward_function: RewardFunction,
        n_solvers: int = 2,
        judge_prompt: str = JUDGE_PROMPT,
        judge_advantage: bool = False,
        system_prompt: str | None = None,
        **kwargs: Any,
    ):
        super().__init__(rollout_engine, executor, **kwargs)
        if not callable(reward_function):
            raise ValueError(f"solver_judge: reward_function must be a function of (task, response), got {reward_function!r}")
        if n_solvers < 1:
            raise ValueError(f"rllm.workflow.workflow_args.n_solvers: must be at least 1, got {n_solvers}")
        if missing := [name for name in ("{question}", "{answers}") if name not in judge_prompt]:
            raise ValueError(f"rllm.workflow.workflow_args.judge_prompt: lacks {' and '.join(missing)}, got {judge_prompt!r}")
        self.reward_function = reward_function
        self.n_solvers = n_solvers
        self.judge_prompt = judge_prompt
        self.judge_advantage = judge_advantage
        self.system_prompt = system_prompt

    @classmethod
    def check_arguments(cls, arguments: Mapping[str, Any]) -> None:
        if cls.__init__ is SolverJudgeWorkflow.__init__ and "reward_function" in arguments:
            cls(ScriptedEngine(EngineSetup(), answers=["-"]), Executor(), **arguments)

    async def run(self, task: dict[str, Any], uid: str, **kwargs: Any) -> Episode:
        solvers = await asyncio.gather(*(self._solve(task, kwargs) for _ in range(self.n_solvers)))
        for solver in solvers:
            self.commit(trajectory=solver)
        judge = await self._judge(task, solvers, kwargs)
        episode = self.postprocess_episode(Episode(trajectories=[*solvers, judge]), _reason([*solvers, judge]))
        rewards = [solver.steps[0].reward for solver in solvers]
        episode.metrics |= {"best_solver_acc": max(rewards), "judge_readable": float(judge.info["choice"] is not None)}
        return episode

    async def _solve(self, task: dict[str, Any], sampling: dict[str, Any]) -> Trajectory:
        messages = chat_of(task, self.system_prompt)
        output = await self.rollout_engine.get_model_response(messages, **sampling)
        step = Step.from_model_output(output, messages)
        step.action = step.model_response
        outcome = await score(self.reward_function, task, step.model_response)
        step.reward, step.done = outcome.reward, True
        is_correct = outcome.reward > 0 if outcome.is_correct is None else outcome.is_correct
        return Trajectory(name=SOLVER, task=task, steps=[step], info=outcome.metadata | {"is_correct": is_correct})

    async def _judge(self, task: dict[str, Any], solvers: list[Trajectory], sampling: dict[str, Any]) -> Trajectory:
        answers = [solver.steps[0].model_response for solver in solvers]
        messages = [{"role": "user", "content": self._question_for_judge(task, answers)}]
        output = await self.rollout_engine.get_model_response(messages, **sampling)
        step = Step.from_model_output(output, messages)
        choice = read_choice(step.model_response, answers)
        step.action, step.done = choice, True
        scores = [solver.steps[0].reward for solver in solvers]
        step.reward = 0.0 if choice is None else scores[choice]
        if self.judge_advantage:
            step.advantage = step.reward - sum(scores) / len(scores)
        is_correct = choice is not None and solvers[choice].info["is_correct"]
        return Trajectory(name=JUDGE, task=task, steps=[step], info={"choice": choice, "is_correct": is_correct})

    def _question_for_judge(self, task: dict[str, Any], answers: list[str]) -> str:
        numbered = "\n".join(f"{number}: {answer}" for number, answer in enumerate(answers, start=1))
        question = next(message["content"] for message in reversed(chat_of(task)) if message["role"] == "user")
        filled = {"{question}": question, "{answers}": numbered}
        return _PLACE.sub(lambda place: filled[place.group()], self.judge_prompt)  # in one pass: an answer may hold a place's name

    def assign_episode_correctness(self, episode: Episode) -> None:
        """Correct where the judge chose a correct answer."""
        episode.is_correct = any(t.info["is_correct"] for t in episode.trajectories if t.name == JUDGE)


def read_choice(reply: str, answers: Sequence[str]) -> int | None:
    """Which of the answers a reply names, as its position from 0: by the last number in it, counted from 1, else by repeating the
    answer (the first of equal ones). None where it does neither."""
    numbers = _NUMBER.findall(reply)
    number = int(numbers[-1]) if numbers and len(numbers[-1]) < 10 else 0
    if 1 <= number <= len(answers):
        return number - 1
    return next((position for position, answer in enumerate(answers) if reply.strip() and reply.strip() == answer.strip()), None)


def _reason(trajectories: list[Trajectory]) -> TerminationReason:
    outputs = [step.model_output for trajectory in trajectories for step in trajectory.steps]
    cut = any(output is not None and output.finish_reason == "length" for output in outputs)
    return TerminationReason.MAX_RESPONSE_LENGTH_EXCEEDED if cut else TerminationReason.ENV_DONE
