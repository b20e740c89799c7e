"""The tables of `field_cases.md`: every case is there, and the tests they name exist."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
NUMBERS = (1, 2, 4, 5, 6, 7, 9, 10, 12, 13, 15, 17, 20, 21, 22, 23, 24, 26, 28, 29, 30, 31, 32, 35, 37, 38, 40, 41, 43, 44, 45, 48, 49)
CASES = [f"B{number:02}" for number in (*NUMBERS, 50, 53, 54, 56)]
TEST = re.compile(r"`([\w/]+\.py)::(\w+)`")


def rows(heading):
    """The cells of the table below a heading of `field_cases.md`, without its head."""
    text = (TESTS / "field_cases.md").read_text()
    section = text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in section.splitlines() if line.startswith("|")]
    assert len(cells) > 2, f"no table below {heading!r}"
    return cells[2:]


@cache
def docstrings(path):
    """Docstring by test of one file."""
    tree = ast.parse((TESTS / path).read_text())
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return {node.name: ast.get_docstring(node) or "" for node in functions if node.name.startswith("test_")}


def test_every_case_has_a_row():
    assert [row[0] for row in rows("Cases")] == CASES


@pytest.mark.parametrize("case", CASES)
def test_each_case_is_named_by_the_tests_that_close_it(case):
    (tests,) = [row[2] for row in rows("Cases") if row[0] == case]
    found = TEST.findall(tests)
    assert found
    for path, name in found:
        assert name in docstrings(path), f"{path}::{name}"
        assert case in docstrings(path)[name], f"{path}::{name} does not name {case}"


@pytest.mark.parametrize("heading", ["Worked values", "Outcomes of a workflow", "Neighbours"])
def test_the_tests_of_the_other_tables_exist(heading):
    for row in rows(heading):
        for path, name in TEST.findall(row[-1]):
            assert name in docstrings(path), f"{path}::{name}"


def test_a_neighbour_has_a_test_or_a_reason():
    for case, neighbour, answer in rows("Neighbours"):
        assert case in CASES
        assert TEST.search(answer) or answer.startswith("cannot happen:"), neighbour
