"""B56: nothing that is read from a file can run code. The sources are searched for every loader that could."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = [*(ROOT / "rllm_lightning").rglob("*.py"), *(ROOT / "experiments").rglob("*.py")]
FORBIDDEN = {"eval", "exec", "compile", "pickle.load", "pickle.Unpickler", "joblib.load", "dill.load", "dill.loads", "marshal.loads"}
FORBIDDEN |= {"shelve.open", "os.system", "os.popen", "yaml.unsafe_load", "yaml.full_load", "yaml.unsafe_load_all", "yaml.load_all"}
UNPICKLED = {"trainer/ranks.py"}  # what the ranks of a run send each other over their own connection; no file
SAFE_YAML = {"_TextLoader", "_LOADER", "SafeLoader", "yaml.SafeLoader", "CSafeLoader", "yaml.CSafeLoader"}


def unsafe_calls(source):
    """`name: reason` of each call that could run what a file holds."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        name, keywords = ast.unparse(node.func), {keyword.arg: keyword.value for keyword in node.keywords}
        constants = {key: value.value for key, value in keywords.items() if isinstance(value, ast.Constant)}
        if name in FORBIDDEN or name in ("pickle.loads", "cloudpickle.loads"):
            yield name
        elif name == "torch.load" and constants.get("weights_only") is not True:
            yield "torch.load without weights_only=True"
        elif "allow_pickle" in keywords and constants.get("allow_pickle") is not False:
            yield f"{name} with allow_pickle"
        elif name == "yaml.load" and ast.unparse(keywords.get("Loader", ast.Constant(None))) not in SAFE_YAML:
            yield "yaml.load without a safe loader"
        elif "shell" in keywords and constants.get("shell") is not False:
            yield f"{name} with a shell"


def test_no_source_reads_a_file_in_a_way_that_could_run_it():
    found = {path.relative_to(ROOT).as_posix(): list(unsafe_calls(path.read_text(encoding="utf-8"))) for path in SOURCES}
    allowed = {f"rllm_lightning/{name}": ["pickle.loads"] for name in UNPICKLED}
    assert {name: calls for name, calls in found.items() if calls} == allowed


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("torch.load(path)", 1),
        ("torch.load(path, weights_only=False)", 1),
        ("torch.load(path, weights_only=given)", 1),
        ("torch.load(path, weights_only=True)", 0),
        ("np.load(path, allow_pickle=True)", 1),
        ("np.load(path)", 0),
        ("yaml.load(text, Loader=yaml.Loader)", 1),
        ("yaml.load(text, Loader=yaml.SafeLoader)", 0),
        ("subprocess.run(command, shell=True)", 1),
        ("def f():\n    return eval(text)", 1),
        ("model.eval()", 0),
        ("re.compile(text)", 0),
    ],
)
def test_the_search_finds_them(source, count):
    assert len(list(unsafe_calls(source))) == count
