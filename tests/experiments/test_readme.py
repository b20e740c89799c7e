"""The README's way from an estimator's code to a first answer."""

import re
import shlex
from pathlib import Path

import pytest
import yaml

from experiments import card, compare, replay, sweep

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = {card: "card.py", replay: "replay.py", sweep: "sweep.py", compare: "compare.py"}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working directory with the example's module, `experiments` and `sweeps`."""
    (code,) = (block for block in re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL) if "def best_minus_rest" in block)
    (tmp_path / "my_estimators.py").write_text(code, encoding="utf-8")
    (tmp_path / "experiments").symlink_to(ROOT / "experiments")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return tmp_path


def arguments(command):
    """Those of the README's line, which stands in the block that also has the sweep of the toy."""
    (block,) = (block for block in TEXT.split("```")[1::2] if "sweeps/mini.yaml" in block)
    (line,) = (line for line in block.splitlines() if COMMANDS[command] in line)
    return shlex.split(line, comments=True)[2:]


def test_the_card_and_the_replay_know_the_example(folder, capsys):
    assert card.main(arguments(card)) == 0
    assert "best_minus_rest" in capsys.readouterr().out
    assert replay.main([*arguments(replay), "--out", str(folder)]) == 0
    out = capsys.readouterr().out
    assert "rloo and best_minus_rest differ clearly" in out
    assert "do not come out again" not in out  # the stored advantages are those of the code as it is
    assert re.search(r"best_minus_rest +4\.0% +94\.8%", out)  # what the README says of it


@pytest.mark.long
def test_the_sweep_and_the_comparison_come_to_an_answer(folder, capsys):
    content = yaml.safe_load((ROOT / "sweeps" / "mini.yaml").read_text(encoding="utf-8"))
    content["parameters"]["plugins"]["value"] = ["my_estimators"]
    content["parameters"]["rllm.algorithm.adv_estimator"]["values"] = ["rloo", "best_minus_rest"]
    (folder / "sweeps").mkdir()
    (folder / "sweeps" / "mini.yaml").write_text(yaml.safe_dump(content), encoding="utf-8")
    assert sweep.main(arguments(sweep)) == 0
    assert compare.main(arguments(compare)) == 0
    assert re.search(r"rloo and best_minus_rest|best_minus_rest and rloo", capsys.readouterr().out)
