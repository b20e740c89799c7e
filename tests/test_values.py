"""From text or a Python object to the declared type of a key."""

import json
import math
from enum import StrEnum
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rllm_lightning.values import Mismatch, Quoted, as_path, check_structure, coerce, describe, guess, is_null, parse_structure, parse_yaml


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


FITS = [
    # numbers, as every source writes them
    ("1e-6", float, 1e-6),
    ("5e5", float, 500000.0),
    ("0", float, 0.0),
    (".5", float, 0.5),
    ("-2.", float, -2.0),
    ("1_000.5", float, 1000.5),
    ("inf", float, math.inf),
    ("-.inf", float, -math.inf),
    (Quoted("1e-6"), float, 1e-6),  # PyYAML reads 1e-6 as text, and W&B hands it on in quotes
    (3, float, 3.0),
    (np.float32(0.5), float, 0.5),
    (np.array(2.0), float, 2.0),
    ("4", int, 4),
    ("4.0", int, 4),
    (4.0, int, 4),
    ("1e3", int, 1000),
    ("007", int, 7),
    (" -12 ", int, -12),
    (np.int64(3), int, 3),
    # booleans
    ("true", bool, True),
    ("False", bool, False),
    ("on", bool, True),
    ("NO", bool, False),
    (True, bool, True),
    (np.bool_(False), bool, False),
    # text keeps what was written
    ("007", str, "007"),
    ("12:30", str, "12:30"),
    ("on", str, "on"),
    ("1e-6", str, "1e-6"),
    (" padded ", str, " padded "),
    ("", str, ""),
    (Quoted("null"), str, "null"),
    (7, str, "7"),
    (Colour.RED, str, "red"),
    # null where it is allowed
    ("None", str | None, None),
    ("null", int | None, None),
    ("~", float | None, None),
    ("", str | None, None),
    (None, bool | None, None),
    (Quoted("None"), str | None, "None"),
    ("x", str | None, "x"),
    ("3", int | None, 3),
    # unions: text comes last
    ("2", int | str | list[int], 2),
    ("auto", int | str | list[int], "auto"),
    ("0,1", int | str | list[int], [0, 1]),
    ("[0, 1]", int | str | list[int], [0, 1]),
    # choices
    ("tis", Literal["none", "tis"], "tis"),
    ("2", Literal[1, 2], 2),
    (True, Literal[True, "auto"], True),
    ("red", Colour, Colour.RED),
    (Colour.BLUE, Colour, Colour.BLUE),
    ("red", Colour | str, Colour.RED),
    ("pink", Colour | str, "pink"),
    # lists
    ("['a', 'b']", list[str], ["a", "b"]),
    ('["a", "b"]', list[str], ["a", "b"]),
    ("[a, b]", list[str], ["a", "b"]),
    ("('a', 'b')", list[str], ["a", "b"]),
    ("(1,)", list[int], [1]),
    ("a,b", list[str], ["a", "b"]),
    ("0 1", list[int], [0, 1]),
    ("0 1", tuple[int, int], (0, 1)),
    ((1, "2"), list[float], [1.0, 2.0]),
    ("[0, 0.5]", tuple[int, float], (0, 0.5)),
    ("[1, 2, 3]", tuple[int, ...], (1, 2, 3)),
    ("[007, 12:30, on]", list[str], ["007", "12:30", "on"]),
    ("a", list[str], ["a"]),
    ("", list[str], []),
    ("null", list[str], []),
    ("[]", list[int], []),
    ("[[1, 2], [3]]", list[list[int]], [[1, 2], [3]]),
    # mappings
    ("{'a': 1e-06, 'b': None}", dict[str, Any], {"a": 1e-6, "b": None}),
    ('{"a": null, "b": false}', dict[str, Any], {"a": None, "b": False}),
    ("{a: 1}", dict[str, str], {"a": "1"}),
    (None, dict[str, Any], {}),
    ({1: "2"}, dict[str, int], {"1": 2}),
]


@pytest.mark.parametrize(("value", "kind", "expected"), FITS)
def test_a_value_that_fits_becomes_its_type(value, kind, expected):
    """B40, B50: numbers, null, booleans, lists and text mean the same from every source."""
    result = coerce(value, kind)
    assert result == expected
    assert type(result) is type(expected)


MISFITS = [
    ("abc", float, "a number"),
    ("nan", float, "a number"),
    (math.nan, float, "a number"),
    (True, float, "a number"),
    ("1e", float, "a number"),
    ("1__", float, "a number"),
    (10**400, float, "a number"),
    ("9" * 5000, int, "a whole number"),
    ("4.5", int, "a whole number"),
    ("inf", int, "a whole number"),
    (math.nan, int, "a whole number"),
    (True, int, "a whole number"),
    ("on", int, "a whole number"),
    (None, int, "a whole number"),
    ("2", bool, "true or false"),
    (1, bool, "true or false"),
    ([True], bool, "true or false"),
    ("None", str, "text, not null"),
    ("~", str, "text, not null"),
    (None, str, "text"),
    (True, str, "text"),
    ({"a": 1}, str, "text"),
    ("x", int | None, "a whole number or null"),
    ("x", bool | float, "true or false or a number"),
    ("tiss", Literal["none", "tis"], r"one of none, tis \(did you mean tis\?\)"),
    ("1", Literal[True, "auto"], "one of True, auto"),
    ("rad", Colour, "one of red, blue"),
    (3, list[int], "a list"),
    ({"a": 1}, list[str], "a list"),
    ("[1, x]", list[int], "a whole number"),
    ("1 2 3", tuple[int, int], "a list of 2"),
    ("abc", dict[str, Any], "a mapping"),
    ("[1]", dict[str, Any], "a mapping"),
    (3, dict[str, int], "a mapping"),
    ("{a: x}", dict[str, int], "a whole number"),
    ("x", object, "a value of type object, which a config cannot give"),
]


@pytest.mark.parametrize(("value", "kind", "expected"), MISFITS)
def test_a_value_that_does_not_fit_says_what_was_expected(value, kind, expected):
    with pytest.raises(Mismatch, match=f"^{expected}"):
        coerce(value, kind)


GUESSES = [
    ("1e-6", 1e-6),
    ("3", 3),
    ("-0", 0),
    ("1_000", 1000),
    ("1.50", 1.5),
    (".inf", math.inf),
    ("true", True),
    ("False", False),
    ("None", None),
    ("null", None),
    ("", None),
    ("007", "007"),
    ("12:30", "12:30"),
    ("on", "on"),
    ("no", "no"),
    ("1_", "1_"),
    ("0x1f", "0x1f"),
    ("9" * 5000, "9" * 5000),
    ("[1, a, '2']", [1, "a", "2"]),
    ("{a: 1e-6, b: [on]}", {"a": 1e-6, "b": ["on"]}),
    ("{unclosed", "{unclosed"),
    (" padded ", " padded "),
    (Quoted("3"), "3"),
    (Quoted(""), ""),
    (Quoted("{a: 1}"), "{a: 1}"),
    (np.int64(3), 3),
    ({"a": ("1", Quoted("1"))}, {"a": [1, "1"]}),
    (2.5, 2.5),
]


@pytest.mark.parametrize(("value", "expected"), GUESSES)
def test_without_a_type_only_what_is_plainly_a_number_or_a_word_is_taken_for_one(value, expected):
    result = guess(value)
    assert result == expected
    assert type(result) is type(expected)


def test_yaml_keeps_scalars_as_written_and_knows_which_stood_in_quotes():
    content = parse_yaml("a: 007\nb: '1'\nc: [on, 1e-6]\nd:\ne: |\n  x\n")
    assert content == {"a": "007", "b": "1", "c": ["on", "1e-6"], "d": "", "e": "x\n"}
    assert [isinstance(content[key], Quoted) for key in "abde"] == [False, True, False, True]


@pytest.mark.parametrize("tag", ["int", "float", "bool", "null", "timestamp", "str"])
def test_a_scalar_stays_text_whatever_its_tag(tag):
    assert parse_yaml(f"!!{tag} maybe") == "maybe"
    with pytest.raises(ValueError, match="scalar"):
        parse_yaml(f"!!{tag} [1]")


def test_what_anchors_unfold_into_is_counted_before_anybody_walks_it():
    """Ten lines of ten references each stand for 10^10 items."""
    lines = ["a0: &a0 x", *(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 11))]
    with pytest.raises(ValueError, match="anchors unfold into more than 1000000 items"):
        parse_yaml("\n".join(lines))
    assert len(parse_yaml("\n".join(lines[:6]))["a5"]) == 10


@pytest.mark.parametrize("text", ["[" * 21 + "]" * 21, "{a: " * 21 + "}" * 21, "\n".join(" " * i + "a:" for i in range(22)), "[" * 9999])
def test_what_is_nested_deeper_than_code_can_walk_is_refused(text):
    with pytest.raises(ValueError, match="nested more than 20 levels"):
        parse_yaml(text)


def test_nesting_is_counted_from_the_top_wherever_an_anchor_stands():
    deep = "a: &a " + "[" * 15 + "]" * 15
    assert parse_yaml(f"{deep}\nb: [[[*a]]]")
    with pytest.raises(ValueError, match="nested"):
        parse_yaml(f"{deep}\nb: [[[[[*a]]]]]")
    loop: list = []
    loop.append(loop)
    for value in ({"a": loop}, {"a": {1}}, [b"x"]):
        with pytest.raises(ValueError):
            check_structure(value)


def test_yaml_anchors_and_merge_keys_work():
    assert parse_yaml("base: &b {x: 1, y: 2}\nmine: {<<: *b, y: 3}") == {"base": {"x": "1", "y": "2"}, "mine": {"x": "1", "y": "3"}}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: 1\na: 2", "the key 'a' stands twice"),
        ("{a: {b: 1, b: 2}}", "the key 'b' stands twice"),
        ("a: [1", "expected"),
        ("a: &x [*x]", "holds itself"),
        ("a: !!python/object:os.system {}", "could not determine a constructor"),
        ("[" * 5000, "nested"),
        ("a: \x00", "special characters"),
    ],
)
def test_what_is_no_yaml_is_one_line_of_reason(text, words):
    with pytest.raises(ValueError, match=words) as error:
        parse_yaml(text)
    assert "\n" not in str(error.value)


PYTHON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@given(st.lists(PYTHON, max_size=3) | st.dictionaries(st.text(), PYTHON, max_size=3))
def test_json_text_of_a_value_brings_the_value_back(value):
    """B40: lists and mappings come through a command line unchanged."""
    assert guess(parse_structure(json.dumps(value))) == value


@given(st.lists(PYTHON, max_size=3) | st.dictionaries(st.text(), PYTHON, max_size=3))
def test_python_text_of_a_value_brings_the_value_back(value):
    """B40: W&B's agent writes lists and mappings as Python does."""
    assert guess(parse_structure(repr(value))) == value


KINDS = [
    bool,
    int,
    float,
    str,
    str | None,
    int | str | list[int],
    Literal["a", 1],
    Colour,
    list[str],
    tuple[int, float],
    dict[str, Any],
    Any,
]


@given(PYTHON | st.text().map(Quoted), st.sampled_from(KINDS))
def test_coercion_gives_a_value_that_keeps_or_a_mismatch_and_nothing_else(value, kind):
    try:
        result = coerce(value, kind)
    except Mismatch:
        return
    if kind not in (str, str | None, Any, dict[str, Any]):  # where text can have been quoted
        assert coerce(result, kind) == result


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (int | None, "a whole number or null"),
        (Literal["a", 1], "one of a, 1"),
        (list[int], "a list"),
        (dict, "a mapping"),
        (Colour, "Colour"),
    ],
)
def test_a_type_is_described_in_words(kind, words):
    assert describe(kind) == words


def test_null_is_a_word_without_quotes():
    assert all(map(is_null, [None, "null", "None", "~", "", " "]))
    assert not any(map(is_null, [0, False, "none", Quoted("null"), Quoted(""), []]))


@pytest.mark.parametrize("text", ["é" * 300, "a\0b", "\ud800", "~nobody-of-this-name/x"])
def test_what_nothing_can_be_called_is_no_path(text):
    with pytest.raises(ValueError, match="is no usable path"):
        as_path(text)


def test_a_path_may_lead_nowhere(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert as_path("~/a/b") == tmp_path / "a" / "b"
    (tmp_path / "file").write_text("")
    assert as_path(f"{tmp_path}/file/x")
