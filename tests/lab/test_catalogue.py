"""The committed page of the docs is the generated one."""

from rllm_lightning.lab.catalogue import PAGE, estimators_page
from rllm_lightning.registry import ESTIMATORS


def test_the_committed_page_is_what_the_registry_says():
    assert PAGE.read_text(encoding="utf-8") == estimators_page(), "run: python -m rllm_lightning.lab.catalogue"


def test_every_estimator_of_the_library_has_a_row_and_plugins_have_none(register):
    def of_a_plugin(rewards):
        return rewards, rewards

    of_a_plugin.__module__ = "my_plugin"
    register(of_a_plugin)
    page = estimators_page()
    own = [name for name, entry in ESTIMATORS.items() if entry.function.__module__.startswith("rllm_lightning.")]
    assert [line.split("`")[1] for line in page.split("## Presets")[0].splitlines() if line.startswith("| `")] == own
    assert "of_a_plugin" not in page


def test_every_estimator_of_the_library_declares_formula_and_source():
    own = {name: entry for name, entry in ESTIMATORS.items() if entry.function.__module__.startswith("rllm_lightning.")}
    assert [name for name, entry in own.items() if not (entry.formula and entry.source)] == []


def test_the_page_of_presets_holds_the_known_first_advantages():
    # the table of libraries: rewards 1, 0, 0, 0
    table = estimators_page().split("## Presets")[1]
    found = {cells[1].strip(" `"): cells[3].strip() for line in table.splitlines() if len(cells := line.split("|")) > 4}
    expected = {"grpo": "1.732047", "grpo_trl": "1.499700", "grpo_verl": "1.499997", "grpo_nemo": "1.000000", "dr_grpo": "0.750000"}
    assert found.items() >= expected.items()
