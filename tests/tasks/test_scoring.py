"""Where the answer stands, and whether it is right."""

import pytest

from rllm_lightning.tasks.scoring import choice_of, exact_match, extract_answer, last_number, numeric_match, present_answer


@pytest.mark.parametrize(
    ("extract", "response", "answer"),
    [
        ("response", " 42\n", "42"),
        ("response", "", ""),
        ("last_line", "Let me see.\n\n 42 \n\n", "42"),
        ("last_line", "  ", ""),
        ("last_number", "2 + 3 is 5.", "5"),
        ("last_number", "five", None),
        ("answer_tags", "so <answer>41</answer>, no: <ANSWER>\n42 </answer>.", "42"),
        ("answer_tags", "42", None),
        ("answer_tags", "<answer>42", None),
    ],
)
def test_the_answer_is_found(extract, response, answer):
    assert extract_answer(response, extract) == answer


@pytest.mark.parametrize("extract", ["response", "last_line", "answer_tags"])
def test_a_presented_answer_is_found_again(extract):
    assert extract_answer(present_answer("1 2", extract), extract) == "1 2"


def test_an_answer_of_several_lines_cannot_stand_on_the_last_line():
    with pytest.raises(ValueError, match=r"task\.extract: last_line cannot carry the answer '1\\n2'"):
        present_answer("1\n2", "last_line")
    assert present_answer("1\n2", "response") == "1\n2"


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("The answer is 42.", 42.0),
        ("from 3 to -3", -3.0),
        ("x=-3", -3.0),
        ("5-3", 3.0),  # a difference, not a negative number
        ("(2)-3", 3.0),
        ("−7", -7.0),  # U+2212
        ("$1,234.50", 1234.5),
        ("1,2,3", 3.0),  # a list
        ("72%", 72.0),
        (".5", 0.5),
        ("3/4", 0.75),
        ("1 / 8 of it", 0.125),
        ("3/0", None),  # no number
        ("6 or 3/0", 6.0),
        ("1e-3", 0.001),
        ("\\boxed{72}", 72.0),
        ("H2O and x2", None),
        ("version v1.2.3", None),
        ("", None),
    ],
)
def test_the_last_number(text, number):
    assert last_number(text) == number


@pytest.mark.parametrize(
    ("response", "answer", "right"),
    [
        ("72", "#### 72", True),
        ("72.0", "72", True),
        ("72.00001", "72", True),  # |difference| 1e-5 <= 1e-6 · 72
        ("72.001", "72", False),
        ("0.0000005", "0", True),  # 5e-7 <= 1e-6 · max(1, 0)
        ("no idea", "72", False),
        ("1e999", "72", False),
        ("5", "1e999", False),  # no float: nothing is near it
    ],
)
def test_numbers_match_within_the_tolerance(response, answer, right):
    assert numeric_match(response, answer, 1e-6) is right


def test_texts_match_but_for_case_and_whitespace():
    assert exact_match(" New\n YORK ", "new york")
    assert exact_match("ﬁve", "five")  # the ligature is a compatible form
    assert not exact_match("newyork", "new york")
    assert not exact_match("new york.", "new york")


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("B", "B"),
        (" (b). ", "B"),
        ("**C**", "C"),
        ("B) Paris", "B"),
        ("The answer is B.", "B"),
        ("Answer: C", "C"),
        ("answer is (d)", "D"),
        ("A is wrong, so it is C", "C"),
        ("(A) no, (B) yes", "B"),
        ("so \\boxed{B}, not C", "B"),  # marked goes before what merely stands there
        ("\\boxed{\\text{D}}", "D"),
        ("It is B. A nice one.", "B"),  # the article is no answer
        ("the answer is a guess", None),
        ("f(a) = 2", None),
        ("K", None),  # none of the letters
        ("Paris", None),
        ("", None),
    ],
)
def test_the_letter_of_a_choice(text, letter):
    assert choice_of(text, "ABCDEFGHIJ") == letter
