"""The model and an environment by turns: what each step holds, and every way in which an episode ends."""

import asyncio
import copy
import math
import time

import pytest

from rllm_lightning.models.tiny import tiny_tokenizer
from rllm_lightning.rollout.chat import Chat
from rllm_lightning.rollout.conversations import Conversations, Span
from rllm_lightning.rollout.engine import EngineSetup, SamplingParams
from rllm_lightning.rollout.scripted import ScriptedEngine
from rllm_lightning.types import ModelOutput, TerminationReason
from rllm_lightning.workflows.engine import check_workflow_args
from rllm_lightning.workflows.multi_turn import MultiTurnWorkflow

TASK = {"id": "t", "question": "2+2?", "answer": "4", "data_source": "sums"}
AGAIN = "That is not right. Try again."


def right(task, response):
    return float(response == task["answer"])


class Counter:
    """Says how often it was acted on; done after `length` actions, which earn 1, 2, 3, ..."""

    def __init__(self, *, length: int = 3):
        self.length = length

    def reset(self, task):
        self.acted = 0
        return "begin"

    def step(self, action):
        self.acted += 1
        return f"{self.acted} so far", self.acted, self.acted == self.length, {"note": action, "metrics": {"acted": self.acted}}


def test_every_turn_is_a_step_with_its_prompt_reply_reward_and_info(play):
    episode = play(MultiTurnWorkflow, ["a", "b", "c"], TASK, environment=Counter)
    (trajectory,) = episode.trajectories
    assert (trajectory.name, trajectory.task, trajectory.reward) == ("agent", TASK, 6.0)  # 1 + 2 + 3
    assert [step.reward for step in trajectory.steps] == [1.0, 2.0, 3.0]
    assert [step.done for step in trajectory.steps] == [False, False, True]
    assert [step.action for step in trajectory.steps] == ["a", "b", "c"]
    assert [step.observation for step in trajectory.steps] == ["begin", "1 so far", "2 so far"]
    assert [step.info["note"] for step in trajectory.steps] == ["a", "b", "c"]
    assert [message["content"] for message in trajectory.steps[2].chat_completions] == ["begin", "a", "1 so far", "b", "2 so far", "c"]
    assert trajectory.is_cumulative()
    assert episode.termination_reason is TerminationReason.ENV_DONE
    assert episode.metrics == {"agent_acc": 6.0, "num_turns": 3.0, "acted": 3}
    assert episode.is_correct


def test_step_rewards_are_shaped_and_discounted_while_the_trajectorys_stays(play):
    """Rewards 1, 2, 3, bonus .5: 1, 2.5, 3.5; returns at gamma .5: 3.5, 2.5+1.75=4.25, 1+2.125=3.125."""
    (trajectory,) = play(MultiTurnWorkflow, "abc", TASK, environment=Counter, gamma=0.5, reward_bonus_coeff=0.5).trajectories
    assert [step.reward for step in trajectory.steps] == [3.125, 4.25, 3.5]
    assert [step.mc_return for step in trajectory.steps] == [3.125, 4.25, 3.5]
    assert trajectory.reward == 6.0


# ------------------------------------------------------------------------------------------------------------------- the end


def test_the_turn_limit_ends_an_episode(play):
    episode = play(MultiTurnWorkflow, "abcdef", TASK, environment=Counter, environment_args={"length": 9}, max_turns=2)
    assert episode.termination_reason is TerminationReason.MAX_TURNS_EXCEEDED
    assert [step.reward for step in episode.trajectories[0].steps] == [1.0, 2.0]


def test_an_environment_that_is_done_at_the_last_turn_is_done(play):
    episode = play(MultiTurnWorkflow, "abc", TASK, environment=Counter, max_turns=3)
    assert episode.termination_reason is TerminationReason.ENV_DONE


def test_a_cut_reply_is_an_action_and_ends_the_episode(play):
    """B26: cap 3, the second reply has 5 characters: `long`[:3] is acted on, and never reported as stopped."""
    episode = play(MultiTurnWorkflow, ["ab", "long", "c"], TASK, max_tokens=3, environment=Counter, environment_args={"length": 2})
    steps = episode.trajectories[0].steps
    assert episode.termination_reason is TerminationReason.MAX_RESPONSE_LENGTH_EXCEEDED
    assert [step.action for step in steps] == ["ab", "lon"]
    assert [step.model_output.finish_reason for step in steps] == ["stop", "length"]
    assert steps[1].done  # what the environment says is kept


def test_a_prompt_over_the_limit_ends_the_episode_with_the_turns_before_it(play):
    """B26: an explicit reason, never a cut prompt. "user: begin" + END + "assistant: " are 23 tokens, the next prompt has 51."""
    episode = play(MultiTurnWorkflow, "abc", TASK, max_prompt_length=50, environment=Counter)
    (trajectory,) = episode.trajectories
    assert episode.termination_reason is TerminationReason.MAX_PROMPT_LENGTH_EXCEEDED
    assert [len(step.prompt_ids) for step in trajectory.steps] == [23]
    assert trajectory.reward == 1.0
    assert play(MultiTurnWorkflow, "abc", TASK, max_prompt_length=51, environment=Counter).metrics["num_turns"] == 2.0


def test_a_first_prompt_over_the_limit_leaves_no_trajectory(play):
    episode = play(MultiTurnWorkflow, "abc", TASK, max_prompt_length=22, environment=Counter)
    assert (episode.termination_reason, episode.trajectories) == (TerminationReason.MAX_PROMPT_LENGTH_EXCEEDED, [])


@pytest.mark.parametrize(("limit", "replies", "tokens"), [(6, ["ab", "cd", "ef"], [3, 3]), (5, ["ab", "cd", "ef"], [3, 2])])
def test_the_token_limit_of_an_episode_counts_all_turns(play, limit, replies, tokens):
    """Each reply has 3 tokens with its END. 6: none are left for a third turn; 5: the second reply is cut after 2."""
    episode = play(MultiTurnWorkflow, replies, TASK, environment=Counter, max_episode_tokens=limit)
    assert episode.termination_reason is TerminationReason.MAX_RESPONSE_LENGTH_EXCEEDED
    assert [len(step.response_ids) for step in episode.trajectories[0].steps] == tokens


def test_a_timeout_keeps_the_turns_that_were_finished(play):
    class Slow(Counter):
        async def step(self, action):
            if self.acted == 1:
                await asyncio.sleep(30)
            return super().step(action)

    start = time.monotonic()
    episode = play(MultiTurnWorkflow, "abc", TASK, environment=Slow, timeout=0.2)
    assert episode.termination_reason is TerminationReason.TIMEOUT
    assert [step.action for step in episode.trajectories[0].steps] == ["a"]
    assert time.monotonic() - start < 20


class Failing(Counter):
    def __init__(self, *, result):
        super().__init__()
        self.result = result

    def step(self, action):
        if self.acted == 1:
            if isinstance(self.result, Exception):
                raise self.result
            return self.result
        return super().step(action)


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (KeyError("lost"), "lost"),
        (None, "expected (observation, reward, done, info)"),
        (("next", 1.0, False), "expected (observation, reward, done, info)"),
        (("next", None, False, {}), "the reward None"),
        (("next", math.nan, False, {}), "the reward nan"),
        ((None, 1.0, False, {}), "no observation"),
        ((3, 1.0, False, {}), "an observation must be text"),
    ],
)
def test_an_environment_that_fails_is_an_error_and_nothing_of_it_is_trained_on(play, result, message):
    """B05: the first turn was fine, and yet its reward would be of an episode whose outcome nobody knows."""
    episode = play(MultiTurnWorkflow, "abc", TASK, environment=Failing, environment_args={"result": result})
    assert episode.termination_reason is TerminationReason.ERROR
    assert message in episode.info["error"]["error_message"]
    assert episode.trajectories == []


def test_an_episode_is_correct_as_its_environment_last_said(play):
    class Undone(Counter):
        def step(self, action):
            observation, reward, done, _ = super().step(action)
            return observation, reward, done, {"is_correct": action == "right"}

    def is_correct(*replies):
        return play(MultiTurnWorkflow, replies, TASK, environment=Undone, max_turns=2).is_correct

    assert is_correct("wrong", "right")
    assert not is_correct("right", "wrong")  # though the reward is above 0


# ------------------------------------------------------------------------------------------------------------ environments


def test_an_environment_may_be_async_and_speak_in_messages(play):
    class Async:
        async def reset(self, task):
            return [{"role": "user", "content": "one"}, {"role": "user", "content": "two"}]

        async def step(self, action):
            return {"role": "user", "content": "three"}, 1, action == "b", None

    (trajectory,) = play(MultiTurnWorkflow, "ab", TASK, environment=Async).trajectories
    assert [m["content"] for m in trajectory.steps[1].chat_completions] == ["one", "two", "a", "three", "b"]
    assert trajectory.reward == 2.0


def test_a_system_prompt_comes_first(play):
    (trajectory,) = play(MultiTurnWorkflow, "abc", TASK, environment=Counter, system_prompt="be brief").trajectories
    assert trajectory.steps[0].chat_completions[0] == {"role": "system", "content": "be brief"}


def test_without_an_own_state_key_a_state_is_the_conversation(play):
    one, same, other = (
        play(MultiTurnWorkflow, replies, TASK, environment=Counter).trajectories[0].steps for replies in ("abc", "abd", "xbc")
    )
    key = [[step.info["state_key"] for step in steps] for steps in (one, same, other)]
    assert key[0] == key[1]  # the last action is not part of the state it was taken in
    assert len(set(key[0])) == 3
    assert key[0][0] == key[2][0]
    assert key[0][1] != key[2][1]


def test_workflows_do_not_share_an_environment(executor, engine):
    first, second = (MultiTurnWorkflow(engine, executor, environment=Counter) for _ in range(2))
    assert first.environment is not second.environment


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"environment": "gridwrld"}, r"workflow_args.environment: unknown environment 'gridwrld'; did you mean 'gridworld'"),
        ({"environment": 3}, "environment: expected a registered name, a class or a function"),
        ({"environment": Counter, "environment_args": {"lenth": 2}}, "environment_args.lenth: .* did you mean length"),
        ({"environment": Counter, "environment_args": {"length": "two"}}, "environment_args.length: expected a whole number"),
        ({"environment": Failing}, "cannot make 'Failing'.*result"),
        ({"environment": "retry"}, "needs a reward function"),
        ({"environment": Counter, "max_turns": 0}, "max_turns: must be at least 1"),
        ({"environment": Counter, "max_episode_tokens": 0}, "max_episode_tokens: must be at least 1"),
        ({"environment": Counter, "tools": ["no_such_module:f"]}, "cannot import 'no_such_module:f'"),
    ],
)
def test_a_mistake_in_the_arguments_is_found_before_there_is_a_model(arguments, message):
    with pytest.raises(ValueError, match=message):
        check_workflow_args(MultiTurnWorkflow, arguments)


def test_arguments_of_an_environment_get_its_types(executor, engine):
    workflow = MultiTurnWorkflow(engine, executor, environment=Counter, environment_args={"length": 4.0})
    assert (workflow.environment.length, type(workflow.environment.length)) == (4, int)


# ------------------------------------------------------------------------------------------------------------------- tokens


class OddSampler(ScriptedEngine):
    """Answers `xab` in the pieces x, a, b, where encoding would choose x, ab; otherwise an engine over a chat template."""

    def __init__(self, tokenizer):
        super().__init__(EngineSetup(tokenizer=tokenizer, train=SamplingParams()), answers=["-"])
        self.chat = Chat(tokenizer)
        self.conversations = Conversations(self.chat)
        self.odd = [*tokenizer.convert_tokens_to_ids(["x", "a", "b"]), tokenizer.eos_token_id]

    async def get_model_response(self, messages, *, tools=None, **overrides):
        prompt = self.conversations.prompt("run", messages, tools)
        self.conversations.remember("run", prompt, Span("xab<|end|>", self.odd))
        return ModelOutput(text="xab", prompt_ids=prompt.ids, completion_ids=self.odd, logprobs=[-1.0] * 4, finish_reason="stop")


def test_a_later_prompt_is_the_earlier_one_and_the_sampled_tokens_and_only_then_new_ones(executor):
    """B24: one word in two odd pieces, then the environment's message, then turn 2, and a third."""
    tokenizer = copy.deepcopy(tiny_tokenizer())
    tokenizer.add_tokens(["ab"])
    engine = OddSampler(tokenizer)
    assert engine.chat.encode("xab") != engine.odd[:-1]
    workflow = MultiTurnWorkflow(engine, executor, environment=Counter)
    (trajectory,) = asyncio.run(workflow.run_with_termination_handling(TASK, "t:0")).trajectories
    first, second, third = trajectory.steps
    assert second.prompt_ids == first.prompt_ids + engine.odd + engine.chat.encode("<|user|>1 so far<|end|><|assistant|>")
    assert third.prompt_ids == second.prompt_ids + engine.odd + engine.chat.encode("<|user|>2 so far<|end|><|assistant|>")
    assert [len(step.logprobs) for step in trajectory.steps] == [4, 4, 4]  # one a sampled token, none for what was told
