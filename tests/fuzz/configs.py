"""Configurations of any kind, as pairs of a dotted key and the text that stands behind it."""

from hypothesis import strategies as st

from rllm_lightning import schema
from rllm_lightning.config import Config
from rllm_lightning.registry import ENGINES, TASKS

OPEN = {"task": TASKS, "rollout_engine": ENGINES}  # sections whose further keys are those of a chosen entry


def schema_leaves(cls: type = Config, path: str = "") -> list[str]:
    """The dotted key of every leaf below a section; of open sections only what holds for every entry."""
    found = []
    for key, leaf in schema.keys_of(cls).items():
        found += schema_leaves(leaf.kind, f"{path}{key}.") if schema.is_section(leaf.kind) else [f"{path}{key}"]
    return found


def entry_leaves(section: str, name: str) -> list[str]:
    """The dotted keys that the entry `name` adds to the open section `task` or `rollout_engine`."""
    return [f"{section}.{key}" for key in schema.parameters_of(OPEN[section].get(name))]


def all_leaves() -> list[str]:
    """Every leaf there is, those of the library's own tasks and rollout engines included."""
    chosen = [
        (section, name) for section, registry in OPEN.items() for name, entry in registry.items() if "rllm_lightning" in entry.__module__
    ]
    return sorted({*schema_leaves(), *(key for section, name in chosen for key in entry_leaves(section, name))})


# As they would stand behind `key:` in a file, or behind `key=` in a command line.
ODD_VALUES = [
    *("", "~", "null", "Null", "None", "true", "no", "on", "???", "auto", "x", "nan", ".nan", "-.inf", ".inf", "1e400", "-0.0", "1__0"),
    *("0", "1", "-1", "3", "0.5", "1.0000000000000001", "007", "0x1f", "0o17", "12:30", "2001-02-30", "2001-12-14t21:59:43.10-05:00"),
    *("9" * 18, "-" + "9" * 30, "9" * 400, "1" + "0" * 5000, "1e308", "5e-324", "4294967295", "4294967296", str(2**63)),
    *("[]", "[1, 2", "[a, [b, [c]]]", "[1, null, x]", "(1, 2)", "(1,", "{}", "{a: 1}", "{a: {b: {c: []}}}", "{1: 2}", "{a: 1, a: 2}"),
    *("{? [1] : 2}", "'quoted'", '"double\\n"', '"\\ud800"', '"\\ud83d\\ude00"', "|\n    block\n    text", ">-\n    folded", "'", '"'),
    *("\\", "%", "@", "`", "- a", "a: b", "#", "${seed}", "${", "${nowhere}", "${rllm}", "${div:4,2}", "${div:1,0}", "${oc.env:HOME}"),
    *("${oc.create:{a: 1}}", "${${seed}}", "\\${seed}", "${rllm.rollout.n}", "&a [*a]", "&a {b: *a}", "*a", "&a x", "[&a x, *a]"),
    *("{<<: {a: 1}}", "{<<: 1}", "<<", "!!python/object:os.system x", "!!python/name:os.system", "!!python/object/apply:os.getcwd []"),
    *("!!int x", "!!int ''", "!!int 3", "!!int [1]", "!!float x", "!!float 1e-3", "!!bool maybe", "!!bool true", "!!null x", "!!str [1]"),
    *("!!timestamp x", "!!timestamp 2001-01-01", "!!binary '='", "!!binary aGk=", "!!set {a, b}", "!!omap [a: 1]", "!!pairs [a: 1]"),
    *("!!map {a: 1}", "!!seq [1]", "!!str 1", "!local x", "! x", "!<x> y", "é", "実", "𝄞", "\u202eabc", "\ufeff", "\u2028", "a\u0000b"),
    *("\x7f", "\ud800", "a\tb", "é" * 300, "/", ".", "..", "/dev/null", "a:b", "a/b", "[" * 60 + "]" * 60, "{a: " * 60 + "1" + "}" * 60),
    *("[" * 2000, "{a: " * 2000, "[" + "&a [x, x], " + "*a, " * 50 + "]"),
]
WORDS = ["name", "n", "kwargs", "<<", "grpo", "rloo", "ppo", "solver", "csv", "hf", "gridworld", "single_turn", "cpu", "ddp", "bfloat16"]
NUMBERS = st.integers().map(str) | st.floats().map(repr) | st.integers(-3, 3).map(str)
TEXTS = st.text(st.characters(codec=None), max_size=8)  # of every plane, lone surrogates and control characters included
SCALARS = st.sampled_from(ODD_VALUES) | NUMBERS | st.sampled_from(WORDS) | TEXTS
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3).map(lambda items: f"[{', '.join(items)}]")
        | st.dictionaries(TEXTS | st.sampled_from(WORDS), inner, max_size=3).map(
            lambda items: f"{{{', '.join(f'{key}: {value}' for key, value in items.items())}}}"
        )
    ),
    max_leaves=4,
)
