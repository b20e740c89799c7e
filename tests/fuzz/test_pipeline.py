"""Whatever a workflow hands over: the stages of training take it or name what is wrong, and its log is strict JSON that comes back."""

import copy
import json
import logging
import math

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rllm_lightning.algorithms.advantage import collect_reward_and_advantage_from_trajectory_groups
from rllm_lightning.algorithms.metrics import rollout_metrics, termination_metrics, validation_metrics, workflow_metrics
from rllm_lightning.algorithms.rejection_sampling import RejectionSamplingState, apply_rejection_sampling_and_filtering
from rllm_lightning.algorithms.transform import transform_episodes_to_trajectory_groups
from rllm_lightning.config import AlgorithmConfig, CompactFilteringConfig, RejectionSamplingConfig, TransformConfig
from rllm_lightning.lab.replay.episodes import read_step
from rllm_lightning.registry import ESTIMATORS
from rllm_lightning.tracking.episode_logger import EpisodeLogger, read_episodes
from rllm_lightning.tracking.episode_rows import COLUMNS, episode_rows
from rllm_lightning.trainer.batch import make_train_batch
from rllm_lightning.types import Episode
from tests.fuzz.episodes import complete_episodes, episodes

CALM = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture]
REJECTIONS = st.builds(
    RejectionSamplingConfig,
    mode=st.sampled_from(["none", "episode", "group"]),
    min_trajs_per_group=st.integers(1, 2),
    filter_uniform_groups=st.booleans(),
)
TRANSFORMS = st.builds(TransformConfig, impute_missing_names=st.booleans(), drop_unnamed_traj=st.booleans(), broadcast=st.booleans())
FILTERS = st.builds(CompactFilteringConfig, enable=st.booleans(), mask_unknown=st.booleans(), mask_error=st.booleans())
# words one of which stands in each message of the pipeline, before the name of the object
OBJECTS = ("episode ", "an episode", "group ", "trajectory ", "estimator ")


@pytest.fixture(autouse=True)
def quiet():
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


def algorithm(estimator, **keywords):
    entry = ESTIMATORS.get(estimator)
    return AlgorithmConfig(
        estimator=estimator, estimator_kwargs={key: 1 for key in entry.kwargs if key in ("k", *entry.required)}, **keywords
    )


def groups_of(found, transform, filtering, rejection):
    groups, metrics = transform_episodes_to_trajectory_groups(found, transform, filtering)
    assert all(math.isfinite(value) for value in metrics.values())
    return apply_rejection_sampling_and_filtering(found, groups, rejection, RejectionSamplingState())[0]


def check_rows(groups):
    for row in make_train_batch(groups).with_advantages().rows:
        assert len(row.advantages) == len(row.response_ids) > 0
        assert all(isinstance(value, float) and math.isfinite(value) for value in row.advantages)
        assert row.rollout_logprobs is None or len(row.rollout_logprobs) == len(row.response_ids)


def check_message(error):
    assert any(word in str(error) for word in OBJECTS), error


def takes_or_names_it(found, transform, filtering, rejection, precomputed):
    try:
        groups = groups_of(found, transform, filtering, rejection)
    except ValueError as error:
        check_message(error)
        return
    for name in ESTIMATORS.names():
        own = copy.deepcopy(groups)
        try:
            metrics = collect_reward_and_advantage_from_trajectory_groups(
                own, algorithm(name, use_precomputed_advantage=precomputed), estimator_state={}
            )
        except ValueError as error:
            check_message(error)
            continue
        assert all(map(math.isfinite, metrics.values()))
        check_rows(own)


@settings(max_examples=60, suppress_health_check=CALM)
@given(episodes(), TRANSFORMS, FILTERS, REJECTIONS, st.booleans())
def test_any_episodes_are_taken_or_what_is_wrong_is_named(found, transform, filtering, rejection, precomputed):
    takes_or_names_it(found, transform, filtering, rejection, precomputed)


@pytest.mark.long
@settings(max_examples=3000, suppress_health_check=CALM)
@given(episodes(), TRANSFORMS, FILTERS, REJECTIONS, st.booleans())
@pytest.mark.timeout(1800)
def test_any_of_thousands_of_batches_is_taken_or_what_is_wrong_is_named(found, transform, filtering, rejection, precomputed):
    takes_or_names_it(found, transform, filtering, rejection, precomputed)


@settings(max_examples=30, suppress_health_check=CALM)
@given(complete_episodes())
def test_every_estimator_weighs_whatever_has_all_that_it_needs(found):
    """Rewards are finite and there is a response token, so that no estimator lacks anything."""
    for episode in found:
        episode.id = episode.id or "x"
        for trajectory in episode.trajectories:
            trajectory.name = trajectory.name.replace(":", "")
            trajectory.reward = 1.0 if trajectory.reward is None else abs(trajectory.reward)  # maxrl has no use for others
            trajectory.steps = [step for step in trajectory.steps if step.response_ids]
    groups = groups_of(found, TransformConfig(), CompactFilteringConfig(), RejectionSamplingConfig())
    for name in ESTIMATORS.names():
        own = copy.deepcopy(groups)
        collect_reward_and_advantage_from_trajectory_groups(own, algorithm(name), estimator_state={})
        check_rows(own)


def refuse(constant):
    raise AssertionError(constant)


@settings(max_examples=100, suppress_health_check=CALM)
@given(episodes())
def test_any_episodes_are_logged_as_strict_json_and_come_back(tmp_path_factory, found):
    path = EpisodeLogger(tmp_path_factory.mktemp("episodes")).log(found, "train", 1)
    lines = path.read_bytes().splitlines()
    assert len(lines) == len(found)
    assert [json.loads(line, parse_constant=refuse) for line in lines] == [episode.to_dict() for episode in found]
    for read in (read_step(path), read_episodes(path)):
        assert [episode.to_dict() for episode in read] == [episode.to_dict() for episode in found]
        assert all(isinstance(episode, Episode) for episode in read)
    assert all(len(row) == len(COLUMNS) for row in episode_rows(read_step(path)))


@settings(max_examples=60, suppress_health_check=CALM)
@given(episodes())
def test_metrics_of_any_episodes_are_numbers(found):
    """Metrics of workflows may be infinite themselves; what the library counts is not."""
    values = {**rollout_metrics(found), **termination_metrics(found).means()}
    assert all(math.isfinite(value) for value in values.values())
    for metrics in (validation_metrics(found, 4), workflow_metrics(found).means()):
        assert all(isinstance(value, float) for value in metrics.values())
