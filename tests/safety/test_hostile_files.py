"""B56: files that others made run nothing: checkpoints to resume from or to replay at, weights, and code that comes with a model."""

import json
import pickle
import shutil
import sys
from collections import OrderedDict

import pytest
import torch

from experiments import replay as replay_script
from experiments import run as run_script
from rllm_lightning.config import ConfigError, ModelConfig
from rllm_lightning.models.load import load_model
from rllm_lightning.models.tiny import tiny_model
from rllm_lightning.trainer.checkpoints import CHECKPOINT_KEY, read_checkpoint
from tests.quick import QUICK

STEP = [*QUICK, "rllm.trainer.total_batches=1"]


class Opens:
    """What, when it is unpickled, makes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@pytest.fixture(autouse=True)
def unsafe(monkeypatch):
    """Even where PyTorch is told to run what is in files, when nobody says that it must not."""
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a run of one step."""
    root = tmp_path_factory.mktemp("finished")
    assert run_script.main([*STEP, f"run_root={root}"]) == 0
    (config,) = root.glob("*/*/config.yaml")
    return config.parent


@pytest.fixture
def run(finished, tmp_path):
    """A copy of it."""
    return shutil.copytree(finished, tmp_path / "runs" / finished.parent.name / finished.name)


def plant(path, kind, marker):
    """A hostile checkpoint in place of `path`: a bare pickle, PyTorch's archive, one that looks like ours, or a sharded one's folder."""
    content = torch.load(path, weights_only=True)
    for each in path.parent.glob("*.ckpt"):
        each.unlink()
    if kind == "pickle":
        path.write_bytes(pickle.dumps(Opens(marker)))
    elif kind == "archive":
        torch.save({"state_dict": {}, "x": Opens(marker)}, path)
    elif kind == "ours":
        torch.save(content | {"hooks": Opens(marker)}, path)
    else:
        path.mkdir()
        (path / ".metadata").write_bytes(pickle.dumps(Opens(marker)))
        torch.save({"x": Opens(marker)}, path / "meta.pt")


KINDS = ["pickle", "archive", "ours", "folder"]


@pytest.mark.parametrize(
    ("way", "kind"),
    [*((way, kind) for way in ("directory", "file") for kind in KINDS), ("auto", "archive"), ("auto", "ours")],  # else none is found
)
def test_a_hostile_checkpoint_is_refused_before_anything_is_loaded(run, tmp_path, capfd, way, kind):
    """B56."""
    last, marker = run / "checkpoints" / "last.ckpt", tmp_path / "ran"
    plant(last, kind, marker)
    resume = {"directory": run, "file": last, "auto": "auto"}[way]
    before = sorted(tmp_path.rglob("*"))
    base = [str(run / "config.yaml"), f"run_root={tmp_path / 'runs'}", "rllm.trainer.total_batches=2"]
    assert run_script.main([*base, f"rllm.trainer.resume={resume}"]) == 2
    error = capfd.readouterr().err
    assert error.count("error: ") == 1
    assert "error: rllm.trainer.resume: " in error
    assert "weights_only" not in error  # nobody is told how to run it
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("kind", KINDS)
def test_a_hostile_checkpoint_is_not_replayed(run, tmp_path, capfd, kind):
    last, marker = run / "checkpoints" / "last.ckpt", tmp_path / "ran"
    plant(last, kind, marker)
    before = sorted(tmp_path.rglob("*"))
    assert replay_script.main([str(run), "--estimators", "grpo", "--checkpoint", str(last)]) == 2
    error = capfd.readouterr().err
    assert error.count("\n") == 1
    assert "error: --checkpoint: " in error
    assert sorted(tmp_path.rglob("*")) == before


def test_lightning_itself_reads_plain_data_alone(run, tmp_path, monkeypatch):
    """Where a file changes between the check and the loading."""
    from rllm_lightning.trainer import resume

    monkeypatch.setattr(resume, "read_checkpoint", lambda path: {})
    plant(run / "checkpoints" / "last.ckpt", "ours", tmp_path / "ran")
    with pytest.raises(pickle.UnpicklingError):
        run_script.main([str(run / "config.yaml"), "rllm.trainer.total_batches=2", f"rllm.trainer.resume={run}"])
    assert not (tmp_path / "ran").exists()


def test_a_foreign_checkpoint_is_refused(run, capfd):
    last = run / "checkpoints" / "last.ckpt"
    last.unlink()
    torch.save({"state_dict": {}}, last)
    assert run_script.main([str(run / "config.yaml"), "rllm.trainer.total_batches=2", f"rllm.trainer.resume={last}"]) == 2
    assert "is not one of this library's checkpoints" in capfd.readouterr().err


def test_own_checkpoints_are_plain_containers_and_tensors(finished):
    """B56."""
    content = read_checkpoint(finished / "checkpoints" / "last.ckpt")
    kinds = set()

    def walk(node):
        kinds.add(type(node))
        if isinstance(node, dict):
            assert {type(key) for key in node} <= {str, int}
        for part in node.values() if isinstance(node, dict) else node if isinstance(node, list | tuple) else ():
            walk(part)

    walk(content)
    assert kinds <= {dict, OrderedDict, list, tuple, str, int, float, bool, type(None), torch.Tensor}
    assert content[CHECKPOINT_KEY]["global_step"] == 1


# -------------------------------------------------------------------------------------------------------------- model folders


@pytest.fixture
def model_folder(tmp_path):
    model, tokenizer = tiny_model(0)
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("name", ["pytorch_model.bin", "sharded"])
def test_pickled_weights_are_not_opened(model_folder, tmp_path, name):
    marker = tmp_path / "ran"
    (model_folder / "model.safetensors").unlink()
    if name == "sharded":
        name = "pytorch_model-00001-of-00001.bin"
        index = {"metadata": {"total_size": 1}, "weight_map": {"model.embed_tokens.weight": name}}
        (model_folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    torch.save({"x": Opens(marker)}, model_folder / name)
    with pytest.raises(ConfigError, match=r"^model\.name: ") as caught:
        load_model(ModelConfig(name=str(model_folder)))
    assert len(caught.value.problems) == 1
    assert not marker.exists()


def test_pickled_weights_of_an_adapter_are_not_opened(model_folder, tmp_path):
    """transformers loads an adapter that lies beside a model by itself."""
    marker = tmp_path / "ran"
    adapter = {
        "peft_type": "LORA",
        "base_model_name_or_path": str(model_folder),
        "r": 2,
        "target_modules": ["q_proj"],
        "task_type": "CAUSAL_LM",
    }
    (model_folder / "adapter_config.json").write_text(json.dumps(adapter))
    torch.save({"x": Opens(marker)}, model_folder / "adapter_model.bin")
    with pytest.raises(ConfigError, match=r"^model\.name: "):
        load_model(ModelConfig(name=str(model_folder)))
    assert not marker.exists()


@pytest.mark.parametrize("part", ["model", "tokenizer", "generation"])
def test_code_in_a_model_folder_is_not_run(model_folder, tmp_path, part):
    marker, known = tmp_path / "ran", {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own", "AutoTokenizer": ["own.Own", None]}
    (model_folder / "own.py").write_text(f"open({str(marker)!r}, 'w')\n")
    changes = {
        "model": ("config.json", {"model_type": "own", "auto_map": known}),
        "tokenizer": ("tokenizer_config.json", {"tokenizer_class": "OwnTokenizer", "auto_map": known}),
        "generation": ("config.json", {"custom_generate": "own", "auto_map": known}),  # a known type: its own class is taken
    }
    name, change = changes[part]
    path, before = model_folder / name, set(sys.modules)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    if part == "generation":
        (model_folder / "custom_generate").mkdir()
        shutil.copy(model_folder / "own.py", model_folder / "custom_generate" / "generate.py")
        assert type(load_model(ModelConfig(name=str(model_folder)))[0]).__module__.startswith("transformers.")
    else:
        with pytest.raises(ConfigError, match=r"Python code of its own; read it, then set model\.trust_remote_code=true"):
            load_model(ModelConfig(name=str(model_folder)))
    assert not marker.exists()
    assert not any(name == "own" or name.endswith(".own") for name in set(sys.modules) - before)
