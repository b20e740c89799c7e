"""What an import costs: work on an estimator starts without torch."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
TORCH_FREE = [
    "rllm_lightning",
    "rllm_lightning.types",
    "rllm_lightning.registry",
    "rllm_lightning.values",
    "rllm_lightning.schema",
    "rllm_lightning.config",
    "rllm_lightning.algorithms.advantage",
    "rllm_lightning.algorithms.rl_algo",
    "rllm_lightning.algorithms.transform",
    "rllm_lightning.algorithms.rejection_sampling",
    "rllm_lightning.algorithms.metrics",
    "rllm_lightning.rollout.engine",
    "rllm_lightning.rollout.hf",
    "rllm_lightning.rollout.openai",
    "rllm_lightning.rollout.vllm",
    "rllm_lightning.rollout.scripted",
    "rllm_lightning.workflows",
    "rllm_lightning.tasks",
]
HEAVY = {"torch", "lightning", "transformers", "wandb"}

LOAD = """
import importlib, pkgutil, sys
for name in sys.argv[1:]:
    module = importlib.import_module(name)
    if name.endswith(("workflows", "tasks")):  # every module of these rooms
        for found in pkgutil.iter_modules(module.__path__, name + "."):
            importlib.import_module(found.name)
print(*sorted({name.partition(".")[0] for name in sys.modules}))
"""


def loaded_after(code, *args):
    """The top-level modules that a fresh interpreter holds after `code`."""
    result = subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    return set(result.stdout.split())


def test_the_rooms_up_to_workflows_and_tasks_import_without_torch():
    assert not loaded_after(LOAD, *TORCH_FREE) & HEAVY


@pytest.mark.parametrize(
    "statement",
    [
        "from rllm_lightning import Step, Trajectory, AlgorithmConfig, rLLMAdvantageEstimator",
        "from rllm_lightning import calculate_grpo_advantages, register_rllm_adv_estimator, Workflow, ScriptedEngine",
        "import rllm_lightning; rllm_lightning.AlgorithmConfig.from_config({'rllm': {'algorithm': {'adv_estimator': 'rloo'}}})",
    ],
)
def test_public_names_below_the_trainer_cost_no_torch(statement):
    assert not loaded_after(f"{statement}\nimport sys\nprint(*{{name.partition('.')[0] for name in sys.modules}})") & HEAVY


def test_a_mistake_in_a_configuration_is_found_without_torch():
    code = """
import sys
from experiments.run import main
assert main(["rollout_engine.max_batch_size=2", "data.train_batch_size=-1"]) == 2
print(*{name.partition(".")[0] for name in sys.modules})
"""
    assert not loaded_after(code) & HEAVY


def test_importing_the_package_alone_loads_nothing_beside_the_standard_library():
    code = "import sys; before = set(sys.modules); import rllm_lightning; print(*{n.partition('.')[0] for n in set(sys.modules) - before})"
    assert not loaded_after(code) - set(sys.stdlib_module_names) - {"rllm_lightning"}


def test_no_torch_is_allowed_that_runs_code_from_checkpoints():
    """B56: `torch.load(weights_only=True)` holds from 2.6 on."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (torch,) = [Requirement(text) for text in project["dependencies"] if Requirement(text).name == "torch"]
    assert not torch.specifier.contains("2.5.1")
    assert torch.specifier.contains("2.6.0")
