"""`UnifiedTrainer`: from a config to a trained model; and `AgentTrainer`, the shorter way to it.

__init__   checks everything that can be checked without a model
fit        processes -> run directory -> trackers -> L.Trainer.fit(UnifiedLightningModule) -> summary, report
shutdown   on every way out
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from omegaconf import DictConfig, OmegaConf

from rllm_lightning.algorithms.advantage import collect_reward_and_advantage_from_trajectory_groups
from rllm_lightning.algorithms.estimator import place_of
from rllm_lightning.algorithms.needs import FROM_WORKFLOW
from rllm_lightning.algorithms.transform import GroupingHook, group_by_task_and_name
from rllm_lightning.config import AlgorithmConfig, Config, ConfigError, as_dict_config
from rllm_lightning.config_sections import LightningConfig
from rllm_lightning.registry import ESTIMATORS
from rllm_lightning.schema import differences, to_plain_tree
from rllm_lightning.tracking.report import write_report
from rllm_lightning.tracking.run_directory import RunDirectory, WriteError, atomic_write, config_text
from rllm_lightning.tracking.secrets import remember_secrets
from rllm_lightning.tracking.summary import RunSummary, status_of
from rllm_lightning.tracking.table import Table, write_tables
from rllm_lightning.tracking.tracker import Tracker
from rllm_lightning.tracking.trackers import check_trackers, make_trackers
from rllm_lightning.trainer.backend import LightningBackend
from rllm_lightning.trainer.checkpoints import AtomicCheckpointIO
from rllm_lightning.trainer.data import check_dataset
from rllm_lightning.trainer.interruption import Interrupted, StopSignal, requeue
from rllm_lightning.trainer.launch import Children, end_with_parent, fit_in_processes, share_threads, start_method
from rllm_lightning.trainer.module import UnifiedLightningModule
from rllm_lightning.trainer.precision import AUTO, FULL
from rllm_lightning.trainer.protocol import BackendProtocol, TrainerState
from rllm_lightning.trainer.ranks import TIMEOUT
from rllm_lightning.trainer.resume import checkpoint_to_resume, is_finished, run_directory_of, without_resume
from rllm_lightning.trainer.sharded import ShardedStrategy, is_sharded
from rllm_lightning.types import Step, Trajectory, TrajectoryGroup
from rllm_lightning.workflows.engine import check_workflow_args
from rllm_lightning.workflows.single_turn import SingleTurnWorkflow
from rllm_lightning.workflows.workflow import Workflow

logger = logging.getLogger(__name__)

# of Lightning, about what is meant to be as it is here: eval mode outside of updates, our own logging and loader position
EXPECTED_WARNINGS = (
    r"Found \d+ module\(s\) in eval mode",
    "The number of training batches",
    "You're resuming from a checkpoint that ended before the epoch ended",
    r".*isinstance\(treespec, LeafSpec\)",
)
REFUSED = ("fsdp", "deepspeed")  # beginnings of the names of strategies


class UnifiedTrainer:
    """Trains a policy by running a workflow on tasks.

    Args:
        backend_cls: a `BackendProtocol`, made with `(config, **backend_args)`.
        config: a full config (`load_config`), or a mapping whose missing keys have their defaults.
        workflow_class: what is run on each task; `workflow_args` are keywords of its constructor.
        train_dataset, val_dataset: tasks, as sequences of dicts; `val_dataset` may be None.
        traj_grouping_hook: a function that makes the trajectory groups, instead of one group for each task and role.
        traj_group_adv_estimator_map: role -> estimator or (estimator, loss); needs `rllm.algorithm.use_rllm=true`.
        tables: tables of the run as a whole that trackers and the report show, by name, such as the card of its estimator.

    Raises:
        ConfigError: something does not fit; one line for each problem. Nothing expensive has happened by then.
        TypeError: an unknown keyword.
    """

    def __init__(
        self,
        backend_cls: type[BackendProtocol],
        config: DictConfig | Mapping[str, Any],
        workflow_class: type[Workflow],
        train_dataset: Sequence[dict[str, Any]] | None = None,
        val_dataset: Sequence[dict[str, Any]] | None = None,
        workflow_args: dict[str, Any] | None = None,
        backend_args: dict[str, Any] | None = None,
        *,
        traj_grouping_hook: GroupingHook | None = None,
        traj_group_adv_estimator_map: dict[str, Any] | None = None,
        tables: Mapping[str, Table] | None = None,
        **kwargs: Any,
    ):
        if kwargs:
            raise TypeError(f"UnifiedTrainer: unknown arguments {sorted(kwargs)}")
        self.cfg = _with_estimator_map(Config.from_config(config), traj_group_adv_estimator_map)
        remember_secrets(to_plain_tree(self.cfg))
        self.config = as_dict_config(self.cfg)
        self.workflow_class, self.workflow_args = workflow_class, workflow_args or {}
        self.train_dataset: Sequence[dict[str, Any]] = train_dataset if train_dataset is not None else []
        self.val_dataset: Sequence[dict[str, Any]] = val_dataset if val_dataset is not None else []
        if not self.cfg.rllm.trainer.val_only:
            check_dataset(self.train_dataset, "train_dataset")
        if len(self.val_dataset):
            check_dataset(self.val_dataset, "val_dataset")
        elif self.cfg.rllm.trainer.val_only:
            raise ConfigError(["rllm.trainer.val_only: there is no val_dataset to validate on"])
        all_args = self.cfg.rllm.workflow.workflow_args | self.workflow_args
        check_workflow_args(workflow_class, all_args)
        _check_needs(self.cfg.rllm.algorithm, workflow_class, all_args.get("reward_function"))
        _try_estimators(self.cfg, workflow_class)
        check_trackers(self.cfg)
        self.tables = tables
        self.checkpoint = checkpoint_to_resume(self.cfg)
        self.traj_grouping_hook = traj_grouping_hook or group_by_task_and_name
        self.backend = backend_cls(self.config, **(backend_args or {}))
        self.backend.validate_config()
        self.lightning = _lightning_trainer(self.cfg)
        self._arguments = {
            "backend_cls": backend_cls,
            "config": OmegaConf.to_container(self.config),
            "workflow_class": workflow_class,
            "train_dataset": self.train_dataset,
            "val_dataset": self.val_dataset,
            "workflow_args": self.workflow_args,
            "backend_args": backend_args,
            "traj_grouping_hook": traj_grouping_hook,
            "tables": tables,
        }
        self.stop = StopSignal()
        self.module: UnifiedLightningModule | None = None
        self.run_directory: RunDirectory | None = None
        self._emergency: Callable[[], None] = lambda: None

    # --------------------------------------------------------------------------------------------------------------- running

    def fit(self) -> None:
        """Train. Returns when training is done.

        Raises:
            Interrupted: the run was asked to stop (Ctrl-C, SIGTERM, SIGUSR1); a checkpoint of the last finished batch is there.
        RankFailed: another process of the run failed.
            RuntimeError: called where an event loop is running (a notebook): `await fit_async()` there.
        """
        if _in_running_loop():
            raise RuntimeError("UnifiedTrainer.fit() was called inside a running event loop; use `await trainer.fit_async()`")
        self._fit()

    async def fit_async(self) -> None:
        """`fit` from a running event loop. When this is cancelled, the run stops as it does on Ctrl-C, and the cancellation goes on."""
        work = asyncio.ensure_future(asyncio.to_thread(self._fit))
        try:
            await asyncio.shield(work)
        except asyncio.CancelledError:
            self.stop.request()
            with contextlib.suppress(Interrupted):
                await work
            raise

    @property
    def run_path(self) -> str:
        """Where the files of the run are ("" before `fit`)."""
        return str(self.run_directory.path) if self.run_directory else ""

    @property
    def is_first_rank(self) -> bool:
        """Whether this process is the one that writes."""
        return self.lightning.is_global_zero

    def shutdown(self) -> None:
        """Release the engine, the workflows and the event loop. Idempotent; also done when `fit` ends or fails."""
        if self.module is not None:
            self.module.close()
        self.backend.shutdown()

    def _fit(self) -> None:
        if self.checkpoint is not None and not self.cfg.rllm.trainer.val_only and is_finished(self.checkpoint, self._total_steps()):
            self.run_directory = run_directory_of(self.checkpoint)
            logger.warning("%s is finished; to train on, raise rllm.trainer.total_batches or total_epochs", self.run_path)
            if self.run_directory is not None and not self.run_directory.report_html.exists():
                _report(self.run_directory)
            return
        with self.stop.installed():
            share_threads(self.lightning)
            method = start_method(self.lightning)
            if method in ("spawn", "fork"):
                self.run_directory = RunDirectory(Path(fit_in_processes(self.lightning, method, _fit_anew, self._arguments, self.stop)))
                return
            if method == "popen":
                Children(self.lightning, lambda: self.stop.joined, lambda: self._emergency())
            end_with_parent(lambda: self.stop.joined)
            self._fit_here()

    def _fit_here(self) -> None:
        """In a process of its own for each rank."""
        run = self.run_directory = self._run_directory() if self.is_first_rank else None
        if run and self.tables:
            write_tables(run.tables_json, self.tables)
        trackers = make_trackers(self.cfg, run, self.tables) if run else []
        summary = RunSummary(run, self.cfg) if run else None
        with self._closing(run, trackers, summary):
            self.module = UnifiedLightningModule(
                self.backend,
                self.cfg,
                self.workflow_class,
                self.workflow_args,
                self.train_dataset,
                self.val_dataset,
                run,
                summary,
                self.stop,
                self.traj_grouping_hook,
                self._emergency,
            )
            self.lightning.loggers = trackers
            with warnings.catch_warnings():
                for expected in EXPECTED_WARNINGS:
                    warnings.filterwarnings("ignore", expected)
                self.lightning.fit(self.module, ckpt_path=self.checkpoint, weights_only=True)  # whatever the environment says
            self.run_directory = self.module.run_directory
            if self.module.interrupted is not None:
                if self.is_first_rank and self.module.interrupted.signum == signal.SIGUSR1:
                    requeue()
                raise self.module.interrupted

    @contextlib.contextmanager
    def _closing(self, run: RunDirectory | None, trackers: Sequence[Any], summary: RunSummary | None) -> Iterator[None]:
        """Whatever happens inside, the other ranks and the trackers learn of it, the summary has the status, and everything is released."""
        exit_code = 1

        def tell() -> None:
            for tracker in trackers:
                if isinstance(tracker, Tracker):
                    _close(tracker, exit_code)
            try:
                if summary is not None:
                    summary.finish(status_of(exit_code))
            except WriteError:
                if exit_code == 0:  # else the failure is the one to report
                    raise

        self._emergency = tell
        try:
            yield
            exit_code = 0
        except Interrupted as interrupted:
            exit_code = interrupted.exit_code
            raise
        except KeyboardInterrupt:
            exit_code = 130
            raise
        except BaseException as error:
            if self.stop.watch is not None and (failure := self.stop.watch.first_failure(error)) is not None:
                raise failure from None
            raise
        finally:
            self.shutdown()
            tell()
            if run is not None:
                _report(run, is_told=exit_code == 0)
            if exit_code != 1 and self.stop.watch is not None:
                self.stop.watch.close()

    def _total_steps(self) -> int:
        return len(self.backend.get_dataloader(self.train_dataset, TrainerState()))  # type: ignore[arg-type]

    def _run_directory(self) -> RunDirectory:
        """That of the run to be continued, under the config it has now, else a new one."""
        former = run_directory_of(self.checkpoint) if self.checkpoint else None
        if former is None:
            return RunDirectory.create(without_resume(self.cfg))
        former.remove_scraps()
        atomic_write(former.config_yaml, config_text(without_resume(self.cfg)))
        return former


class AgentTrainer:
    """The convenient form: a registered or given workflow, the backend by name.

        AgentTrainer(config=cfg, workflow_class=MyWorkflow, train_dataset=tasks, val_dataset=held_out).train()

    Args are those of `UnifiedTrainer`; `backend` is `"lightning"` or a `BackendProtocol` class.
    """

    def __init__(
        self,
        config: DictConfig | Mapping[str, Any],
        workflow_class: type[Workflow],
        train_dataset: Sequence[dict[str, Any]] | None = None,
        val_dataset: Sequence[dict[str, Any]] | None = None,
        backend: str | type[BackendProtocol] = "lightning",
        **kwargs: Any,
    ):
        if isinstance(backend, str):
            if backend != "lightning":
                raise ValueError(f"AgentTrainer: unknown backend {backend!r}; there is 'lightning', or give a BackendProtocol class")
            backend = LightningBackend
        self.trainer = UnifiedTrainer(backend, config, workflow_class, train_dataset, val_dataset, **kwargs)

    def train(self) -> None:
        """Train; see `UnifiedTrainer.fit`."""
        self.trainer.fit()


def _close(tracker: Tracker, exit_code: int) -> None:
    """What a tracker's end comes to is not the run's: its files are written."""
    try:
        tracker.close(exit_code)
    except Exception as error:
        logger.warning("tracker %s: its end failed: %s: %s", type(tracker).__name__, type(error).__name__, error)


def _report(run: RunDirectory, is_told: bool = True) -> None:
    """The report, which can be made anew at any time; a run does not fail for it. `is_told`: that there is none."""
    try:
        write_report(run)
    except (OSError, ValueError) as error:
        if is_told:
            logger.warning("no report (%s); make it later with: python experiments/view.py %s", " ".join(str(error).split()), run.path)


def _with_estimator_map(config: Config, given: dict[str, Any] | None) -> Config:
    """The config with the estimators of roles that were given in code."""
    if not given:
        return config
    if not config.rllm.algorithm.use_rllm:
        raise ConfigError(["traj_group_adv_estimator_map: needs rllm.algorithm.use_rllm=true"])
    tree = as_dict_config(config)
    for role, entry in given.items():
        plain = [str(part) for part in entry] if isinstance(entry, list | tuple) else str(entry)
        tree.rllm.algorithm.estimator_map = {**tree.rllm.algorithm.estimator_map, role: plain}
    return Config.from_config(tree)


def _in_running_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _try_estimators(config: Config, workflow_class: type[Workflow]) -> None:
    """Call every estimator of the run once, on three made-up groups that hold all it may need: what raises, or answers with a wrong
    shape or with NaN, is refused before anything is loaded. Groups are as large as the run's own will be, where that is known; a
    warning says where they are too small to tell answers apart."""
    algorithm, n = config.rllm.algorithm, config.rllm.rollout.n
    size = n if issubclass(workflow_class, SingleTurnWorkflow) else max(n, 8)
    for role in ["", *algorithm.estimator_map]:
        name = algorithm.estimator_of(role)
        key = f"rllm.algorithm.estimator_map.{role}" if role else "rllm.algorithm.adv_estimator"
        try:
            weighs = _weighs_anything(algorithm, role, size)
        except Exception as error:  # an estimator may be the user's own
            reason = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
            place = place_of(error, ESTIMATORS.get(name).function)
            raise ConfigError([f"{key}: {name!r} fails on groups of {size}: {' '.join(reason.split())}{place}"]) from error
        if size == 1 and not weighs and _weighs_anything(algorithm, role, 2):
            logger.warning(
                "%s: %r compares the answers to one question, and rllm.rollout.n=1 gives it one: all advantages will be 0, and nothing is "
                "learnt; set rllm.rollout.n to 2 or more",
                key,
                name,
            )


def _weighs_anything(algorithm: AlgorithmConfig, role: str, size: int) -> bool:
    """Whether a role's estimator gives any advantage but 0 in groups of `size`: a right one, a wrong one, one with both."""
    groups = [
        _made_up_group(f"task{task}:{role or 'role'}", rewards)
        for task, rewards in enumerate(([1.0] * size, [0.0] * size, [1.0, *[0.0] * (size - 1)]))
    ]
    metrics = collect_reward_and_advantage_from_trajectory_groups(
        groups, replace(algorithm, use_precomputed_advantage=False), estimator_state={}
    )
    return metrics.get(f"advantage/{role or 'role'}/fraction_zero", 1.0) < 1.0  # nothing where it dropped all groups


def _made_up_group(group_id: str, rewards: list[float]) -> TrajectoryGroup:
    info = {"state_key": "start", "values": [0.5, 0.5], "teacher_logprobs": [-1.0, -1.0]}
    return TrajectoryGroup(
        [
            Trajectory(
                steps=[Step(prompt_ids=[1], response_ids=[2, 3], logprobs=[-1.0, -1.0], reward=reward, info=dict(info))],
                reward=reward,
                info={"rewards": {"reward": reward}, "greedy_reward": 0.0},
            )
            for reward in rewards
        ],
        group_id,
    )


def _check_needs(algorithm: AlgorithmConfig, workflow_class: type[Workflow], reward_function: Any) -> None:
    """Refuse an estimator that needs what neither the trainer nor the workflow supplies."""
    provided = set(workflow_class.provides) | set(getattr(reward_function, "provides", ()))
    problems = [
        f"rllm.algorithm.adv_estimator: {name!r} needs {need}, which {workflow_class.__name__} does not provide; "
        f"put it into {FROM_WORKFLOW[need]}, and name it in `{workflow_class.__name__}.provides`"
        for name in dict.fromkeys([algorithm.estimator_of(""), *map(algorithm.estimator_of, algorithm.estimator_map)])
        for need in ESTIMATORS.get(name).needs
        if need in FROM_WORKFLOW and need not in provided
    ]
    if problems:
        raise ConfigError(problems)


def _fit_anew(**arguments: Any) -> str:
    """A run in a process that was made for one of its ranks; the path of its files."""
    trainer = UnifiedTrainer(**arguments)
    trainer.fit()
    return trainer.run_path


def _lightning_trainer(config: Config) -> L.Trainer:
    """Lightning's trainer as the module wants it: it counts, validates, logs and saves by itself.

    Raises:
        ConfigError: Lightning refuses what stands under `lightning`.
    """
    settings = config.lightning
    sharded = is_sharded(config)
    if settings.strategy.startswith(REFUSED) and not sharded:
        raise ConfigError([f"lightning.strategy: {settings.strategy!r} is not supported; use fsdp2 to shard the model, else ddp"])
    plugins: list[Any] = [AtomicCheckpointIO()]
    if SLURMEnvironment.detect():
        plugins.append(SLURMEnvironment(auto_requeue=False))  # its requeue saves in the middle of a batch
    try:
        trainer = L.Trainer(
            accelerator=settings.accelerator,
            devices=settings.devices,
            num_nodes=settings.num_nodes,
            strategy=ShardedStrategy() if sharded else settings.strategy,
            precision=FULL if settings.precision == AUTO else settings.precision,  # type: ignore[arg-type]
            plugins=plugins,
            default_root_dir=config.run_root,  # under SLURM Lightning resumes from an hpc_ckpt_* there: none of the working directory
            logger=False,
            max_epochs=-1,  # the module stops after its own number of batches
            use_distributed_sampler=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
            inference_mode=False,
        )
    except (ValueError, TypeError, RuntimeError, ImportError, MisconfigurationException) as error:
        given = differences(to_plain_tree(LightningConfig()), to_plain_tree(settings))
        keys = ", ".join(f"lightning.{key}={value}" for key, (_, value) in given.items()) or "lightning"
        choices = "" if settings.accelerator in ("auto", "cpu") else " (lightning.accelerator=auto or cpu works on every machine)"
        raise ConfigError([f"{keys}: Lightning refuses it here: {' '.join(str(error).split())}{choices}"]) from error
    if trainer.world_size > 1:
        if not isinstance(trainer.strategy, DDPStrategy | ShardedStrategy):
            raise ConfigError([f"lightning.strategy: {settings.strategy!r} is not supported with several processes; use ddp or fsdp2"])
        trainer.strategy._timeout = TIMEOUT
        trainer.strategy._launcher = None  # see `launch.py`
    # signals are ours: Lightning's SIGTERM handler starts a collective operation from within the handler, and hangs in another
    trainer._signal_connector.register_signal_handlers = lambda: None  # type: ignore[method-assign]
    return trainer
