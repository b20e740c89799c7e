"""The tracker `wandb`: a Weights & Biases run around `wandb.init`.

Not Lightning's `WandbLogger`: that one defines no step metric on a run made elsewhere, leaves a run of a caught exception open and
ends it with exit code 0, and passes deprecated arguments. Here every row carries the global step as the metric `train/global_step`,
and everything is drawn against it; W&B's own `_step` only counts rows, so no row can be dropped for coming late.

Offline unless this machine is logged in or `wandb.mode` says otherwise. All files lie under the run directory.
"""

from __future__ import annotations

import contextlib
import logging
import math
import netrc
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from rllm_lightning import schema
from rllm_lightning.config import Config, ConfigError
from rllm_lightning.tracking.episode_rows import COLUMNS, episode_rows
from rllm_lightning.tracking.metrics_table import as_numbers
from rllm_lightning.tracking.run_directory import RunDirectory, safe_name
from rllm_lightning.tracking.secrets import scrub, scrub_arguments
from rllm_lightning.tracking.sweep_values import SWEEP_ID, check_swept_values
from rllm_lightning.tracking.tracker import Tracker
from rllm_lightning.types import Episode

if TYPE_CHECKING:
    import wandb

logger = logging.getLogger(__name__)

STEP = "train/global_step"
MODES = {"dryrun": "offline", "run": "online"}  # old names that WANDB_MODE may still hold
LOGIN_VARIABLES = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")


class WandbTracker(Tracker):
    """One W&B run, made when it is first needed, on rank 0 alone.

    Raises:
        ConfigError: `wandb.mode=online` without a login, or a sweep that shows other values than the config holds.
    """

    def __init__(self, config: Config, run: RunDirectory):
        super().__init__(run)
        self.config = config
        self.mode = choose_mode(config)
        if self.mode != "disabled":
            check_swept_values(config)
        self._wandb_run: wandb.Run | None = None
        self._is_ours = True
        self._closed = False
        self._known: set[str] = set()

    @property
    @rank_zero_experiment
    def experiment(self) -> wandb.Run | None:
        """The W&B run; None when disabled or closed."""
        if self._wandb_run is None and self.mode != "disabled" and not self._closed:
            self._wandb_run = self._start()
        return self._wandb_run

    @rank_zero_only
    def begin(self, step: int, total_steps: int | None = None) -> None:
        _ = self.experiment

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        assert step is not None, "metrics are logged with their step"
        if (run := self.experiment) is None:
            return
        # not-a-number would end a sweep's optimiser: leave it out
        finite = {key: value for key, value in as_numbers(metrics).items() if math.isfinite(value)}
        for key in finite.keys() - self._known:
            if re.fullmatch(r"val/.+/pass@1", key):
                run.define_metric(key, step_metric=STEP, summary="max,last")
        self._known |= finite.keys()
        run.log({**finite, STEP: step})

    @rank_zero_only
    def log_episodes(self, episodes: Sequence[Episode], step: int) -> None:
        if (run := self.experiment) is None:
            return
        import wandb

        with self._folders():
            run.log({"episodes": wandb.Table(columns=[*COLUMNS], data=episode_rows(episodes)), STEP: step})

    @rank_zero_only
    def log_model(self, folder: Path) -> None:
        if not self.config.wandb.log_model or (run := self.experiment) is None:
            return
        import wandb

        with self._folders():
            artifact = wandb.Artifact(f"model-{self.run.id}", type="model")
            artifact.add_dir(str(folder))
            run.log_artifact(artifact)

    @rank_zero_only
    def close(self, exit_code: int) -> None:
        run, self._wandb_run, self._closed = self._wandb_run, None, True
        if run is None or not self._is_ours:
            return
        import wandb

        with self._folders():
            run.finish(exit_code)
            wandb.teardown(exit_code)  # only when the service has ended is the file complete

    def _start(self) -> wandb.Run:
        import wandb

        content = scrub(schema.to_plain_tree(self.config))
        if wandb.run is not None:  # the user's own, as in a function that an in-process agent calls: use it, and leave it open
            self._is_ours, run = False, wandb.run
            run.config.update(content, allow_val_change=True)
        else:
            with self._folders():
                run = self._init(content)
        run.define_metric(STEP)
        run.define_metric("*", step_metric=STEP)
        return run

    def _init(self, content: dict[str, Any]) -> wandb.Run:
        import wandb

        arguments = run_arguments(self.config, self.run) | {"config": content, "dir": str(self.run.path)}
        if self.mode == "online":
            resume = self.config.wandb.resume or ("allow" if self.run.wandb.exists() else None)
            try:
                return wandb.init(mode="online", resume=resume, settings=wandb.Settings(**settings()), **arguments)
            except wandb.errors.CommError as error:
                logger.warning("W&B did not take the run (%s); it is recorded offline, upload it with `wandb sync`", error)
                wandb.teardown()
        return wandb.init(mode="offline", settings=wandb.Settings(silent=True, **settings()), **arguments)

    @contextlib.contextmanager
    def _folders(self) -> Iterator[None]:
        """W&B keeps staged tables and caches in the user's home unless the environment says where."""
        inside = {f"WANDB_{kind.upper()}_DIR": str(self.run.wandb / kind) for kind in ("data", "cache", "artifact")}
        ours = {name: path for name, path in inside.items() if name not in os.environ}
        os.environ.update(ours)
        try:
            yield
        finally:
            for name in ours:
                os.environ.pop(name, None)


def settings() -> dict[str, Any]:
    """Our choices among `wandb.Settings`."""
    services = ("graphql", "file_stream", "file_transfer")
    return {
        "x_transaction_log_flush_interval": 1,  # seconds; the default of 15 loses that much when the process is killed
        "console": "off",  # a captured live line is unreadable, and text printed by others may hold secrets
        "disable_code": True,
        "x_disable_meta": scrub_arguments(sys.argv) != sys.argv,  # W&B's metadata holds the command line
        "max_end_of_run_history_metrics": 0,  # the end of a run has a table already, by the tracker `console`
        "max_end_of_run_summary_metrics": 0,
        # a server that is down must not keep a run from ending
        "init_timeout": 30,
        "finish_timeout": 60,
        **{f"x_{service}_retry_max": 3 for service in services},
        **{f"x_{service}_retry_wait_max_seconds": 2 for service in services},
    }


def run_arguments(config: Config, run: RunDirectory) -> dict[str, Any]:
    """The arguments of `wandb.init` that say whose run this is. What a sweep's agent has put into the environment stands."""
    own, sweep_id = config.wandb, os.environ.get(SWEEP_ID)
    default_group = os.environ.get("WANDB_RUN_GROUP") or sweep_id or config.rllm.algorithm.estimator_of("")
    arguments = {
        "id": own.id or (None if "WANDB_RUN_ID" in os.environ else run.id),
        "entity": own.entity,
        "project": None if sweep_id else safe_name(config.rllm.trainer.project_name),
        "name": None if "WANDB_NAME" in os.environ else run.path.name,
        "group": own.group or default_group,
        "job_type": own.job_type,
        "tags": own.tags or None,
        "notes": own.notes,
    }
    return scrub({key: value for key, value in arguments.items() if value is not None})


def choose_mode(config: Config) -> str:
    """`online`, `offline` or `disabled`: the config's, else WANDB_MODE's, else online where there is a login.

    Raises:
        ConfigError: online is asked for without a login.
    """
    asked = config.wandb.mode or os.environ.get("WANDB_MODE")
    mode = MODES.get(asked, asked) if asked else "online" if is_logged_in() else "offline"
    if mode == "online" and not is_logged_in():
        raise ConfigError(["wandb.mode: online needs a login; run `wandb login`, set WANDB_API_KEY, or choose offline"])
    return mode


def is_logged_in() -> bool:
    """Whether the environment or the netrc file holds a key for the W&B server."""
    if any(os.environ.get(name) for name in LOGIN_VARIABLES):
        return True
    from wandb.sdk.wandb_setup import singleton

    hosts = {urlsplit(singleton().settings.base_url).netloc, "api.wandb.ai"}  # unlike `wandb.setup()` this starts no service
    candidates = [os.environ["NETRC"]] if "NETRC" in os.environ else ["~/.netrc", "~/_netrc"]
    for path in map(os.path.expanduser, candidates):
        with contextlib.suppress(OSError, netrc.NetrcParseError):
            if hosts & netrc.netrc(path).hosts.keys():
                return True
    return False
