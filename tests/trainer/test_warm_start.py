"""Supervised steps before reinforcement learning."""

import asyncio

import pytest
import torch

from rllm_lightning.config import ConfigError, load_config
from rllm_lightning.models.load import cache_folder
from rllm_lightning.models.tiny import tiny_model
from rllm_lightning.rollout.chat import Chat
from rllm_lightning.trainer import warm_start as module
from rllm_lightning.trainer.policy import Policy
from rllm_lightning.trainer.warm_start import draw_examples, solution_row, warm_start
from tests.trainer.conftest import SMALL, make_tasks

SETTINGS = ["warm_start.steps=30", "warm_start.batch_size=8", "warm_start.learning_rate=1e-2"]


def config_of(*overrides):
    return load_config([*SMALL, *SETTINGS, *overrides])


def typed(*overrides):
    from rllm_lightning.config import Config

    return Config.from_config(config_of(*overrides))


def policy_of(seed=0):
    return Policy(*tiny_model(seed))


@pytest.fixture(autouse=True)
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("RLLM_LIGHTNING_CACHE", str(tmp_path / "cache"))


def logprob_of_solutions(policy, tasks):
    chat = Chat(policy.tokenizer)
    rows = [
        solution_row(chat, chat.stop_ids(policy.model.generation_config), ([{"role": "user", "content": t["question"]}], t["solution"]))
        for t in tasks
    ]
    with torch.no_grad():
        return sum(float(policy(micro).logprobs.sum()) for micro in policy.micro_batches(rows, 10_000)) / len(rows)


def test_the_policy_learns_the_solutions_and_their_end():
    policy, tasks = policy_of(), make_tasks(4)
    before = logprob_of_solutions(policy, tasks)
    asyncio.run(warm_start(policy, tasks, typed("warm_start.steps=80")))
    assert before < -5  # two tokens of about log(1/100) each
    assert logprob_of_solutions(policy, tasks) > -0.5


def test_a_row_is_the_chat_the_solution_and_the_end_token():
    policy = policy_of()
    chat = Chat(policy.tokenizer)
    row = solution_row(chat, chat.stop_ids(policy.model.generation_config), ([{"role": "user", "content": "say a"}], "a"))
    assert policy.tokenizer.decode(row.prompt_ids) == "<|user|>say a<|end|><|assistant|>"
    assert policy.tokenizer.decode(row.response_ids) == "a<|end|>"


def test_a_second_run_takes_the_result_from_the_cache(monkeypatch):
    first, second = policy_of(), policy_of()
    asyncio.run(warm_start(first, make_tasks(4), typed()))
    assert len(list((cache_folder() / "warm_start").iterdir())) == 1  # no scratch file either
    monkeypatch.setattr(module, "_train", lambda *args: pytest.fail("trained again"))
    asyncio.run(warm_start(second, make_tasks(4), typed()))
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("overrides", "tasks", "seed"),
    [
        (["warm_start.steps=31"], make_tasks(4), 0),
        (["seed=1"], make_tasks(4), 0),
        ([], make_tasks(5), 0),
        ([], make_tasks(4), 1),
        (["warm_start.learning_rate=2e-2"], make_tasks(4), 0),
    ],
)
def test_whatever_shapes_the_result_has_a_place_of_its_own_in_the_cache(overrides, tasks, seed):
    asyncio.run(warm_start(policy_of(), make_tasks(4), typed()))
    asyncio.run(warm_start(policy_of(seed), tasks, typed(*overrides)))
    assert len(list((cache_folder() / "warm_start").iterdir())) == 2


def test_examples_go_over_the_data_epoch_after_epoch():
    drawn = [solution for _, solution in draw_examples(make_tasks(5), 12, typed())]
    assert sorted(drawn[:5]) == sorted(drawn[5:10]) == list("abcde")
    assert drawn[:5] != drawn[5:10]
    assert drawn == [solution for _, solution in draw_examples(make_tasks(5), 12, typed())]


def test_a_share_of_the_demonstrations_can_be_wrong():
    tasks = make_tasks(26)
    for share, expected in ((0.0, 0), (1.0, 25), (0.5, 12)):  # of 26, about one in 26 draws its own solution
        drawn = draw_examples(tasks, 26, typed(f"warm_start.wrong_solutions={share}"))
        wrong = sum(chat[0]["content"][-1] != solution for chat, solution in drawn)
        assert abs(wrong - expected) <= (0 if share == 0 else 4)


def test_a_task_without_a_solution_is_refused_by_name():
    tasks = make_tasks(2)
    del tasks[1]["solution"]
    with pytest.raises(ConfigError, match=r"letters:1.*warm_start\.steps=0"):
        asyncio.run(warm_start(policy_of(), tasks, typed()))
