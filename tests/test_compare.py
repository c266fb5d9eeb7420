"""What `maskaq compare` promises: rows are sound, each is run once, and the tables say what was measured."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import tiny_vit
from PIL import Image
from test_methods import METHODS

from maskaq.cli import main as cli
from maskaq.cli import resolve
from maskaq.cli.processes import copies, environments
from maskaq.errors import BusyError, CalibrationError, DataError, RecipeError, RunFolderError
from maskaq.images.filtering import Score, chosen, score_images
from maskaq.models import expose, geometry
from maskaq.recipe.schema import load_recipe
from maskaq.report import comparison as page
from maskaq.runs import compare
from maskaq.runs.compare import Comparison, Line, Row, entries, read_rows, rows_of, scaled
from maskaq.storage.leases import Leases, Worker

ROWS = Path(__file__).parent.parent / "benchmarks/rows"
SMALL = (
    *("quantization.range_images=4", "synthesis.images=4", "synthesis.batch=4", "calibration.batch=4"),
    *("calibration.epochs=1", "synthesis.steps=1", "refresh.every=0"),
)


# ---------------------------------------------------------------- rows


@pytest.mark.parametrize("file", sorted(ROWS.glob("*.txt")), ids=lambda file: file.stem)
def test_every_row_is_a_recipe_under_a_name_of_its_own(file, tmp_path):
    rows = read_rows(file)
    assert rows
    for row in rows:
        recipe = row.recipe.replace("{0}", str(tmp_path)).replace("{1}", str(tmp_path))
        assert load_recipe(recipe, *row.overrides, bits=row.bits).quantization.bits == row.bits


@pytest.mark.parametrize("name", ["", ".", "..", "../victim", "a/b", "/tmp/x"])
def test_a_name_that_is_no_name_is_refused_with_its_line(name, tmp_path):
    file = tmp_path / "rows.txt"
    file.write_text(f"# first\n{name} | cifar10_vit | noise | w4a4 | 0 |\n")
    with pytest.raises(RecipeError, match="line 2: expected NAME"):
        read_rows(file)


@pytest.mark.parametrize("line", ["a | cifar10_vit | noise | w4a4 | 0", "a | cifar10_vit | noise | w4a4 | x |"])
def test_a_row_that_lacks_something_is_refused_with_its_line(line, tmp_path):
    file = tmp_path / "rows.txt"
    file.write_text(line)
    with pytest.raises(RecipeError, match="line 1"):
        read_rows(file)
    with pytest.raises(DataError, match="cannot read"):
        read_rows(tmp_path / "none.txt")
    file.write_text("a | m | noise | w4a4 | 0 |\na | m | noise | w3a3 | 0 |\n")
    with pytest.raises(RecipeError, match="'a' more than once"):
        read_rows(file)


def test_rows_of_recipes_cover_all_and_have_names_that_are_folders():
    rows = rows_of("m", ["quick", "quick+images:/a b/c"], ["w4a4", "mixed:3.5"], [0, 1])
    assert len({row.name for row in rows}) == 8 and all("/" not in row.name and ":" not in row.name for row in rows)
    assert [row.seed for row in rows] == [0] * 4 + [1] * 4


def test_a_scale_is_a_share_of_the_images_or_of_a_generators_steps_and_of_nothing_else():
    paper = load_recipe("paper")
    small = scaled(paper, 0.1)
    assert small.synthesis.images == 1000 and small.synthesis.steps == 2000 and len(small.rounds) == 7
    assert (small.calibration.epochs, small.quantization) == (200, paper.quantization)
    assert scaled(paper, 1.0) == paper and scaled(load_recipe("repq-vit"), 0.01).synthesis.images == 32
    gdfq = scaled(load_recipe("gdfq"), 0.1)
    assert (gdfq.calibration.interleave.iterations, gdfq.calibration.interleave.epochs) == (20, 400)
    assert gdfq.synthesis.generator.steps == 1000 and scaled(paper, 0.1).synthesis.generator.steps == 0


def test_the_papers_tables_have_the_papers_rows():
    table2 = read_rows(ROWS / "table2.txt")
    kinds = {(row.model, row.bits) for row in table2}
    assert kinds == {("vit_tiny_patch16_224", "w4a4"), ("deit_tiny_patch16_224", "w3a3")}
    assert all(row.recipe == "paper" for row in table2) and {row.seed for row in table2} == {0, 1}
    assert len(table2) == 2 * 2 * 5  # models, seeds, the whole method and four parts left out
    weights = {tuple(row.overrides) for row in read_rows(ROWS / "fig3.txt")}
    for word in ("similarity_entropy=0.1", "similarity_entropy=10", "attention_alignment=10", "synthesis.map=probs"):
        assert any(word in " ".join(found) for found in weights), word
    table1 = {row.recipe for row in read_rows(ROWS / "table1.txt")}
    for method in set(METHODS) - {"genq"}:  # it needs a folder of generated images
        assert method in table1 and f"quick+{method}" in table1, method
    assert {"paper", "reference"} <= table1


# ---------------------------------------------------------------- running


def batches_of(model, folder: str):
    generator = torch.Generator().manual_seed(len(folder))
    return [(torch.randn(6, 3, 32, 32, generator=generator), torch.arange(6) % 4) for _ in range(2)]


def comparison(out: Path, rows, folders=("a",), **more) -> Comparison:
    return Comparison(out, tiny_vit(), rows, source={"name": "tiny"}, batches=batches_of, folders=folders, **more)


def rows(*recipes: str, seeds=(0,)) -> list[Row]:
    return rows_of("tiny", recipes, ["w4a4"], seeds, SMALL)


def test_a_row_is_run_once_measured_on_new_folders_and_keeps_what_a_page_needs(tmp_path, monkeypatch):
    wanted = rows("paper", "mimiq")
    lines = list(comparison(tmp_path, wanted).run())
    assert [line.name for line in lines] == [row.name for row in wanted]
    assert all(len(line.hits["a"]) == 12 and line.kl["a"] >= 0 and line.seconds > 0 for line in lines)
    folder = tmp_path / wanted[0].name
    assert (folder / "quantized").exists() and (folder / "report.json").exists() and not (folder / "images").exists()
    monkeypatch.setattr(compare, "quantize", None)  # nothing is run again
    again = list(comparison(tmp_path, wanted, folders=("a", "bb")).run())
    assert all(set(line.top1) == {"a", "bb"} for line in again)
    assert again[0].hits["a"] == lines[0].hits["a"]


def test_seconds_are_those_of_the_method_without_its_report(tmp_path, monkeypatch):
    from maskaq.report import collect

    real = collect.information

    def slow(*args):
        time.sleep(1)
        return real(*args)

    monkeypatch.setattr(collect, "information", slow)
    began = time.monotonic()
    (line,) = comparison(tmp_path, rows("paper")).run()
    assert 0 < line.seconds < time.monotonic() - began - 1


def test_another_row_of_the_same_name_is_refused(tmp_path):
    (row,) = rows("paper")
    list(comparison(tmp_path, [row]).run())
    other = Row(row.name, row.model, "mimiq", row.bits, row.seed, row.overrides)
    with pytest.raises(RecipeError, match="another name"):
        list(comparison(tmp_path, [other]).run())


def test_rows_of_another_model_or_preparation_are_refused(tmp_path):
    wanted = rows("paper")
    list(comparison(tmp_path, wanted).run())
    other, prepared = tiny_vit(seed=1), tiny_vit()
    prepared.pretrained_cfg = {**prepared.pretrained_cfg, "mean": (0.1, 0.1, 0.1)}
    for model in (other, prepared):
        again = Comparison(tmp_path, model, wanted, source={"name": "tiny"}, batches=batches_of, folders=["a"])
        with pytest.raises(RecipeError, match="another full-precision model"):
            list(again.run())


def test_names_that_come_twice_or_are_taken_are_refused(tmp_path):
    (row,) = rows("paper")
    with pytest.raises(RecipeError, match="more than once"):
        comparison(tmp_path, [row, row])
    for name in ("leases", "rows.jsonl"):
        with pytest.raises(RecipeError, match=name):
            comparison(tmp_path, [Row(name, *list(vars(row).values())[1:])])


def test_a_full_disk_is_no_result_of_a_row(tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise RunFolderError("disk full")

    monkeypatch.setattr(compare, "quantize", full)
    with pytest.raises(RunFolderError):
        list(comparison(tmp_path, rows("paper")).run())
    assert not (tmp_path / "rows.jsonl").exists()


def test_a_row_whose_folder_is_locked_is_waited_for(tmp_path, monkeypatch):
    """Its lease has expired, but its process lives, or the file server still holds the lock of a dead one."""
    monkeypatch.setattr(compare, "_SECONDS_BETWEEN_TRIES", 0.01)
    locked, freed = wanted = rows("paper", seeds=(0, 1))
    other = comparison(tmp_path, wanted)
    real, tries = compare.quantize, []

    def busy(model, recipe, folder, **more):
        tries.append(folder.name)
        if tries.count(folder.name) < 3:
            raise BusyError("another maskaq process is working")
        if folder.name == locked.name:  # and finishes it
            other._write(replace(line, name=locked.name, seed=locked.seed))
            raise BusyError("another maskaq process is working")
        return real(model, recipe, folder, **more)

    (line,) = comparison(tmp_path / "earlier", [freed]).run()
    monkeypatch.setattr(compare, "quantize", busy)
    lines = list(comparison(tmp_path, wanted).run())
    assert sorted(line.name for line in lines) == sorted(row.name for row in wanted)
    assert tries.count(locked.name) == tries.count(freed.name) == 3


def test_rows_are_shared_by_leases_and_those_of_the_dead_taken_up(tmp_path, monkeypatch):
    """One row is another process's, who finishes it; one is of a process that died."""
    mine, theirs, orphan = wanted = rows("paper", seeds=(0, 1, 2))
    own = comparison(tmp_path, wanted)._quantized
    ran = []

    def finished(row: Row) -> Line:
        return Line(
            row.name, row.model, row.recipe, row.bits, row.seed, list(row.overrides), top1={"a": 1.0}, quantized=own
        )

    def run(self: Comparison, row: Row) -> Line:
        ran.append(row.name)
        if len(ran) == 2:  # the other process is through meanwhile
            self._write(finished(theirs))
            living.close()
        self._write(finished(row))
        return finished(row)

    monkeypatch.setattr(Comparison, "_run", run)
    living, dead = (Leases(tmp_path / "leases", worker) for worker in (Worker(machine="ffffffff"), Worker(pid=2**22)))
    assert living.claim(theirs.name) and dead.claim(orphan.name)
    dead._stop.set()
    lines = list(comparison(tmp_path, wanted).run())
    assert ran == [mine.name, orphan.name]
    assert sorted(line.name for line in lines) == sorted(row.name for row in wanted)
    assert not list((tmp_path / "leases").iterdir())


def test_a_comparison_refuses_torchrun(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(RecipeError, match="torchrun"):
        comparison(tmp_path, rows("paper"))


def _diverges(*args, **kwargs):
    raise CalibrationError("the loss became NaN")


def test_a_row_that_diverges_is_a_line_that_says_so_and_is_tried_again(tmp_path, monkeypatch):
    real = compare.quantize
    monkeypatch.setattr(compare, "quantize", _diverges)
    (line,) = comparison(tmp_path, rows("paper")).run()
    assert line.failed == "the loss became NaN" and entries([line])[0].failed
    monkeypatch.setattr(compare, "quantize", real)
    (line,) = comparison(tmp_path, rows("paper")).run()
    assert not line.failed


def test_no_row_begins_when_the_time_is_up(tmp_path):
    assert list(comparison(tmp_path, rows("paper")).run(limit=-1)) == []


# ---------------------------------------------------------------- several processes


def test_each_process_has_its_share_of_the_cores_and_a_gpu_of_its_own(monkeypatch):
    monkeypatch.setattr("maskaq.cli.processes.cores", lambda: 9)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert [found["OMP_NUM_THREADS"] for found in environments(4, 0)] == ["2"] * 4
    assert all("CUDA_VISIBLE_DEVICES" not in found for gpus in (0, 1) for found in environments(4, gpus))
    assert [found["CUDA_VISIBLE_DEVICES"] for found in environments(4, 3)] == ["0", "1", "2", "0"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert [found["CUDA_VISIBLE_DEVICES"] for found in environments(3, 2)] == ["4", "6", "4"]
    assert environments(1, 2)[0]["OMP_NUM_THREADS"] == "3"


def test_a_process_that_fails_says_why_and_none_outlives_the_command():
    with copies(["nonsense"], [dict(os.environ)]) as (process,):
        process.process.wait()
        assert "exit code 2" in process.failure and "nonsense" in process.failure
    with copies(["--version"], [dict(os.environ)] * 2) as started:
        assert [found.process.wait() for found in started] == [0, 0] and not any(found.failure for found in started)
    with pytest.raises(KeyboardInterrupt), copies(["bench", "cifar10_vit"], [dict(os.environ)]) as started:
        raise KeyboardInterrupt
    assert not started[0].is_running


def test_processes_are_started_only_for_rows_that_are_left(tmp_path, monkeypatch):
    done = rows("paper")
    list(comparison(tmp_path, done).run())
    assert not comparison(tmp_path, done).is_left()
    assert comparison(tmp_path, done, folders=("a", "bb")).is_left(again=False)  # to measure
    assert comparison(tmp_path, rows("mimiq")).is_left(again=False)  # beside rows of other recipes
    monkeypatch.setattr(compare, "quantize", _diverges)
    list(comparison(tmp_path, rows("noise")).run())
    failed = comparison(tmp_path, rows("noise"))
    assert failed.is_left() and not failed.is_left(again=False)


def test_a_table_with_other_settings_is_refused_before_processes_are_started(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("maskaq.cli.compare.copies", None)  # none is started
    words = ["compare", "cifar10_vit", "--recipes", "noise", "--workers", "2", "--out", str(tmp_path), "--set", *SMALL]
    model, (row,) = _model_and_rows(["noise"])
    list(Comparison(tmp_path, model, [row], source={"name": "cifar10_vit"}).run())
    assert cli.main(words) == 0  # the tables again
    (tmp_path / "compare.md").unlink()
    assert cli.main([*words, "synthesis.images=9"]) == 1
    assert "synthesis.images=9" in capsys.readouterr().err and not (tmp_path / "compare.md").exists()


def test_the_limit_counts_from_the_start_of_the_command_in_every_process(tmp_path, monkeypatch, capsys):
    told = []

    @contextmanager
    def started(words, environments):
        told.extend(environments)
        yield []

    def load_slowly(*args, load=resolve.full_precision):
        time.sleep(0.5)
        return load(*args)

    monkeypatch.setattr("maskaq.cli.compare.copies", started)
    monkeypatch.setattr(resolve, "full_precision", load_slowly)
    words = ["compare", "cifar10_vit", "--recipes", "noise", "--out", str(tmp_path), "--set", *SMALL]
    before = time.monotonic()
    assert cli.main([*words, "--workers", "2", "--limit", "0.5"]) == 1
    assert "no row is done" in capsys.readouterr().err
    (began,) = {float(environment["MASKAQ_COMPARE_BEGAN"]) for environment in told}
    assert len(told) == 2 and before <= began < before + 0.5
    monkeypatch.setenv("MASKAQ_COMPARE_BEGAN", str(before - 100))  # one of those processes, which imported for long
    assert cli.main([*words, "--limit", "90"]) == 1
    assert "no row is done" in capsys.readouterr().err


@pytest.mark.slow
def test_processes_do_the_rows_of_one_and_go_on_when_one_is_killed(tmp_path):
    recipes = ("noise", "leaves", "demo")
    words = ["compare", "cifar10_vit", "--recipes", ",".join(recipes), "--bits", "w4a4", "--set", *SMALL]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    out = tmp_path / "several"
    command = [sys.executable, "-m", "maskaq", *words, "--workers", "2", "--out", str(out)]
    parent = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    until = time.monotonic() + 240
    while not list(out.glob("*/run.json")) and time.monotonic() < until:
        time.sleep(0.1)
    children = [int(pid) for pid in Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()]
    assert len(children) == 2
    os.kill(children[0], signal.SIGKILL)
    said, _ = parent.communicate(timeout=600)
    assert parent.returncode == 0, said
    assert "exit code -9" in said
    alone = Comparison(tmp_path / "alone", *_model_and_rows(recipes), source={"name": "cifar10_vit"})
    list(alone.run())
    found = {line["name"]: line for line in map(json.loads, (out / "rows.jsonl").read_text().splitlines())}
    assert found.keys() == alone.lines().keys() and len(found) == 3
    for name, line in alone.lines().items():
        assert found[name]["handover"] == line.handover, name
    assert (out / "compare.md").read_text().count("| w4a4 |") == 3


def _model_and_rows(recipes):
    import maskaq

    return maskaq.load_model("cifar10_vit"), rows_of("cifar10_vit", recipes, ["w4a4"], [0], SMALL)


# ---------------------------------------------------------------- tables


def line(name: str, hits: str, seed: int = 0, **more) -> Line:
    share = 100 * hits.count("1") / len(hits)
    return Line(name, "m", name, "w4a4", seed, top1={"a": share}, hits={"a": hits}, kl={"a": 0.5}, seconds=2.0, **more)


def test_means_errors_and_paired_differences_are_those_of_the_hits():
    first, second = entries(
        [line("x", "1100"), line("y", "1110"), line("x", "1000", seed=1), line("y", "1110", seed=1)]
    )
    assert (first.mean, second.mean, first.seeds) == (37.5, 75.0, 2) and first.difference is None
    gaps = [0.0, 50.0, 100.0, 0.0]  # in points, of each image, over both seeds
    assert second.difference[0] == pytest.approx(37.5)
    assert second.difference[1] == pytest.approx(torch.tensor(gaps).std().item() / 2)
    sampling = 100 * (0.75 * 0.25 / 4) ** 0.5
    assert second.error == pytest.approx(sampling) and first.error > 100 * (0.375 * 0.625 / 4) ** 0.5


def test_rows_that_were_not_measured_have_a_time_and_no_figure():
    (entry,) = entries(
        [Line("a", "m", "quick", "w4a4", 0, seconds=2.0), Line("b", "m", "quick", "w4a4", 1, seconds=4.0)]
    )
    assert (entry.mean, entry.error, entry.difference, entry.kl, entry.figures) == (None, None, None, None, {})
    assert (entry.seeds, entry.seconds) == (2, 3.0)


def test_a_mean_is_of_the_folders_that_are_asked_for():
    both = line("x", "1100")
    both.top1["b"], both.hits["b"], both.kl["b"] = 100.0, "1111", 0.1
    (all_of_them,), (only,) = entries([both]), entries([both], ["b"])
    assert (all_of_them.mean, only.mean, only.kl) == (75.0, 100.0, 0.1)


def test_overrides_of_all_rows_are_said_once():
    both = [line("x", "10"), line("y", "11")]
    both[0].overrides, both[1].overrides = ["a=1", "b=2"], ["a=1"]
    assert compare.common_overrides(both) == ["a=1"]
    assert [entry.label for entry in entries(both)] == ["x b=2", "y"]


def test_a_folder_that_was_calibrated_on_is_not_in_the_mean(tmp_path):
    a, b = str(tmp_path / "imagenet"), str(tmp_path / "imagenet_v2")  # one's name begins with the other's
    for recipe in ("quick+images:{0}", "quick+images:imagenet"):
        real = Line("r", "m", recipe, "w4a4", 0, top1={a: 90.0, b: 50.0}, data_free=False, calibrated_on=a)
        real.hits = {a: "1" * 9 + "0", b: "1" * 5 + "0" * 5}
        (entry,) = entries([real])
        assert entry.mean == 50.0 and entry.figures == {a: 90.0, b: 50.0} and not entry.data_free


def test_a_row_says_which_folder_it_was_calibrated_on_however_it_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("val", "val_b"):
        Path(folder).mkdir()
        for number in range(4):
            Image.new("RGB", (32, 32), (60 * number, 0, 0)).save(f"{folder}/{number}.png")
    settings = [word for word in SMALL if "steps" not in word]
    wanted = rows_of("tiny", ["paper+images:val", "paper+images:{1}"], ["w4a4"], [0], settings)
    found = list(comparison(tmp_path / "out", wanted, folders=("val", "val_b")).run())
    assert [line.calibrated_on for line in found] == [str(tmp_path / "val"), str(tmp_path / "val_b")]


TABLE = page.Page(
    title="a | b",
    folders=("val_a",),
    rows=(
        page.TableRow("w4a4", "quick", "4 x 2", ("50.00",), "50.00 ± 1.00", "", "0.5", "3"),
        page.TableRow("w4a4", "quick+mimiq", "4 x 2", ("60.00",), "60.00 ± 1.00", "+10.00 ± 2.00", "0.4", "3"),
    ),
    about=("100 % of <images>.",),
)


def test_the_tables_hold_every_figure_and_no_markup_of_their_own():
    text = page.markdown(TABLE)
    assert "| w4a4 | quick+mimiq | 4 x 2 | 60.00 | 60.00 ± 1.00 | +10.00 ± 2.00 | 0.4 | 3 |" in text
    assert "# a \\| b" in text and "<images>" not in text
    tex = page.latex(TABLE)
    assert "\\textbf{60.00 $\\pm$ 1.00}" in tex and "\\textbf{50" not in tex
    assert "val\\_a" in tex and tex.count("\\\\") == 3 and "\\bottomrule" in tex


def test_a_latex_table_compiles_whatever_a_row_is_called_and_no_ceiling_is_its_best():
    odd = "a_b=50% #1 {x} ~ ^ \\ $ & <y> |"
    rows = (
        *(page.TableRow("w4a4", name, "", ("50.00",), "50.00 ± 1.00", "", "0.5", "3") for name in ("quick", odd)),
        page.TableRow("w4a4", "images:DIR", "", ("90.00",), "90.00", "-0.40 ± 1.00", "0.5", "3", "real images"),
        page.TableRow("w3a3", "lsq", "", ("-",), "-", "", "-", "3", f"failed: {odd}"),
    )
    text = page.latex(page.Page("t", ("val_a",), rows, ()))
    assert text.count("\\textbf") == 1 and "\\textbf{50.00" in text  # 90 is of real images
    assert (
        "$-$0.40 $\\pm$ 1.00" in text and "images:DIR$^{*}$" in text and "$^{*}$ images:DIR w4a4: real images" in text
    )
    commands = ("textbackslash{}", "textasciitilde{}", "textasciicircum{}", "textless{}", "textgreater{}", "textbar{}")
    for name in commands:
        assert text.count(f"\\{name}") == 2, name  # in the row and in the note
    _, *lines = text.splitlines()  # the first is a comment
    body = "\n".join(lines)
    for command in ("begin", "end"):
        assert body.count(f"\\{command}{{tabular}}") == 1
    plain = re.sub(r"\\[%$#_{}&]", "", body)  # without what is escaped
    assert not set("%#~^|<>") & set(plain.replace("$^{*}$", "")) and plain.count("_") == 0
    assert plain.count("{") == plain.count("}") and plain.count("$") % 2 == 0
    cells = [line.count("&") for line in plain.splitlines() if line.endswith("\\\\") and "multicolumn" not in line]
    assert cells == [6] * 5  # seven columns: the titles and four rows
    assert all(line.endswith("\\\\") or line.startswith("\\") for line in plain.splitlines())


def test_the_page_shows_images_of_every_method_for_the_same_classes(tmp_path):
    pytest.importorskip("jinja2")
    from maskaq.report import collect
    from maskaq.storage.runfolder import RunFolder

    wanted = rows("paper", "mimiq")
    list(comparison(tmp_path, wanted).run())
    kept = [collect.read(RunFolder.read(tmp_path / row.name)) for row in wanted]
    columns = tuple(page.Column(row.recipe, found) for row, found in zip(wanted, kept, strict=True))
    real = {0: torch.zeros(3, 32, 32, dtype=torch.uint8)}
    found = page.Page("t", ("a",), TABLE.rows, (), columns, real, {0: "<cat>"})
    text = page.html(found)
    for recipe in ("paper", "mimiq"):
        assert text.count(f'alt="{recipe}: ') == 4  # the classes of the model
    assert text.count('alt="attention of P"') == 8 and "&lt;cat&gt;" in text and 'alt="real image of' in text
    assert "made for no class" not in text
    for picture in kept[1].facts["images"]["shown"]:
        picture["label"] = -1
    assert "A method whose images are made for no class shows its first ones" in page.html(found)


@pytest.mark.slow
def test_the_command_runs_the_embedded_model_and_goes_on_where_it_stopped(tmp_path, capsys):
    words = [
        "compare",
        "cifar10_vit",
        "--recipes",
        "demo,demo+psaq-vit",
        "--out",
        str(tmp_path),
        "--data",
        "cifar10-demo",
    ]
    words += ["--set", *SMALL]
    assert cli.main([*words, "--limit", "0"]) == 1
    assert "no row is done yet" in capsys.readouterr().err
    assert cli.main(words) == 0
    assert "demo+psaq-vit" in (tmp_path / "compare.md").read_text()
    assert "\\begin{tabular}" in (tmp_path / "compare.tex").read_text()
    assert "Attention of P and Q" in (tmp_path / "compare.html").read_text()
    before = (tmp_path / "rows.jsonl").read_bytes()
    assert cli.main(words) == 0
    assert (tmp_path / "rows.jsonl").read_bytes() == before
    assert len([json.loads(line) for line in before.splitlines()]) == 2


def test_mistakes_in_the_command_are_answered_with_what_was_expected(tmp_path, capsys):
    for words, expected in (
        (["compare", "cifar10_vit"], "expected either --recipes"),
        (["compare", "cifar10_vit", "--recipes", "demo", "--seeds", "x"], "--seeds: expected whole numbers"),
        (["compare", "cifar10_vit", "--recipes", "demo", "--only", "y"], "there is no row y"),
        (["compare", "cifar10_vit", "--rows", str(ROWS / "table2.txt")], "no row is of the model"),
        (["compare", "cifar10_vit", "--recipes", "dmo", "--out", str(tmp_path)], "unknown recipe 'dmo'"),
    ):
        assert cli.main(words) == 1
        assert expected in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------- maskaq filter


@pytest.fixture(scope="module")
def generated(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("generated")
    for number in range(6):
        folder = root / ("x" if number % 2 else "y")
        folder.mkdir(exist_ok=True)
        pixels = torch.randint(0, 256, (32, 32, 3), generator=torch.Generator().manual_seed(number)).byte()
        Image.fromarray((pixels // (number + 1)).numpy()).save(folder / f"{number}.png")
    return root


def test_the_scores_of_an_image_are_its_energy_and_its_patch_entropy(generated):
    model = tiny_vit()
    found = score_images(model, generated, temperature=2.0, batch=4)
    assert len(found) == 6
    from timm.data import create_transform

    from maskaq.images.sets import read_image
    from maskaq.losses.attention import patch_entropy
    from maskaq.models import data_config
    from maskaq.models.taps import taps

    teacher = expose(model)
    transform = create_transform(**data_config(model), is_training=False)
    for score in found[:2]:
        with torch.no_grad(), taps(teacher, "heads") as seen:
            logits = teacher(transform(read_image(str(score.file), 3))[None])[0].tolist()
            heads = [layer.window_patches(x) for layer, x in zip(geometry(teacher).layers, seen["heads"], strict=True)]
            entropy = -sum(patch_entropy(x).item() for x in heads)
        energy = -2 * torch.tensor([x / 2 for x in logits]).exp().sum().log().item()
        assert score.energy == pytest.approx(energy, rel=1e-3) and score.entropy == pytest.approx(entropy, rel=1e-3)


def test_of_the_lowest_energies_the_highest_entropies_are_kept():
    scores = [Score(Path(str(n)), energy=n, entropy=n) for n in range(8)]
    assert [int(score.file.name) for score in chosen(scores, 0.5, 0.5)] == [2, 3]
    assert len(chosen(scores, 0.01, 0.01)) == 1 and len(chosen(scores, 1.0, 1.0)) == 8


def test_filter_copies_the_chosen_and_writes_all_scores(generated, tmp_path, capsys):
    out = tmp_path / "out"
    words = ["filter", str(generated), "--model", "cifar10_vit", "--out", str(out), "--energy", "0.5", "--entropy", "1"]
    assert cli.main(words) == 0
    kept = sorted(str(path.relative_to(out)) for path in out.rglob("*.png"))
    scores = json.loads((out / "scores.json").read_text())["files"]
    assert len(kept) == 3 and len(scores) == 6 and sorted(n for n in scores if scores[n]["kept"]) == kept
    assert "genq+images:" in capsys.readouterr().out
    assert cli.main(words) == 1 and "new or empty folder" in capsys.readouterr().err
