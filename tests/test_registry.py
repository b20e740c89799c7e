"""Registries: names become code, once, and a miss says what there is."""

import importlib
import sys

import pytest

from rllm_lightning import registry as registries
from rllm_lightning.registry import Registry, load_plugins


@pytest.fixture
def colours():
    found = Registry("colour", "paint.colour")
    found.add("red", int)
    found.add("green", float)
    return found


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    """plugin(name, source) writes a module into the working directory."""
    monkeypatch.chdir(tmp_path)

    def write(name, source):
        path = tmp_path.joinpath(*name.split(".")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
        importlib.invalidate_caches()
        return name

    yield write
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]
    sys.path[:] = [entry for entry in sys.path if entry != str(tmp_path)]


def test_entries_are_found_by_name_in_order(colours):
    assert colours.get("red") is int
    assert colours.names() == list(colours) == ["green", "red"]
    assert colours.items() == [("green", float), ("red", int)]
    assert ("red" in colours, "blue" in colours, len(colours)) == (True, False, 2)


def test_a_decorator_registers_and_returns_the_function_itself(colours):
    def blue():
        return 3

    assert colours.register("blue")(blue) is blue
    assert colours.get("blue") is blue


def test_a_miss_names_the_key_the_nearest_name_and_all_names(colours):
    with pytest.raises(ValueError, match=r"paint.colour: unknown colour 'rad'; did you mean 'red'\? Registered: green, red"):
        colours.get("rad")


def test_a_miss_far_from_every_name_suggests_none(colours):
    assert "did you mean" not in colours.unknown("xyz")
    assert colours.unknown("xyz", "wall.paint").startswith("wall.paint: unknown colour 'xyz'. Registered: green, red")
    assert "Registered: none" in Registry("colour", "paint.colour").unknown("red")


def test_two_definitions_under_one_name_are_refused_naming_both(colours):
    def mine():
        pass

    with pytest.raises(ValueError, match=r"colour 'red' is registered twice, by builtins.int and by .*mine; rename one"):
        colours.add("red", mine)
    assert colours.get("red") is int


def test_the_same_definition_again_replaces_the_first(colours):
    def define():
        def mine():
            pass

        return mine

    first, again = define(), define()
    colours.add("mine", first)
    assert colours.add("mine", again) is again
    assert colours.get("mine") is again


@pytest.mark.parametrize("name", ["", "  ", None, 3, int])
def test_a_name_is_non_empty_text(colours, name):
    with pytest.raises(ValueError, match="name of a colour must be a non-empty string"):
        colours.add(name, print)


def test_home_modules_load_at_the_first_look_up_only(plugin):
    home = plugin("shade_home", "import tests_shades\ntests_shades.SHADES.add('dark', print)\n")
    plugin("tests_shades", "from rllm_lightning.registry import Registry\nSHADES = Registry('shade', 'shade', ['shade_home'])\n")
    load_plugins([])
    import tests_shades

    assert home not in sys.modules
    assert "dark" in tests_shades.SHADES
    assert home in sys.modules


def test_a_home_module_that_fails_fails_again_at_the_next_look_up(plugin):
    """One failed import must not make its names unknown for ever."""
    load_plugins([])
    plugin("broken_home", "raise RuntimeError('out of paint')")
    found = Registry("shade", "shade", ["broken_home"])
    for _ in range(2):
        with pytest.raises(RuntimeError, match="out of paint"):
            found.names()


def test_a_home_module_may_look_up_while_it_loads(plugin):
    plugin("tests_loop", "from rllm_lightning.registry import Registry\nLOOP = Registry('loop', 'loop', ['loop_home'])\n")
    plugin("loop_home", "from tests_loop import LOOP\nLOOP.add('a', print)\nassert LOOP.get('a') is print\n")
    load_plugins(["tests_loop"])
    assert sys.modules["tests_loop"].LOOP.names() == ["a"]


# ----------------------------------------------------------------------------------------------------------------- plugins


def test_a_plugin_in_the_working_directory_registers_its_entries(plugin, monkeypatch):
    colours = Registry("colour", "paint.colour")
    monkeypatch.setattr(registries, "COLOURS", colours, raising=False)
    name = plugin("my_pkg.mine", "from rllm_lightning.registry import COLOURS\n@COLOURS.register('mine')\ndef mine(seed): ...\n")
    load_plugins([name])
    load_plugins([name])
    assert colours.names() == ["mine"]


def test_a_missing_plugin_is_named_with_the_place_it_is_searched_from(plugin, tmp_path):
    with pytest.raises(ValueError, match=r"plugins: no module 'nowhere' on the Python path; it is searched from ") as error:
        load_plugins(["nowhere"])
    assert str(tmp_path) in str(error.value)


def test_a_plugin_that_needs_a_missing_module_says_which(plugin):
    with pytest.raises(ValueError, match=r"^plugins: 'half' needs the module 'nowhere', which is not installed$"):
        load_plugins([plugin("half", "import nowhere")])
    with pytest.raises(ValueError, match=r"^plugins: 'unnamed' cannot be imported: install it first$"):
        load_plugins([plugin("unnamed", "raise ModuleNotFoundError('install it first')")])
    with pytest.raises(ValueError, match=r"^plugins: no module 'nowhere\.below' on the Python path; it is searched from "):
        load_plugins(["nowhere.below"])


@pytest.mark.parametrize(
    ("source", "words"),
    [("1/0", "ZeroDivisionError: division by zero"), ("def", "SyntaxError"), ("raise SystemExit(0)", "SystemExit: 0")],
)
def test_a_plugin_that_fails_is_named_with_the_reason(plugin, source, words):
    with pytest.raises(ValueError, match=f"plugins: importing 'bad' failed: {words}"):
        load_plugins([plugin("bad", source)])


@pytest.mark.parametrize("name", ["", ".", ".relative", "a..b"])
def test_what_is_no_module_name_is_an_error_of_the_key(plugin, name):
    with pytest.raises(ValueError, match=r"^plugins: "):
        load_plugins([name])


# ---------------------------------------------------------------------------------------------------------- our registries


@pytest.mark.parametrize(
    ("name", "kind", "key"),
    [
        ("ESTIMATORS", "advantage estimator", "rllm.algorithm.adv_estimator"),
        ("LOSSES", "policy loss", "rllm.algorithm.loss_fn"),
        ("TASKS", "task", "task.name"),
        ("WORKFLOWS", "workflow", "rllm.workflow.name"),
        ("ENVIRONMENTS", "environment", "rllm.workflow.workflow_args.environment"),
        ("ENGINES", "rollout engine", "rollout_engine.name"),
        ("TRACKERS", "tracker", "rllm.trainer.logger"),
    ],
)
def test_there_is_a_registry_for_each_kind_of_thing_that_a_config_names(name, kind, key):
    found = getattr(registries, name)
    assert (found.kind, found.key) == (kind, key)
    assert found.names()


def test_a_policy_loss_is_registered_with_what_the_trainer_must_know(monkeypatch):
    monkeypatch.setattr(registries.LOSSES, "_entries", dict(registries.LOSSES._entries))

    def loss(logprobs_BT, old_logprobs_BT, advantages_BT, mask_BT, *, low: float = 0.5, high=2.0):
        """The first line.

        More.
        """

    assert registries.register_policy_loss("mine", needs_old_logprobs=False, scope="row")(loss) is loss
    entry = registries.LOSSES.get("mine")
    assert (entry.function, entry.formula, entry.needs_old_logprobs, entry.scope) == (loss, "The first line.", False, "row")
    assert entry.kwargs == {"low": 0.5, "high": 2.0}
