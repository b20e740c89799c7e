"""Sections of a config: dotted keys, merging, building with every problem, and the way back to plain data."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rllm_lightning.registry import Registry
from rllm_lightning.schema import all_keys, build, check, keys_of, kind_at, merge, parameters_of, show, to_plain_tree, unfold
from rllm_lightning.values import Quoted

SHAPES: Registry[Any] = Registry("shape", "shape.name")


@SHAPES.register("square")
def square(seed: int, *, side: float = 1.0, labels: tuple[str, ...] = ("a",)): ...


@SHAPES.register("circle")
class Circle:
    def __init__(self, setup, *, radius: float, unit: Literal["cm", "m"] = "cm", untyped=3):
        pass


class Size(StrEnum):
    SMALL = "small"
    BIG = "big"


@dataclass
class Optim:
    lr: float = 1e-5
    wd: float = 0.01
    betas: tuple[float, float] = (0.9, 0.99)
    kwargs: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self):
        check(self, (self.wd <= 1, f"wd: too large, got {self.wd}"), lr="[0, 1)")


@dataclass
class Shape:
    name: str = "square"
    args: dict[str, Any] = field(default_factory=dict, metadata={"key": None})
    open_registry: ClassVar[Registry[Any]] = SHAPES


@dataclass
class Whole:
    optim: Optim = field(default_factory=Optim)
    shape: Shape = field(default_factory=Shape)
    size: Size = field(default=Size.SMALL, metadata={"key": "extent"})
    names: list[str] = field(default_factory=list)
    limit: int | None = None


def built(tree, root=Whole):
    problems: list[str] = []
    return build(root, unfold(tree, root, problems), problems), problems


def problems_of(tree):
    return built(tree)[1]


# ------------------------------------------------------------------------------------------------------------------- keys


def test_the_keys_of_a_section_are_its_fields_under_their_key():
    assert list(keys_of(Whole)) == ["optim", "shape", "extent", "names", "limit"]
    assert list(all_keys(Whole)) == [
        "optim",
        "optim.lr",
        "optim.wd",
        "optim.betas",
        "optim.kwargs",
        "shape",
        "shape.name",
        "extent",
        "names",
        "limit",
    ]


def test_an_open_section_has_the_keyword_only_parameters_of_its_entry():
    assert list(keys_of(Shape)) == ["name"]
    assert list(keys_of(Shape, "square")) == ["name", "side", "labels"]
    assert list(keys_of(Shape, "circle")) == ["name", "radius", "unit", "untyped"]
    assert parameters_of(Circle)["unit"] == (Literal["cm", "m"], "cm")
    assert parameters_of(Circle)["untyped"] == (Any, 3)


def test_annotations_for_type_checkers_alone_leave_a_parameter_untyped():
    def entry(seed, *, near: "Nowhere" = None, size: int = 1): ...  # noqa: F821

    assert parameters_of(entry) == {"near": (Any, None), "size": (Any, 1)}


@pytest.mark.parametrize(
    ("key", "kind"),
    [
        ("optim", Optim),
        ("optim.lr", float),
        ("optim.kwargs", dict[str, Any]),
        ("optim.kwargs.x", None),
        ("shape.side", None),
        ("nope", None),
        ("optim.lr.x", None),
    ],
)
def test_a_dotted_key_has_the_declared_type(key, kind):
    assert kind_at(Whole, key.split(".")) == kind


# ---------------------------------------------------------------------------------------------------------------- merging


def merged(*trees, root=Whole):
    base: dict[str, Any] = {}
    problems: list[str] = []
    for tree in trees:
        merge(base, unfold(tree, root, problems), root)
    assert problems == []
    return base


def test_dotted_nested_and_text_forms_of_a_key_are_one():
    """B41: over {lr: 1e-5, wd: .01}, `optim.lr=.1` and `optim={'lr': 0.1}` both leave wd alone."""
    base = {"optim": {"lr": "1e-5", "wd": ".01"}}
    for update in ({"optim.lr": ".1"}, {"optim": {"lr": ".1"}}, {"optim": "{'lr': .1}"}, {"optim": '{"lr": .1}'}):
        assert merged(base, update) == {"optim": {"lr": ".1", "wd": ".01"}}


def test_a_mapping_of_free_keys_merges_too():
    assert merged({"optim.kwargs": {"a": 1}}, {"optim.kwargs.b": 2}, {"optim.kwargs": "{c: 3}"}) == {
        "optim": {"kwargs": {"a": 1, "b": 2, "c": "3"}}
    }


def test_text_over_an_untyped_mapping_merges_unless_it_stands_in_quotes():
    base = {"optim.kwargs": {"t": {"a": 1}}}
    assert merged(base, {"optim.kwargs.t": "{b: 2}"})["optim"]["kwargs"] == {"t": {"a": 1, "b": "2"}}
    assert merged(base, {"optim.kwargs.t": Quoted("{b: 2}")})["optim"]["kwargs"] == {"t": "{b: 2}"}


def test_keys_inside_a_mapping_keep_their_dots_and_sections_do_not():
    assert merged({"optim.kwargs": {"a.b": 1}, "optim": {"lr": 2}}) == {"optim": {"kwargs": {"a.b": 1}, "lr": 2}}


def test_null_leaves_a_section_as_it_is_and_empties_a_mapping():
    base = {"optim": {"lr": 0.5, "kwargs": {"a": 1}}}
    assert merged(base, {"optim": None}) == base
    assert merged(base, {"optim": ""}) == base
    assert built(merged(base, {"optim.kwargs": "null"}))[0].optim == Optim(lr=0.5)


def test_merging_changes_no_source():
    first, second = {"optim": {"kwargs": {"a": 1}}}, {"optim": {"kwargs": {"b": 2}}}
    merged(first, second)
    assert (first, second) == ({"optim": {"kwargs": {"a": 1}}}, {"optim": {"kwargs": {"b": 2}}})


def test_a_new_name_drops_the_keys_of_the_old_entry():
    assert merged({"shape": {"name": "square", "side": 2}}, {"shape.name": "circle", "shape.radius": 1}) == {
        "shape": {"name": "circle", "radius": 1}
    }
    assert merged({"shape.side": 2}, {"shape": {"name": "circle"}}) == {"shape": {"name": "circle"}}  # square is the default


def test_the_same_name_keeps_the_keys():
    assert merged({"shape.side": 2}, {"shape.name": "square"}) == {"shape": {"side": 2, "name": "square"}}
    assert merged({"shape": {"name": "circle", "radius": 1}}, {"shape.unit": "m"}) == {
        "shape": {"name": "circle", "radius": 1, "unit": "m"}
    }


def test_braces_in_text_are_text_where_text_is_expected():
    assert merged({"shape.side": "{x}"}) == {"shape": {"side": "{x}"}}
    assert merged({"optim.kwargs": {"template": "{question}"}})["optim"]["kwargs"]["template"] == "{question}"


@pytest.mark.parametrize("key", ["", ".", "optim.", ".lr", "optim..lr"])
def test_a_key_with_an_empty_part_is_no_key(key):
    problems: list[str] = []
    assert unfold({key: 1}, Whole, problems) == {}
    assert problems == [f"{key!r}: not a key; a key is section.name, and an override section.name=value"]


# --------------------------------------------------------------------------------------------------------------- building


def test_nothing_given_gives_the_defaults():
    whole, problems = built({})
    assert problems == []
    assert whole == Whole(shape=Shape(args={"side": 1.0, "labels": ("a",)}))


def test_values_get_their_declared_types():
    whole, problems = built({"optim": {"lr": "1e-3", "betas": "0.5 0.6"}, "extent": "big", "names": "a,b", "limit": "4.0"})
    assert problems == []
    assert whole.optim == Optim(lr=1e-3, betas=(0.5, 0.6))
    assert (whole.size, whole.names, whole.limit) == (Size.BIG, ["a", "b"], 4)


def test_the_keys_of_an_open_section_are_typed_by_its_entry():
    whole, problems = built({"shape": {"name": "circle", "radius": "2", "unit": "m", "untyped": "1e-6"}})
    assert problems == []
    assert whole.shape == Shape("circle", {"radius": 2.0, "unit": "m", "untyped": 1e-6})


def test_every_problem_is_found_at_once():
    assert problems_of(
        {
            "optim": {"lr": "abc", "wd": 2, "betas": "1", "momentum": 1},
            "shape": {"name": "circle", "unit": "km"},
            "extent": "hug",
            "names": 3,
            "limit": "???",
            "optm": 1,
        }
    ) == [
        "optm: unknown key; did you mean optim?",
        "optim.momentum: unknown key; keys here: betas, kwargs, lr, wd",
        "optim.lr: expected a number, got 'abc'",
        "optim.betas: expected a list of 2, got '1'",
        "optim.wd: too large, got 2.0",
        "shape.radius: required, but not given (expected a number)",
        "shape.unit: expected one of cm, m (did you mean m?), got 'km'",
        "extent: expected one of small, big, got 'hug'",
        "names: expected a list, got 3",
        "limit: required, but not given (expected a whole number or null)",
    ]


@pytest.mark.parametrize(
    ("tree", "hint"),
    [
        ({"optim.l": 1}, "optim.l: unknown key; did you mean optim.lr?"),  # in the same section
        ({"betas": 1}, "betas: unknown key; did you mean optim.betas?"),  # of the same last part
        ({"optin.wd": 1}, "optin: unknown key; did you mean optim?"),
        ({"shape.sid": 1}, "shape.sid: unknown key for 'square'; did you mean shape.side?"),
        (
            {"shape": {"name": "circle", "side": 1, "radius": 1}},
            "shape.side: unknown key for 'circle'; keys here: name, radius, unit, untyped",
        ),
        ({"size": 1}, "size: unknown key; keys here: extent, limit, names, optim, shape"),
        ({"zzz": 1}, "zzz: unknown key; keys here: extent, limit, names, optim, shape"),
        ({3: 1}, "3: unknown key; keys here: extent, limit, names, optim, shape"),
    ],
)
def test_an_unknown_key_comes_with_the_nearest_one(tree, hint):
    assert problems_of(tree) == [hint]


def test_a_range_is_named_with_the_key_and_the_value():
    assert problems_of({"optim.lr": 1, "optim.wd": 3}) == ["optim.lr: must be in [0, 1), got 1.0", "optim.wd: too large, got 3.0"]


@pytest.mark.parametrize("value", ["3", "[1]", 3, ["lr"], "{lr", Quoted("lr")])
def test_a_section_must_be_a_mapping(value):
    assert problems_of({"optim": value}) == [f"optim: expected a section (a mapping), got {value!r}"]


def test_the_keys_of_an_unknown_entry_are_left_alone():
    """Its name is reported by the check of names; which keys it would have, nobody knows."""
    whole, problems = built({"shape": {"name": "cube", "edge": 1}})
    assert (whole.shape.name, whole.shape.args, problems) == ("cube", {}, [])


@pytest.mark.parametrize("name", [["square"], {"a": 1}, None, True])
def test_a_name_that_is_no_text_is_a_problem(name):
    assert problems_of({"shape.name": name, "shape.side": 1})[0].startswith("shape.name: expected text")


@pytest.mark.parametrize(
    ("tree", "where"),
    [
        ({"limit": "???"}, "limit"),
        ({"optim.kwargs": {"a": {"b": "???"}}}, "optim.kwargs.a.b"),
        ({"shape": {"name": "circle"}}, "shape.radius"),
    ],
)
def test_a_value_that_is_required_and_missing_is_named(tree, where):
    assert [problem.partition(":")[0] for problem in problems_of(tree)] == [where]


def test_values_in_messages_are_short():
    assert show("x" * 200) == "'" + "x" * 76 + "..."
    assert len(show(list(range(200)))) == 80


# ---------------------------------------------------------------------------------------------------------------- and back


def test_a_built_section_goes_back_to_plain_data_under_its_keys():
    whole, _ = built({"optim.kwargs": {"a": (1, None)}, "shape": {"name": "circle", "radius": 1}, "extent": "big"})
    tree = to_plain_tree(whole)
    assert tree == {
        "optim": {"lr": 1e-5, "wd": 0.01, "betas": [0.9, 0.99], "kwargs": {"a": [1, None]}},
        "shape": {"name": "circle", "radius": 1.0, "unit": "cm", "untyped": 3},
        "extent": "big",
        "names": [],
        "limit": None,
    }
    assert type(tree["extent"]) is str
    assert built(tree) == (whole, [])


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from(["???", "null", "{a: 1}", "[1", "${x}", "1e-6"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(), inner, max_size=2),
    max_leaves=4,
)
KEYS = st.sampled_from([*all_keys(Whole), "shape.side", "shape.radius", "optim.kwargs.x"]) | st.text(max_size=6)


@given(st.dictionaries(KEYS, VALUES, max_size=4))
def test_any_data_is_built_or_its_problems_are_named(tree):
    whole, problems = built(tree)
    assert isinstance(whole, Whole)
    if not problems:
        assert isinstance(to_plain_tree(whole), dict)


# ----------------------------------------------------------------------------------------------------------------- checks


@dataclass
class Ranges:
    value: float | None = 0.0
    interval: str = "[0, 1]"

    def __post_init__(self):
        check(self, value=self.interval)


@pytest.mark.parametrize(
    ("value", "interval", "inside"),
    [
        (0, "[0, 1]", True),
        (1, "[0, 1]", True),
        (0, "(0, 1]", False),
        (1, "[0, 1)", False),
        (1e300, "[0, inf)", True),
        (float("inf"), "[0, inf)", False),
        (float("inf"), "(0, inf]", True),
        (float("nan"), "[0, inf]", False),
        (-1, "[0, inf)", False),
        (None, "[0, 1]", True),
    ],
)
def test_a_bracket_includes_its_bound_and_none_passes(value, interval, inside):
    if inside:
        Ranges(value, interval)
    else:
        with pytest.raises(ValueError, match="value: must be in"):
            Ranges(value, interval)
