"""The layers: a room imports only itself and rooms above it, so that mathematics never learns of the trainer."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "rllm_lightning"

# From the bottom of the dependencies (may import nothing of ours) to the top.
ROOMS = ["types", "registry", "schema", "config", "algorithms", "models", "rollout", "workflows", "tasks", "tracking", "trainer", "lab"]
# Rooms of several modules that are no folder.
FILES = {"lazy": "types", "values": "schema", "config_sections": "config", "config_sources": "config", "config_checks": "config"}
MODULES = sorted(path.relative_to(PACKAGE).with_suffix("").as_posix() for path in PACKAGE.rglob("*.py"))


def room_of(module):
    """ "algorithms.advantage" -> "algorithms", "values" -> "schema"."""
    first = module.partition(".")[0]
    return FILES.get(first, first)


def imported_modules(source, module):
    """The modules of this package that a source imports outside of `if TYPE_CHECKING`, without the package's own name."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            node.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: a relative import hides the room"
            names = [f"{node.module}.{alias.name}" for alias in node.names] if node.module == "rllm_lightning" else [node.module]
        else:
            continue
        yield from (name.removeprefix("rllm_lightning.") for name in names if name.startswith("rllm_lightning."))


def upward_imports(source, module):
    own = ROOMS.index(room_of(module))
    return [name for name in imported_modules(source, module) if room_of(name) in ROOMS and ROOMS.index(room_of(name)) > own]


@pytest.mark.parametrize("path", [module for module in MODULES if module != "__init__"])
def test_no_module_imports_from_a_room_above_its_own(path):
    module = path.replace("/", ".")
    assert upward_imports((PACKAGE / f"{path}.py").read_text(encoding="utf-8"), module) == []


def test_every_module_belongs_to_a_room():
    assert {room_of(path.replace("/", ".")) for path in MODULES if path != "__init__"} == set(ROOMS)


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("from rllm_lightning.trainer.batch import collate", ["trainer.batch"]),
        ("import rllm_lightning.lab.card", ["lab.card"]),
        ("from rllm_lightning import models, types", ["models"]),
        ("def f():\n    from rllm_lightning.rollout.hf import HFEngine", ["rollout.hf"]),
        ("if TYPE_CHECKING:\n    from rllm_lightning.trainer.batch import TrainBatch", []),
        ("from rllm_lightning.values import coerce", []),
    ],
)
def test_an_upward_import_is_found_wherever_it_hides(source, found):
    assert upward_imports(source, "algorithms.advantage") == found
