"""What lies behind a step's means: every reward, advantage and response length of its rollouts, for histograms."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rllm_lightning.tracking.episode_rows import advantage_of
from rllm_lightning.types import Episode


def distributions(episodes: Sequence[Episode]) -> dict[str, list[float]]:
    """All values that are there and finite, by name; a name without any is left out.

    `distribution/reward`: one a trajectory. `distribution/advantage`: one a model call (the mean over its tokens where they
    differ). `distribution/response_length`: one a model call, in tokens.
    """
    trajectories = [trajectory for episode in episodes for trajectory in episode.trajectories]
    steps = [step for trajectory in trajectories for step in trajectory.steps]
    values: dict[str, list[float | None]] = {
        "distribution/reward": [trajectory.reward for trajectory in trajectories],
        "distribution/advantage": [advantage_of(step) for step in steps],
        "distribution/response_length": [len(step.response_ids) for step in steps],
    }
    finite = {name: [float(v) for v in line if v is not None and math.isfinite(v)] for name, line in values.items()}
    return {name: line for name, line in finite.items() if line}
