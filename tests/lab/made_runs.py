"""Run folders made without a run: `make_run(folder, seed=1, estimator="rloo", values={0: .2, 10: .8})`."""

import json
from pathlib import Path

import yaml

from rllm_lightning import schema
from rllm_lightning.config import Config
from rllm_lightning.tracking.metrics_table import MetricsTable

ESTIMATOR = "rllm.algorithm.adv_estimator"
METRIC = "val/spell/pass@1"


def make_run(
    folder, *, seed=0, estimator="grpo", values=None, metric=METRIC, status="done", loss="ppo", questions=None, commit=None, **keys
):
    """A run folder of `values` (step -> the metric); a step costs 2 samples and half a second. `keys`: further config, `a__b=1` for a.b."""
    folder = Path(folder)
    folder.mkdir(parents=True)
    config = schema.to_plain_tree(Config())
    config["seed"] = seed
    config["rllm"]["algorithm"]["adv_estimator"] = estimator
    for key, value in keys.items():
        *sections, last = key.split("__")
        section = config
        for name in sections:
            section = section[name]
        section[last] = value
    (folder / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    if status is not None:
        summary = {"status": status, "loss_fn": loss, "versions": {"torch": "2.6"}, "git_commit": commit}
        (folder / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    if values is not None:
        table = MetricsTable(folder / "metrics.csv")
        for step in range(max(values) + 1):
            costs = {"groups/num_trajs_before_filter": 2.0, "time/step": 0.5} if step else {}
            measured = {metric: values[step]} if step in values else {}
            table.append(step, costs | measured)
    if questions is not None:
        (folder / "episodes").mkdir()
        lines = "".join(json.dumps({"id": f"{text}:0", "task": {"id": text, "question": text}}) + "\n" for text in questions)
        (folder / "episodes" / "val_step_0.jsonl").write_text(lines, encoding="utf-8")
    return folder


def make_sweep(root, ends, **keys):
    """One run for each estimator and seed, `ends`: estimator -> the last value of each seed. All begin at .2."""
    for estimator, values in ends.items():
        for seed, end in enumerate(values):
            make_run(Path(root) / f"{estimator}-{seed}", seed=seed, estimator=estimator, values={0: 0.2, 4: end}, **keys)
    return root
