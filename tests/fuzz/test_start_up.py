"""Whatever stands in a config: a run begins, or is refused with exit code 2 and a message that names the key. Nothing else happens.

`experiments/run.py` as it is, up to the moment at which it would load a model.
"""

import os

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from experiments import run as run_script
from rllm_lightning import schema
from rllm_lightning.config import Config
from rllm_lightning.trainer.unified_trainer import UnifiedTrainer
from tests.fuzz.configs import VALUES, all_leaves
from tests.quick import QUICK

LEAVES = all_leaves()
KNOWN = {*schema.all_keys(Config), *LEAVES}
PAIRS = st.tuples(st.sampled_from(LEAVES), VALUES)
FORMS = st.sampled_from(["{}={}", "--{}={}", "+{}={}", "file", "file", "file"])
CALM = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]


@pytest.fixture(autouse=True)
def without_training(monkeypatch, tmp_path):
    """A trainer that could be made is not run. What a run leaves in the working directory would be seen there."""
    monkeypatch.setattr(UnifiedTrainer, "fit", lambda self: None)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def begins_or_says_why(tmp_path_factory, tmp_path, capfd):
    """begins_or_says_why([(form, (key, text)), ...]); form "file": a line of a preset."""
    folder = tmp_path_factory.mktemp("presets")
    quick, preset = folder / "quick.yaml", folder / "fuzz.yaml"
    quick.write_text("\n".join(word.replace("=", ": ", 1) for word in QUICK), encoding="utf-8")

    def check(entries):
        lines = [f"{key}: {text}" for form, (key, text) in entries if form == "file"]
        preset.write_bytes("\n".join(lines).encode("utf-8", "surrogatepass"))
        words = [form.format(key, text) for form, (key, text) in entries if form != "file"]
        code = run_script.main([str(quick), str(preset), *words])
        error = capfd.readouterr().err
        assert code in (0, 2), error
        assert os.listdir(tmp_path) == []
        assert "Traceback" not in error
        problems = [line for line in error.splitlines() if line.startswith("error: ")]
        assert bool(problems) == (code == 2)
        given_keys = [key for _, (key, _) in entries]
        for problem in problems:
            if len(entries) == 1 and preset.name not in problem:
                assert given_keys[0].rpartition(".")[2] in problem
            assert preset.name in problem or any(key in problem for key in KNOWN), problem

    return check


@settings(max_examples=40, suppress_health_check=CALM)
@given(st.lists(st.tuples(FORMS, PAIRS), min_size=1, max_size=4))
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_any_config_begins_or_says_why(begins_or_says_why, entries):
    begins_or_says_why(entries)


@pytest.mark.long
@settings(max_examples=5000, suppress_health_check=CALM)
@given(st.lists(st.tuples(FORMS, PAIRS), min_size=1, max_size=2) | st.lists(st.tuples(FORMS, PAIRS), min_size=3, max_size=6))
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.timeout(3600)
def test_any_of_thousands_of_configs_begins_or_says_why(begins_or_says_why, entries):
    begins_or_says_why(entries)


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("rllm.rollout.n", "1e15"),
        ("lightning.devices", "1e15"),
        ("lightning.devices", "1e308"),
        ("lightning.num_nodes", "0"),
        ("model.name", "~nobody-of-this-name/x"),
        ("model.name", "x" * 5000),
        ("rllm.trainer.resume", "x" * 5000),
        ("rllm.trainer.resume", "~nobody-of-this-name/x"),
        ("rllm.workflow.workflow_args", "{a: " * 100 + "1" + "}" * 100),
        ("seed", "!!bool maybe"),
    ],
)
def test_what_would_fill_the_memory_or_end_in_a_traceback_is_refused_by_key(begins_or_says_why, key, text):
    begins_or_says_why([("{}={}", (key, text))])
    begins_or_says_why([("file", (key, text))])
