"""A comparison as a W&B run of its own: its tables, its page, and its numbers as the run's summary."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rllm_lightning.config import Config
from rllm_lightning.lab.compare.data import comparison_data
from rllm_lightning.lab.compare.results import Comparison
from rllm_lightning.lab.compare.tables import headline, tables_of
from rllm_lightning.tracking.run_directory import RunDirectory, safe_name
from rllm_lightning.tracking.secrets import scrub
from rllm_lightning.tracking.wandb_settings import choose_mode, folders, settings


def log_comparison(comparison: Comparison, page: str, folder: Path) -> None:
    """Log to the project of the compared runs; offline, below `folder`, unless this machine is logged in or WANDB_MODE says otherwise.

    Raises:
        ValueError: WANDB_MODE asks for online without a login.
    """
    with folders(RunDirectory(folder)):
        _log(comparison, page, folder)


def _log(comparison: Comparison, page: str, folder: Path) -> None:
    import wandb

    mode: Any = choose_mode(Config())
    projects = sorted({run.config["rllm"]["trainer"]["project_name"] for run in comparison.runs})
    content = comparison_data(comparison)
    described = {key: content[key] for key in ("by", "metric", "measure", "threshold", "difference_of_interest", "level")}
    run = wandb.init(
        mode=mode,
        project=safe_name(projects[0]),
        job_type="compare",
        name=safe_name(f"compare {', '.join(comparison.by)}"),
        notes=scrub("\n".join([headline(comparison), *comparison.conclusions, *comparison.caveats])),
        config=scrub(described),
        dir=str(folder),
        settings=wandb.Settings(silent=mode != "online", **settings()),
    )
    exit_code = 1
    try:
        run.log({_key(table.title): wandb.Table(columns=[*table.head], data=scrub(table.rows)) for table in tables_of(comparison)})
        run.log({"page": wandb.Html(scrub(page), inject=False)})
        run.summary.update(scrub(_numbers(content)))
        exit_code = 0
    finally:
        run.finish(exit_code)
        wandb.teardown(exit_code)  # only when the service has ended is the file complete


def _key(title: str) -> str:
    """`Groups (threshold 0.5)` -> `groups`."""
    return title.partition(" (")[0].lower().replace(" ", "_")


def _numbers(content: dict[str, Any]) -> dict[str, Any]:
    groups = {f"group/{g['label']}/{name}": g[name]["mean"]["value"] for g in content["groups"] for name in ("final", "best", "auc")}
    pairs = {f"pair/{p['a']}-{p['b']}/{name}": p[name] for p in content["pairs"] for name in ("p_holm", "verdict")}
    differences = {f"pair/{p['a']}-{p['b']}/difference": p["difference"]["value"] for p in content["pairs"]}
    return {key: value for key, value in {**groups, **pairs, **differences}.items() if value is not None}
