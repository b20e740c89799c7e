"""A scripted engine, threads, and short ways to run one workflow on one task."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest

from rllm_lightning.rollout.engine import REQUEST, EngineSetup, RequestContext, SamplingParams
from rllm_lightning.rollout.scripted import ScriptedEngine


@pytest.fixture
def engine():
    return ScriptedEngine(EngineSetup(), answers=["a", "b", "c"])


@pytest.fixture
def executor():
    with ThreadPoolExecutor(2) as threads:
        yield threads


@pytest.fixture
def play(executor):
    """play(workflow_class, replies, task, **arguments) -> the episode in which the model gives these replies, one after the other."""

    def run(workflow_class, replies, task, max_tokens=1024, max_prompt_length=4096, **arguments):
        left = iter(replies)
        sampling = SamplingParams(max_tokens=max_tokens)
        setup = EngineSetup(train=sampling, max_prompt_length=max_prompt_length)
        engine = ScriptedEngine(setup, answers=lambda messages, request: next(left))
        workflow = workflow_class(engine, executor, **arguments)

        async def in_a_request():
            REQUEST.set(RequestContext(task_id=task["id"]))
            return await workflow.run_with_termination_handling(task, f"{task['id']}:0")

        return asyncio.run(in_a_request())

    return run
