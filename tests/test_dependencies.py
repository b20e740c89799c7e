"""What is imported is declared, and what may be missing is asked for by the name of its extra."""

import ast
import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
SOURCES = [*(ROOT / "rllm_lightning").rglob("*.py"), *(ROOT / "experiments").glob("*.py")]
OWN = {"rllm_lightning", "experiments", "__main__"}


def names_of(requirements):
    """The distributions of some requirements, as pip compares them."""
    return {canonical(re.match(r"[\w.-]+", requirement)[0]) for requirement in requirements}


def canonical(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def imported():
    """Top-level package -> a source that imports it."""
    found = {}
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module]
            else:
                continue
            found |= {name.partition(".")[0]: path.relative_to(ROOT).as_posix() for name in names}
    return {name: path for name, path in found.items() if name not in sys.stdlib_module_names and name not in OWN}


def test_nothing_is_imported_that_is_not_declared():
    extras = {name for extra, packages in PROJECT["optional-dependencies"].items() if extra != "dev" for name in names_of(packages)}
    declared = names_of(PROJECT["dependencies"]) | extras
    homes = packages_distributions()
    undeclared = {name: path for name, path in imported().items() if not {canonical(home) for home in homes.get(name, [name])} & declared}
    assert undeclared == {}


def test_every_extra_is_named_by_the_error_for_its_absence():
    """The names of trackers stand in a table, from which their message is made."""
    text = "".join(path.read_text(encoding="utf-8") for path in SOURCES)
    trackers = re.search(r"EXTRAS = \{(.*?)\}", text, re.DOTALL)[1]
    named = {*re.findall(r"rllm-lightning\[(\w+)\]", text), *re.findall(r'"(\w+)"', trackers)}
    named |= set(re.findall(r'extra="(\w+)"', text))
    assert set(PROJECT["optional-dependencies"]) - {"dev"} <= named


@pytest.mark.parametrize("package", ["scipy", "matplotlib"])
def test_comparing_without_a_package_of_the_extra_says_what_to_install(package):
    code = f"import sys; sys.modules[{package!r}] = None\nfrom rllm_lightning.lab import compare_runs, comparison_page"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=ROOT, check=False)
    assert done.returncode == 1
    assert f"needs the package {package!r}: pip install 'rllm-lightning[lab]'" in done.stderr.splitlines()[-1]
