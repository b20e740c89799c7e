from rllm_lightning.lab.card import make_card
from rllm_lightning.lab.card_sections import sections
from rllm_lightning.lab.card_table import card_table
from rllm_lightning.lab.card_warnings import warnings_of


def test_every_row_of_every_section_and_every_warning_is_a_row_of_text():
    cards = [make_card("grpo"), make_card("rloo")]
    table = card_table(cards)
    assert table.columns == ["section", "property", "grpo", "rloo"]
    assert {len(row) for row in table.rows} == {4}
    assert all(isinstance(cell, str) for row in table.rows for cell in row)
    num_cells = sum(len(section.rows) for section in sections())
    num_warnings = max(len(warnings_of(card)) for card in cards)
    assert len(table.rows) == 2 + num_cells + num_warnings  # two rows are name and formula


def test_cells_are_those_of_their_card():
    rows = {row[1]: row[2:] for row in card_table([make_card("grpo"), make_card("reinforce")]).rows}
    assert rows["name"] == ["grpo", "reinforce"]
    assert rows["looks at: declared"] == ["group", "trajectory"]
