"""How a W&B run begins: online or not, under which names, with which settings, and where its files lie. Imports no torch.

choose_mode(config)  ->  run_arguments(config, run), settings()  ->  wandb.init, inside of folders(run)
"""

from __future__ import annotations

import contextlib
import netrc
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from rllm_lightning.config import Config, ConfigError
from rllm_lightning.config_sections import WANDB_ID_RULE, is_wandb_id
from rllm_lightning.schema import show
from rllm_lightning.tracking.run_directory import RunDirectory, safe_name
from rllm_lightning.tracking.secrets import scrub, scrub_arguments, scrub_text
from rllm_lightning.tracking.summary import git_commit
from rllm_lightning.tracking.sweep_values import SWEEP_ID

MODES = {"dryrun": "offline", "run": "online"}  # old names that WANDB_MODE may still hold
LOGIN_VARIABLES = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")


def choose_mode(config: Config) -> str:
    """`online`, `offline` or `disabled`: the config's, else WANDB_MODE's, else online where there is a login.

    Raises:
        ConfigError: online is asked for without a login, or the id of the environment is none.
    """
    if config.wandb.id is None and not is_wandb_id(run_id := os.environ.get("WANDB_RUN_ID", "unset")):
        raise ConfigError([f"WANDB_RUN_ID: {WANDB_ID_RULE}, got {show(run_id)}; unset it, or set wandb.id"])
    asked = _asked_mode(config)
    mode = MODES.get(asked, asked) if asked else "online" if is_logged_in() else "offline"
    if mode == "online" and not is_logged_in():
        raise ConfigError(["wandb.mode: online needs a login; run `wandb login`, set WANDB_API_KEY, or choose offline"])
    return mode


def is_disabled(config: Config) -> bool:
    """Whether there is to be no W&B run at all. Unlike `choose_mode` this never imports W&B."""
    return _asked_mode(config) == "disabled"


def _asked_mode(config: Config) -> str | None:
    return config.wandb.mode or os.environ.get("WANDB_MODE")


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


def run_arguments(config: Config, run: RunDirectory) -> dict[str, Any]:
    """The arguments of `wandb.init` that say whose run this is. What a sweep's agent has put into the environment stands.

    A run directory that holds a W&B run already is a resumed one: `resume="allow"` makes the server, or later `wandb sync`, append.
    """
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
        "resume": own.resume or ("allow" if any(run.wandb.glob("*run-*")) else None),
    }
    return scrub({key: value for key, value in arguments.items() if value is not None})


def settings() -> dict[str, Any]:
    """Our choices among `wandb.Settings`."""
    return {
        "x_transaction_log_flush_interval": 1,  # seconds; the default of 15 loses that much when the process is killed
        "console": "off",  # a captured live line is unreadable, and text printed by others may hold secrets
        "disable_code": True,
        "max_end_of_run_history_metrics": 0,  # the end of a run has a table already, by the tracker `console`
        "max_end_of_run_summary_metrics": 0,
        # seconds; W&B tries again and again while a run goes on, but a server that is down must keep none from beginning or ending
        "init_timeout": 20,
        "finish_timeout": 30,
        "x_disable_meta": _metadata_holds_secrets(),
        **_clean_git(),
    }


def _metadata_holds_secrets() -> bool:
    """W&B's metadata of a run are the command line and the environment variables of SLURM, word for word."""
    slurm = [value for name, value in os.environ.items() if name.startswith("SLURM_")]
    return scrub_arguments(sys.argv) != sys.argv or any(scrub_text(value) != value for value in slurm)


def _clean_git() -> dict[str, str | None]:
    """W&B takes the password out of a repository's address and leaves the user, where some put a token."""
    try:
        answer = subprocess.run(["git", "config", "--get", "remote.origin.url"], capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return {}
    remote = answer.stdout.strip()
    clean = scrub_text(remote)
    return {} if clean == remote else {"git_remote_url": clean, "git_commit": git_commit()}


@contextlib.contextmanager
def folders(run: RunDirectory) -> Iterator[None]:
    """W&B keeps staged tables and caches in the user's home unless the environment says where."""
    inside = {f"WANDB_{kind.upper()}_DIR": str(run.wandb / kind) for kind in ("data", "cache", "artifact")}
    ours = {name: path for name, path in inside.items() if name not in os.environ}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name in ours:
            os.environ.pop(name, None)
