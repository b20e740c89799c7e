"""The folder of one run: `{run_root}/{project_name}/{experiment_name}-{id}/`, and where in it each file lies.

`RunDirectory.create(config)` makes a new one and writes the resolved `config.yaml`; `RunDirectory.open(path)` is for resuming
and viewing. Nothing is ever overwritten: a folder is made exclusively, and files that are written as a whole go through
`atomic_write`. To add a file to a run: add a property here.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

from rllm_lightning import schema, values
from rllm_lightning.config import Config, ConfigError
from rllm_lightning.tracking.secrets import MASK, referred_secrets, scrub

MAX_NAME_BYTES = 120  # file systems allow 255 bytes a name; the id and suffixes of files inside need some
NAMED = "\ufdd1"  # around the name of an environment variable, until it is written; a character without a meaning
RESERVED = re.compile(r"(con|prn|aux|nul|com[0-9]|lpt[0-9])(\.|$)", re.IGNORECASE)  # names Windows keeps for devices


class WriteError(OSError):
    """A file of a run cannot be written: the disk is full, read-only, or gone. The message names the file and the reason."""

    def __init__(self, path: Path, reason: str):
        super().__init__(f"cannot write {path}: {reason}")
        self.path = path


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Around what writes the file or folder `path`: its system error becomes a `WriteError`, also where a library raises one of its
    own in the wake of it (PyTorch's writer) or instead of it (safetensors)."""
    try:
        yield
    except WriteError:
        raise
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, OSError):
            cause = cause.__context__
        if cause is not None:
            raise WriteError(path, cause.strerror or str(cause)) from error
        if type(error).__name__ == "SafetensorError" and "os error" in str(error):
            raise WriteError(path, str(error)) from error
        raise


@dataclass(frozen=True)
class RunDirectory:
    """An existing run directory."""

    path: Path

    @classmethod
    def create(cls, config: Config) -> RunDirectory:
        """Make the directory of a new run and write its `config.yaml`.

        Raises:
            ConfigError: no directory can be made under `run_root`.
        """
        trainer = config.rllm.trainer
        root = root_of(config)
        project = root / safe_name(trainer.project_name)
        try:
            project.mkdir(parents=True, exist_ok=True)
            run = cls(_make_exclusively(project, safe_name(trainer.experiment_name)))
            atomic_write(run.config_yaml, config_text(config))
        except OSError as error:
            problem = f"run_root: cannot make a run directory under {str(root)!r} ({error}); choose a writable folder"
            raise ConfigError([problem]) from error
        return run

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> RunDirectory:
        """An existing run directory.

        Raises:
            ValueError: `path` is not a folder with a `config.yaml`.
        """
        folder = Path(path).expanduser().absolute()
        if not (folder / "config.yaml").is_file():
            raise ValueError(f"{folder}: not a run directory (it has no config.yaml)")
        return cls(folder)

    def remove_scraps(self) -> None:
        """Delete what a killed process had begun to write: never the file itself, which is whole or not there."""
        for pattern in ("**/.writing-*", "**/.*.tmp"):
            for path in self.path.glob(pattern):
                path.unlink(missing_ok=True)

    @property
    def id(self) -> str:
        """Start time and random digits: the end of the folder's name (the whole name where somebody renamed it)."""
        match = re.search(r"\d{8}-\d{6}-[0-9a-f]{6}$", self.path.name)
        return match.group() if match else self.path.name

    def episodes_under(self, episode_log_dir: str | None) -> Path:
        """The folder of the run's episodes where `rllm.episode_logging.episode_log_dir` is such."""
        return Path(episode_log_dir).expanduser() if episode_log_dir else self.episodes

    @property
    def config_yaml(self) -> Path:
        return self.path / "config.yaml"

    @property
    def metrics_csv(self) -> Path:
        return self.path / "metrics.csv"

    @property
    def summary_json(self) -> Path:
        return self.path / "summary.json"

    @property
    def tables_json(self) -> Path:
        return self.path / "tables.json"

    @property
    def episodes(self) -> Path:
        return self.path / "episodes"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def wandb(self) -> Path:
        return self.path / "wandb"

    @property
    def mlflow_run_id(self) -> Path:
        return self.path / "mlflow_run_id"

    @property
    def report_html(self) -> Path:
        return self.path / "report.html"

    @property
    def figures(self) -> Path:
        return self.path / "figures"


def root_of(config: Config) -> Path:
    """The folder that run directories are made in.

    Raises:
        ConfigError: `run_root` cannot be the path of a folder.
    """
    try:
        return values.as_path(config.run_root).absolute()
    except ValueError as error:
        raise ConfigError([f"run_root: {error}"]) from error


def safe_name(name: str) -> str:
    """`name` as one path component: letters (of any script), digits, `_ . - + = @ ,`, at most `MAX_NAME_BYTES` bytes.

    Everything else becomes `-`; dots and dashes at the ends go, so `..` and hidden names cannot arise; nothing left is `unnamed`.
    """
    text = unicodedata.normalize("NFC", name)
    text = "".join(c if c in "_.-+=@," or unicodedata.category(c)[0] in "LMN" else "-" for c in text)
    text = re.sub(r"-{2,}", "-", text).strip(".-")
    text = text.encode()[:MAX_NAME_BYTES].decode(errors="ignore").rstrip(".-")
    return f"_{text}" if RESERVED.match(text) else text or "unnamed"


def _make_exclusively(parent: Path, name: str) -> Path:
    while True:
        # not Python's or NumPy's generator: runs that start with one seed must not draw one id
        path = parent / f"{name}-{datetime.now():%Y%m%d-%H%M%S}-{secrets.token_hex(3)}"
        try:
            path.mkdir()
        except FileExistsError:
            continue
        return path


def atomic_write(path: Path, content: str | bytes, durable: bool = True) -> None:
    """Write a whole file: after a crash at any moment `path` holds the old content or the new, never a part.

    Not `durable` is for what can be made again: the disk is not waited for (some milliseconds a file), so that the above holds if the
    process ends, but not if the machine does.

    Raises:
        WriteError: it cannot be written; `path` is as it was.
    """
    data = content if isinstance(content, bytes) else content.encode("utf-8")
    temporary = path.with_name(f".writing-{secrets.token_hex(6)}")  # in the same folder: a rename between file systems is no rename
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with temporary.open("xb") as file:
                file.write(data)
                if durable:
                    file.flush()
                    os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):  # the first error is the one to report
                temporary.unlink(missing_ok=True)
            raise


def config_text(config: Config) -> str:
    """A config as YAML that `load_config` reads back to the same values; secrets are masked, and those that came by a reference to an
    environment variable are such references again."""
    tree = values.map_text(schema.to_plain_tree(config), _as_references)
    return yaml.dump(scrub(tree), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=140)


def _as_references(text: str) -> str:
    for secret, name in sorted(referred_secrets().items(), key=lambda pair: len(pair[0]), reverse=True):
        if re.fullmatch(r"[A-Za-z_]\w*", name):
            text = text.replace(secret, f"{NAMED}{name}{NAMED}")
    return text


class _Dumper(yaml.SafeDumper):
    """Quotes text that our reader would otherwise take for something else."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    plain = re.fullmatch(r"[A-Za-z][\w./-]*", text) and isinstance(values.guess(text), str)
    text = re.sub(r"(\\*)\$\{", r"\1\1\\${", text)  # else it would be read as an interpolation
    text = re.sub(rf"{NAMED}(\w+){NAMED}", rf"${{oc.env:\1,'{MASK}'}}", text)
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if plain else '"')


_Dumper.add_representer(str, _represent_text)
