"""The shape of the package, read from its source: who may import whom, who may know families, who may print."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import maskaq

SOURCE = Path(maskaq.__file__).parent

PAGE = (SOURCE.parents[1] / "docs/ARCHITECTURE.md").read_text()

# From the bottom up. A module imports from the rows above its own, and within its own package.
LAYERS = [row.split() for row in PAGE.partition("## Layers")[2].split("```")[1].strip().splitlines()]
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}
FILES = {path.relative_to(SOURCE).as_posix(): path for path in sorted(SOURCE.rglob("*.py"))}
TREES = {name: ast.parse(path.read_text()) for name, path in FILES.items()}
FAMILY_WORDS = ("swin", "deit", "vit_")


def room(module):
    """The part of the package that a file or a dotted name is in."""
    parts = module.removeprefix("maskaq.").removesuffix(".py").replace("/", ".").split(".")
    return parts[0]


def dotted(file):
    return "maskaq." + file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


MODULES = {dotted(file) for file in FILES}


def imports(tree):
    """Dotted names of the maskaq modules a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.split(".")[0] == "maskaq"}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            if (node.module or "").split(".")[0] == "maskaq":
                names = {f"{node.module}.{alias.name}" for alias in node.names}
                found |= {name if name in MODULES else str(node.module) for name in names}
    return found


def test_every_module_has_its_place_in_the_table():
    assert len(LAYERS) > 5 and sorted(name for row in LAYERS for name in row) == sorted(RANK)  # none twice
    assert {room(file) for file in FILES} == set(RANK)


@pytest.mark.parametrize("file", [f for f in FILES if len(TREES[f].body) > 1])  # not those with a docstring alone
def test_every_file_is_named_among_the_rooms(file):
    rooms = PAGE.partition("## Rooms")[2].partition("\n## ")[0]
    names = {file, f"{room(file)}/"} | ({Path(file).name} - {"__init__.py"})  # every package has one of those
    assert any(f"`{name}`" in rooms for name in names)


@pytest.mark.parametrize("file", FILES)
def test_imports_point_down(file):
    for name in imports(TREES[file]) - {"maskaq"}:
        assert room(name) == room(file) or RANK[room(name)] < RANK[room(file)], f"{file} imports {name}"


@pytest.mark.parametrize("file", [f for f in FILES if "maskaq" in imports(TREES[f])])
def test_the_package_itself_is_imported_for_its_version_only(file):
    used = {
        node.attr
        for node in ast.walk(TREES[file])
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "maskaq"
    }
    assert used <= {"__version__"}


def test_no_modules_import_each_other_in_a_circle():
    graph = {dotted(file): imports(tree) - {"maskaq"} for file, tree in TREES.items() if file != "__init__.py"}
    done = set()

    def visit(module, path):
        assert module not in path, f"circle: {' -> '.join([*path, module])}"
        if module not in done:
            for other in graph.get(module, ()):
                visit(other, [*path, module])
            done.add(module)

    for module in graph:
        visit(module, [])


def docstrings(tree):
    return {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    }


def texts(node):
    return [n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)]


@pytest.mark.parametrize("file", [f for f in FILES if room(f) not in ("models", "zoo")])
def test_only_models_and_zoo_know_families_by_name(file):
    tree, ignored = TREES[file], docstrings(TREES[file])
    for node in ast.walk(tree):
        name = getattr(node, "id", None) or getattr(node, "attr", None) or getattr(node, "name", None) or ""
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in ignored and file != "cli.py":
            name = node.value  # the command line may write names into its help and its choices
        assert "swin" not in str(name).lower(), f"{file}:{getattr(node, 'lineno', 0)}"


@pytest.mark.parametrize("file", FILES)
def test_no_decision_hangs_on_a_family_word_in_a_name(file):
    for node in ast.walk(TREES[file]):
        asks = isinstance(node, ast.Compare) or (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in ("startswith", "endswith", "match", "search", "fullmatch", "find")
        )
        if asks:
            words = [text for text in texts(node) for word in FAMILY_WORDS if word in text.lower()]
            assert not words, f"{file}:{node.lineno} asks for {words}"


@pytest.mark.parametrize("file", FILES)
def test_only_the_command_line_and_its_console_print(file):
    if file in ("cli.py", "commands.py", "console.py"):
        return
    for node in ast.walk(TREES[file]):
        if isinstance(node, ast.Call):
            name = getattr(node.func, "id", None) or getattr(node.func, "attr", None)
            assert name != "print", f"{file}:{node.lineno} prints"


@pytest.mark.parametrize("file", FILES)
def test_nothing_is_pickled_and_nothing_unpickled_that_runs_code(file):
    for node in ast.walk(TREES[file]):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = {getattr(node, "module", None), *(alias.name for alias in node.names)}
            assert not names & {"pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}, file
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "torch":
            assert node.attr != "save", f"{file}:{node.lineno}"
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
            safe = [k for k in node.keywords if k.arg == "weights_only" and ast.unparse(k.value) == "True"]
            assert safe, f"{file}:{node.lineno} loads without weights_only=True"


def test_the_package_imports_without_a_gpu_and_says_nothing():
    code = (
        "import maskaq, maskaq.cli.main, torch\n"
        "assert not torch.cuda.is_available() and not torch.cuda.is_initialized()\n"
        "assert all(hasattr(maskaq, name) for name in getattr(maskaq, '__all__', ()))\n"
    )
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(SOURCE.parent)]))
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path, "PYTHONWARNINGS": "ignore"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""


def test_public_names_exist_and_are_named_once():
    names = getattr(maskaq, "__all__", [])
    assert len(names) == len(set(names))
    assert not [name for name in names if not hasattr(maskaq, name)]
    assert maskaq.__version__.count(".") == 2
