"""What the script behind docs/RESULTS.md promises: its rows are sound, and a bad one touches nothing."""

import importlib.util
from pathlib import Path

import pytest

from maskaq.recipe.schema import load_recipe

HERE = Path(__file__).parent.parent / "benchmarks"
spec = importlib.util.spec_from_file_location("table", HERE / "table.py")
table = importlib.util.module_from_spec(spec)
spec.loader.exec_module(table)


@pytest.mark.parametrize("file", sorted((HERE / "rows").glob("*.txt")), ids=lambda file: file.stem)
def test_every_row_is_a_recipe_under_a_name_of_its_own(file, tmp_path):
    rows = table.read(file)
    assert len({row["name"] for row in rows}) == len(rows) > 0
    for row in rows:
        recipe = row["recipe"].replace("{0}", str(tmp_path)).replace("{1}", str(tmp_path))
        assert load_recipe(recipe, *row["overrides"], bits=row["bits"]).quantization.bits == row["bits"]


@pytest.mark.parametrize("name", ["", ".", "..", "../victim", "a/b", "/tmp/x"])
def test_a_name_that_is_no_name_is_refused_with_its_line(name, tmp_path):
    file = tmp_path / "rows.txt"
    file.write_text(f"# first\n{name} | cifar10_vit | noise | w4a4 | 0 |\n")
    with pytest.raises(SystemExit, match="line 2: expected NAME"):
        table.read(file)


@pytest.mark.parametrize("line", ["a | cifar10_vit | noise | w4a4 | 0", "a | cifar10_vit | noise | w4a4 | x |"])
def test_a_row_that_lacks_something_is_refused_with_its_line(line, tmp_path):
    file = tmp_path / "rows.txt"
    file.write_text(line)
    with pytest.raises(SystemExit, match="line 1"):
        table.read(file)
    with pytest.raises(SystemExit, match="cannot read"):
        table.read(tmp_path / "none.txt")
