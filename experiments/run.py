"""One training run.

    python experiments/run.py [preset ...] [key=value ...] [--cfg] [--help]

Without a preset the default job runs. `rllm.trainer.resume=RUN_DIR` continues a run under its own config.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import rllm_lightning
from rllm_lightning.config import Config, ConfigError, load_config
from rllm_lightning.config_sources import parse_argv
from rllm_lightning.registry import ENGINES, ENVIRONMENTS, ESTIMATORS, LOSSES, SCORERS, TASKS, TRACKERS, WORKFLOWS
from rllm_lightning.schema import to_plain_tree
from rllm_lightning.tracking.run_directory import config_text
from rllm_lightning.tracking.secrets import remember_secrets
from rllm_lightning.tracking.sweep_values import end_with_agent
from rllm_lightning.tracking.table import Table
from rllm_lightning.tracking.terminal import LogFormatter, say, show_exception
from rllm_lightning.tracking.wandb_settings import is_disabled

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from rllm_lightning.trainer.unified_trainer import UnifiedTrainer

CONFIGS = Path(__file__).parent / "configs"
THREADS_S = 3.0  # that the end of a run waits for threads of workflows


def main(argv: list[str]) -> int:
    """Run a command line; returns the exit code: 0 done, 1 failed, 2 bad configuration, 130/143 interrupted or terminated."""
    if {"--help", "-h"} & set(argv):
        print(help_text())
        return 0
    _let_runs_share_cores()
    try:
        config = load_config([word for word in argv if word != "--cfg"], CONFIGS, default=_base(argv))
        cfg = Config.from_config(config)
        remember_secrets(to_plain_tree(cfg))
        if "--cfg" in argv:
            print(config_text(cfg), end="")
            return 0

        trainer = _make_trainer(config, cfg)
    except ValueError as error:
        return _refuse(error)
    except KeyboardInterrupt:
        return 130
    code = _fit(trainer)
    if code == 0 and trainer.is_first_rank:
        print(f"run:     {trainer.run_path}\nreport:  {trainer.run_path}/report.html")
        if any(Path(trainer.run_path, "wandb").glob("offline-run-*")):
            print(f"look:    wandb leet {trainer.run_path}/wandb\nupload:  wandb sync {trainer.run_path}/wandb")
    return code


def _let_runs_share_cores() -> None:
    """Have threads that wait give up their core soon, unless the user has said how they wait. OpenMP reads it when torch is imported.

    By default they spin for milliseconds. That gains little where a run is alone; where two have the same cores, each waits for
    the other's threads, and the warm start of the default job took more than 15 times as long.
    """
    if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = "10000"  # tens of microseconds


def _make_trainer(config: DictConfig, cfg: Config) -> UnifiedTrainer:
    """Everything that can be checked is, the cheapest first. Raises `ValueError`."""
    from rllm_lightning.models.load import check_model
    from rllm_lightning.tracking.trackers import check_trackers

    check_model(cfg.model)  # the trainer does so too, but drawing tasks takes longer
    check_trackers(cfg)
    tasks = TASKS.get(cfg.task.name)(cfg.data_seed, **cfg.task.args)

    from rllm_lightning.trainer.backend import LightningBackend
    from rllm_lightning.trainer.unified_trainer import UnifiedTrainer
    from rllm_lightning.workflows.engine import reward_argument

    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)  # their import sets INFO
    workflow = WORKFLOWS.get(cfg.rllm.workflow.name)
    scoring = reward_argument(workflow, tasks.reward_function)
    return UnifiedTrainer(LightningBackend, config, workflow, tasks.train, tasks.val, workflow_args=scoring, tables=_tables(cfg))


def _fit(trainer: UnifiedTrainer) -> int:
    """Train, and say what went wrong; the exit code."""
    import torch

    from rllm_lightning.tracking.run_directory import WriteError
    from rllm_lightning.trainer.interruption import Interrupted
    from rllm_lightning.trainer.watch import RankFailed
    from rllm_lightning.workflows.engine import WorkflowError

    try:
        trainer.fit()
    except Interrupted as interrupted:
        if trainer.is_first_rank:
            print(f"{interrupted}; continue with: python experiments/run.py rllm.trainer.resume={trainer.run_path}", file=sys.stderr)
        return interrupted.exit_code
    except RankFailed as failure:
        if not failure.spoken and trainer.is_first_rank:
            say(failure)
        return 1
    except ConfigError as error:
        return _refuse(error)
    except WriteError as error:
        say(f"{error}; make it writable, then {_continuation(trainer.run_path)}")
        return 1
    except (MemoryError, torch.OutOfMemoryError) as error:
        return _out_of_memory(error, "the update: lower training.micro_batch_tokens", trainer.run_path)
    except (ValueError, WorkflowError) as error:
        if isinstance(error.__cause__, MemoryError | torch.OutOfMemoryError):
            return _out_of_memory(error.__cause__, "a rollout: lower rllm.workflow.n_parallel_tasks", trainer.run_path)
        if _raised_outside(error.__cause__ or error):
            raise
        _refuse(error)  # our own word on what a user's function returned; the way there says no more
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _tables(cfg: Config) -> dict[str, Table]:
    """The card of the run's estimator, where a tracker shows it or the report has trajectories to go with it."""
    if ("wandb" not in cfg.rllm.trainer.logger or is_disabled(cfg)) and not cfg.rllm.episode_logging.log_episodes:
        return {}
    from rllm_lightning.lab.card import make_card
    from rllm_lightning.lab.card_table import card_table

    return {"estimator_card": card_table([make_card(cfg.rllm.algorithm.estimator_of(""), cfg.rllm.algorithm.estimator_kwargs)])}


def _raised_outside(error: BaseException) -> bool:
    """Whether the error comes from code that is not this library's, so that its traceback is of use."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and not frames[-1].filename.startswith(str(Path(rllm_lightning.__file__).parent))


def _refuse(error: Exception) -> int:
    say(error)
    return 2


def _continuation(run_path: str) -> str:
    has_checkpoint = any(Path(run_path, "checkpoints").glob("*.ckpt"))
    resume = f"rllm.trainer.resume={run_path}" if has_checkpoint else "the same arguments"
    return f"{'continue' if has_checkpoint else 'begin anew'} with: python experiments/run.py {resume}"


def _out_of_memory(error: BaseException, remedy: str, run_path: str) -> int:
    reason = f" ({' '.join(str(error).split())})" if str(error) else ""
    say(f"out of memory{reason} in {remedy}; then {_continuation(run_path)}")
    return 1


def leave(code: int) -> NoReturn:
    """End the process, also where threads of a workflow are at work that never end: Python would wait for them."""
    deadline = time.monotonic() + THREADS_S
    others = [thread for thread in threading.enumerate() if thread is not threading.current_thread() and not thread.daemon]
    for thread in others:
        thread.join(max(0.0, deadline - time.monotonic()))
    if not (alive := [thread.name for thread in others if thread.is_alive()]):
        sys.exit(code)
    logging.getLogger(__name__).warning("%d threads do not end and are left behind: %s", len(alive), ", ".join(sorted(alive)[:3]))
    atexit._run_exitfuncs()  # what `sys.exit` would do after waiting
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _base(argv: list[str]) -> str:
    """The preset of a command line that names none: the config of the run to be continued, else the default job."""
    resume = [value for key, value in parse_argv(argv, [])[1] if key == "rllm.trainer.resume"]
    for folder in [Path(str(resume[-1])), *Path(str(resume[-1])).absolute().parents[:2]] if resume and resume[-1] else []:
        with contextlib.suppress(OSError):  # no path at all; the trainer says so
            if (folder / "config.yaml").is_file():
                return str(folder / "config.yaml")
    return "default"


def help_text() -> str:
    """What can be run, from the registries."""
    lines = [(__doc__ or "").strip(), ""]
    lines += ["presets:", *(f"  {path.stem:16} {_first_comment(path)}" for path in sorted(CONFIGS.glob("*.yaml"))), ""]
    for registry in (ESTIMATORS, LOSSES, TASKS, SCORERS, WORKFLOWS, ENVIRONMENTS, ENGINES, TRACKERS):
        lines.append(f"{_plural(registry.kind)} ({registry.key}):")
        lines += [f"  {name:30} {_summary(entry)}" for name, entry in registry.items()]
        lines.append("")
    lines.append("Every key and its default: python experiments/run.py --cfg")
    return "\n".join(lines)


def _plural(kind: str) -> str:
    return kind + ("es" if kind.endswith("s") else "s")


def _first_comment(path: Path) -> str:
    first = path.read_text(encoding="utf-8").partition("\n")[0]
    return first.removeprefix("#").strip() if first.startswith("#") else ""


def _summary(entry: object) -> str:
    return getattr(entry, "formula", "") or (entry.__doc__ or "").strip().partition("\n")[0]


if __name__ == "__main__":
    handler = logging.StreamHandler()
    handler.setFormatter(LogFormatter())
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.getLogger("rllm_lightning.trainer.warm_start").setLevel(logging.INFO)  # how far it is
    sys.excepthook = show_exception
    end_with_agent()
    leave(main(sys.argv[1:]))
