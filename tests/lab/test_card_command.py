"""experiments/card.py: a thin command over the cards."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rllm_lightning.registry import ESTIMATORS

ROOT = Path(__file__).parents[2]
QUICK = ["--batches", "64"]


def test_it_runs_as_a_command():
    done = subprocess.run([sys.executable, "experiments/card.py", "rloo", *QUICK], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "a group of one gets its raw reward" in done.stdout


def test_several_names_stand_side_by_side(card_command, capsys):
    assert card_command(["reinforce", "dr_grpo", *QUICK]) == 0
    out = capsys.readouterr().out
    row = next(line for line in out.splitlines() if line.strip().startswith("n=8: bias relative"))
    assert row.split()[-2:] == ["0", "0.125"]
    weights = next(line for line in out.splitlines() if "█" in line)
    assert weights.count("█" * 15) >= 1


def test_more_names_than_fit_follow_below(card_command, capsys):
    from rich.console import Console

    from rllm_lightning.lab.card import make_card
    from rllm_lightning.lab.card_text import print_cards

    cards = [make_card(name, max_batches=64) for name in ("reinforce", "rloo")]
    print_cards(cards, Console(width=70))
    out = capsys.readouterr().out
    assert out.count("What it is") == 2
    assert max(map(len, out.splitlines())) <= 70


def test_json_holds_one_object_a_card(card_command, capsys):
    assert card_command(["rloo", "pass_at_k", "k=4", "--json", *QUICK]) == 0
    first, second = json.loads(capsys.readouterr().out)
    assert (first["name"], first["kwargs"]) == ("rloo", {})  # it has no k
    assert (second["name"], second["kwargs"]) == ("pass_at_k", {"k": 4})


def test_html_is_written_to_the_file(card_command, capsys, tmp_path):
    path = tmp_path / "card.html"
    assert card_command(["rloo", "--html", str(path), *QUICK]) == 0
    assert path.read_text(encoding="utf-8").startswith("<!doctype html>")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["rlooo"], "unknown advantage estimator 'rlooo'; did you mean 'rloo'?"),
        ([], "name at least one estimator: "),
        (["rloo", "alpha=1"], "alpha: no keyword of rloo; they have: norm_adv_by_std_in_grpo"),
        (["rloo", "--plugins", "no_such_module"], "plugins: no module 'no_such_module'"),
        (["rloo", "--batches", "3"], "max_batches: must be at least 64, got 3"),
        (["pass_at_k", "k=0", *QUICK], None),  # a value that the estimator refuses is on its card
    ],
)
def test_a_bad_command_line_exits_with_2_and_one_line(card_command, capsys, argv, message):
    code = card_command(argv)
    captured = capsys.readouterr()
    if message is None:
        assert code == 0
        assert "raises ValueError" in captured.out
    else:
        assert code == 2
        assert message in captured.err
        assert len(captured.err.splitlines()) == 1


def snippet_of_the_docs():
    return re.search(r"```python\n(.*?)```", (ROOT / "docs" / "card.md").read_text(encoding="utf-8"), re.DOTALL).group(1)


def test_every_command_of_the_docs_names_estimators_that_they_or_the_library_define():
    """And the module of the docs is another than the README's, which readers have saved in the same folder."""
    text, saved = (ROOT / "docs" / "card.md").read_text(encoding="utf-8"), re.compile(r"`(my_\w+)\.py`")
    (module,) = saved.findall(text)
    assert module not in saved.findall((ROOT / "README.md").read_text(encoding="utf-8"))
    assert set(re.findall(r"plugins=\[(\w+)\]", text)) == {module}
    defined = {*ESTIMATORS, *re.findall(r'register_rllm_adv_estimator\("(\w+)"', text)}
    for line in re.findall(r"experiments/card\.py ([\w ]+)", text):
        assert set(line.split()) - {"plugins", "k"} <= defined


def run_with_plugin(tmp_path, source):
    (tmp_path / "my_odds.py").write_text(source, encoding="utf-8")
    command = [sys.executable, str(ROOT / "experiments" / "card.py"), "odds", "plugins=[my_odds]", "--json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)[0]


def test_the_ten_lines_of_the_docs_are_ten_and_their_card_finds_the_fault(tmp_path):
    source = snippet_of_the_docs()
    assert len(source.splitlines()) <= 10
    card = run_with_plugin(tmp_path, source)
    assert "returns nan (on: all right); a run would stop there" in card["warnings"]


def test_the_repaired_lines_of_the_docs_blow_up_near_one_as_the_docs_say(tmp_path):
    card = run_with_plugin(tmp_path, snippet_of_the_docs().replace("/ (1 - r.mean())", "/ max(1 - r.mean(), 0.01)"))
    assert card["odd_one_out"][-1]["only_wrong"] == pytest.approx(-99.8, abs=0.1)  # -(511/512) / 0.01
    assert any(text.startswith("blows up at p near 1") for text in card["warnings"])
    weights = next(curve["weights"] for curve in card["weights"] if curve["n"] == 8)
    assert weights == sorted(weights)
    assert all(row["bias"] is not None for row in card["gradients"])
