"""What the source may not contain: nothing that executes what a file or a user says."""

import ast
import re
import subprocess
import sys
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
SOURCES = sorted(path for folder in ("src", "tools", "examples", "bench") for path in (ROOT / folder).rglob("*.py"))
MODULES = {  # that read by executing, or expand without bound
    "pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "dbm", "xml", "lxml", "yaml",
    "telnetlib", "ftplib", "imp", "code", "codeop",
}  # fmt: skip
NAMES = {"eval", "exec", "compile", "__import__", "input", "breakpoint"}
CALLS = {
    "os.system", "os.popen", "os.execv", "os.spawnl", "subprocess.getoutput", "subprocess.getstatusoutput",
    "tempfile.mktemp", "torch.jit.load", "torch.hub.load", "numpy.fromfile", "np.fromfile", "pd.read_pickle",
    "yaml.load", "shutil.unpack_archive", "ssl._create_unverified_context",
}  # fmt: skip
METHODS = {"extractall", "extract", "load_module"}
# the example keeps an estimator as scikit-learn's users do, and opens no file but its own
# report/svg.py rewrites figures that matplotlib has just drawn: texts from files are escaped in them, there is no DTD
ALLOWED = {("examples/05_scikit_learn.py", "imports joblib"), ("src/calgp/report/svg.py", "imports xml.etree")}


def dotted(node: ast.expr) -> str:
    """`a.b.c` of a call's function; empty where it is no plain name."""
    if isinstance(node, ast.Attribute):
        return f"{before}.{node.attr}" if (before := dotted(node.value)) else f".{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def keyword(call: ast.Call, name: str) -> object:
    """A literal keyword argument; None if it is not given, ... if it is no literal."""
    for given in call.keywords:
        if given.arg == name:
            return given.value.value if isinstance(given.value, ast.Constant) else ...
    return None


def complaints(tree: ast.AST) -> list[str]:
    found = []
    jinja = any(isinstance(node, ast.ImportFrom) and node.module == "jinja2" for node in ast.walk(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [each.name for each in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            found += [f"{node.lineno}: imports {name}" for name in names if name.partition(".")[0] in MODULES]
        if isinstance(node, ast.Call):
            found += [f"{node.lineno}: {why}" for why in _call(node, dotted(node.func), jinja=jinja)]
    return found


def _call(call: ast.Call, name: str, *, jinja: bool) -> list[str]:
    last = name.rpartition(".")[2]
    found = [f"calls {name}"] if name in NAMES | CALLS or ("." in name and last in METHODS) else []
    if name == "torch.load" and keyword(call, "weights_only") is not True:
        found.append("torch.load without weights_only=True")
    if last in ("load", "read_array") and name.startswith(("np.", "numpy.")) and keyword(call, "allow_pickle"):
        found.append("NumPy with allow_pickle")
    if last == "read_array" and keyword(call, "allow_pickle") is not False:
        found.append("read_array without allow_pickle=False")
    if keyword(call, "shell") not in (None, False):
        found.append("shell=")
    if last == "urlopen" or name.startswith(("requests.", "httpx.")):
        found += [] if keyword(call, "timeout") is not None else [f"{name} without timeout"]
    if keyword(call, "verify") is False:
        found.append("verify=False")
    if jinja and name.endswith("Environment") and keyword(call, "autoescape") is not True:
        found.append("Jinja without autoescape=True")
    return found


def test_nothing_executes_what_a_file_says():
    names = {path: path.relative_to(ROOT).as_posix() for path in SOURCES}
    found = [(names[path], why) for path in SOURCES for why in complaints(ast.parse(path.read_text(encoding="utf-8")))]
    assert names and [(name, why) for name, why in found if (name, why.partition(": ")[2]) not in ALLOWED] == []


@pytest.mark.parametrize(
    "code",
    [
        "eval('1')", "exec(text)", "import pickle", "from pickle import loads", "import xml.etree.ElementTree",
        "torch.load(path)", "torch.load(path, weights_only=False)", "np.load(path, allow_pickle=True)",
        "np.lib.format.read_array(stream)", "subprocess.run(text, shell=True)", "os.system(text)", "yaml.load(text)",
        "tempfile.mktemp()", "requests.get(url)", "urllib.request.urlopen(url)", "archive.extractall(place)",
        "from jinja2 import Environment\nEnvironment(loader=x)", "requests.get(url, timeout=1, verify=False)",
        "import marshal",
    ],
)  # fmt: skip
def test_the_test_sees_what_it_looks_for(code):
    assert complaints(ast.parse(code))


def test_ruff_checks_security_everywhere_in_the_source():
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert '"S"]' in text and '"src' not in text.partition("per-file-ignores]")[2].partition("\n[")[0]


def third_party_imports() -> dict[str, str]:
    """Packages that the library imports, each with a file that does."""
    found = {}
    for path in SOURCES:
        if not path.is_relative_to(ROOT / "src"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module] if isinstance(node, ast.ImportFrom) and not node.level else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            found |= {name.partition(".")[0]: path.name for name in names if name}
    return {name: file for name, file in found.items() if name not in {*sys.stdlib_module_names, "calgp"}}


def test_every_imported_package_is_declared():
    """Not by luck: what another package brings today it may not bring tomorrow."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    declared = [*project["dependencies"], *(each for name in PARTS for each in extras[name])]
    names = {normal(re.match(r"[A-Za-z0-9._-]+", each)[0]) for each in declared}
    brought_by = packages_distributions()
    missing = {
        name: file
        for name, file in third_party_imports().items()
        if not names & {normal(each) for each in brought_by.get(name, [name])}
    }
    assert not missing


# extras of the library itself
PARTS = ("fast", "svdkl", "serve", "export", "tensorboard", "mlflow", "ray", "parquet", "hub")


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_the_extra_all_brings_every_extra_of_the_library():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (text,) = extras["all"]
    assert sorted(text.removeprefix("calgp[").removesuffix("]").split(",")) == sorted(PARTS)
    assert set(extras) - set(PARTS) == {"all", "networks", "docs", "test", "bench", "audit", "check"}


def test_the_types_are_marked_for_type_checkers():
    assert (ROOT / "src" / "calgp" / "py.typed").is_file()


def test_the_lower_bounds_are_those_of_the_project():
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "oldest.py")], capture_output=True, text=True, check=True
    )
    found = dict(line.split("==") for line in done.stdout.splitlines())
    assert found["torch"] == "2.4" and found["pydantic"] == "2.8"  # serve's bound is the higher
