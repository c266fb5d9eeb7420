"""What a report promises: it is made from the run folder alone, says what is missing, needs no network, and works in a
real browser at both widths."""

import json
import os
import re
import shutil
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import safetensors.torch
import torch
from helpers import SWIN, SWIN_ARGS, VIT, VIT_ARGS, hook, rewrite_run_json, small_recipe, tiny_swin, tiny_vit
from PIL import Image

from maskaq import zoo
from maskaq.cli import main as cli
from maskaq.errors import DependencyError, RunFolderError
from maskaq.images.masks import kept_size, mask_size
from maskaq.images.sets import to_pixels
from maskaq.images.synthesis import Synthesizer
from maskaq.models import geometry
from maskaq.models.taps import taps
from maskaq.quant.quantizers import Static
from maskaq.quant.site import Site
from maskaq.quant.twin import quantizers
from maskaq.report import collect
from maskaq.report.record import Record, differences
from maskaq.runs import opened as results
from maskaq.runs import quantize as run
from maskaq.storage import files, runfolder
from maskaq.storage.runfolder import RunFolder
from maskaq.tasks import CALIBRATED, FULL_PRECISION, RTN
from maskaq.tasks.classification import EvalResult

quantize = partial(run.quantize, device="cpu")
FAMILIES = {"vit": (VIT, VIT_ARGS, tiny_vit), "swin": (SWIN, SWIN_ARGS, tiny_swin)}
SECTIONS = ["overview", "images", "attention", "curves", "layers", "information", "recipe"]
TABLE = {FULL_PRECISION: EvalResult(91.5, 99.1, 200), RTN: EvalResult(31.5, 70, 200)}
TABLE |= {CALIBRATED: EvalResult(79.5, 95, 200)}


def make(root: Path, family: str = "vit", *overrides: str, **args) -> Path:
    """A finished run of a model whose weights are in a file, evaluated."""
    name, defaults, build = FAMILIES[family]
    model, checkpoint = build(**args), root / f"{family}.safetensors"
    safetensors.torch.save_file(model.state_dict(), checkpoint)
    source = {"name": name, "args": {**defaults, **args}, "checkpoint": str(checkpoint), "command": "maskaq make it"}
    quantize(model, small_recipe(*overrides), root / "run", source=source)
    results.write_metrics(root / "run", TABLE, "some/data")
    return root / "run"


@pytest.fixture(scope="module", params=FAMILIES)
def finished(request, tmp_path_factory) -> Path:
    return make(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def vit(tmp_path_factory) -> Path:
    return make(tmp_path_factory.mktemp("vit"))


@pytest.fixture
def own(vit, tmp_path) -> Path:
    """A copy to damage, with its teacher's weights beside it."""
    shutil.copytree(vit.parent, tmp_path / "own")
    rewrite_run_json(tmp_path / "own" / "run", lambda text: text.replace(str(vit.parent), str(tmp_path / "own")))
    return tmp_path / "own" / "run"


def forget(folder: Path) -> None:
    """Takes away what was collected."""
    for name in (collect.FACTS_FILE, collect.TENSORS_FILE):
        (folder / name).unlink()


def facts(folder: Path) -> dict:
    return json.loads((folder / collect.FACTS_FILE).read_text())


# ---- what a run keeps


def test_a_run_keeps_what_its_report_needs(finished):
    kept = collect.read(RunFolder.read(finished))
    opened = results.open_run(finished)
    layers, student = geometry(opened.teacher()).layers, opened.student()
    assert [layer["name"] for layer in kept.facts["attention"]["layers"]] == [layer.attention for layer in layers]
    assert [site["site"] for site in kept.facts["sites"]] == [q.site.name for q in quantizers(student).values()]
    assert len(kept.facts["images"]["shown"]) == len(kept.tensors["images"]) == 8
    for i, layer in enumerate(layers):
        assert kept.tensors[f"attention_{i:02}"].shape == (3, 8, layer.grid[0] * layer.grid[1])
    assert {entry["round"] for entry in kept.facts["images"]["rounds"]} == {0, 1}
    assert all(0 <= row["agreement"] <= 1 and row["kl"] >= 0 for row in kept.facts["sensitivity"])


def test_what_is_collected_later_is_what_the_run_kept(own):
    before = collect.read(RunFolder.read(own))
    forget(own)
    results.write_report(own, device="cpu")
    after = collect.read(RunFolder.read(own))
    assert {**after.facts, "seconds": 0} == {**before.facts, "seconds": 0}
    assert all(torch.equal(after.tensors[name], value) for name, value in before.tensors.items())


def test_the_thinned_mask_lies_inside_the_informative_region_and_both_have_their_sizes(finished):
    kept, recipe = collect.read(RunFolder.read(finished)), small_recipe()
    mask = recipe.synthesis.mask
    for grid in {tuple(layer["grid"]) for layer in kept.facts["attention"]["layers"]}:
        kinds = ("region", "mask", "thinned")
        region, masked, thinned = (kept.tensors[f"{kind}_{grid[0]}x{grid[1]}"].long() for kind in kinds)
        k = mask_size(grid[0] * grid[1], 1.0, mask.start, mask.end)
        k_ir = mask_size(grid[0] * grid[1], 0.0, mask.region, mask.region)
        assert (masked.sum(dim=1) == k).all() and (region.sum(dim=1) == k_ir).all() and k < k_ir
        assert (thinned.sum(dim=1) == kept_size(k, mask.drop, mask.keep_at_least)).all()
        assert (thinned <= masked).all() and (masked <= region).all()


def test_the_mask_drawn_is_the_one_of_the_last_step(tmp_path, monkeypatch):
    seen, real = [], Synthesizer._masks
    monkeypatch.setattr(Synthesizer, "_masks", lambda *args: seen.append(real(*args)) or seen[-1])
    still = ("synthesis.lr=0", "synthesis.roll=0", "synthesis.noise=0", "synthesis.colour=0", "synthesis.mask.drop=0.5")
    quantize(tiny_vit(patch_size=4), small_recipe(*still, "synthesis.mask.end=0.5"), tmp_path / "run")
    (grid,) = seen[-1]
    # Each shard has two steps; the collection's region, m and m' come last.
    *_, first_shard, _, second_shard, _, _, collected = (found[grid] for found in seen)
    assert torch.equal(collected, torch.cat([first_shard, second_shard]))


def test_attention_distance_equals_the_loop_over_images_and_patches(finished):
    opened = results.open_run(finished)
    teacher, student, images = opened.teacher(), opened.calibrated(), opened.images()
    pixels = geometry(teacher).normalise(to_pixels(images.images))
    with torch.no_grad(), taps(teacher, "probs_received") as p, taps(student, "probs_received") as q:
        teacher(pixels), student(pixels)
        for i, layer in enumerate(geometry(teacher).layers):
            a, b = (layer.patch_attention(seen["probs_received"][i]) for seen in (p, q))
            each = [sum(abs(x - y) for x, y in zip(s, t, strict=True)) / sum(s) for s, t in zip(a, b, strict=True)]
            found = facts(finished)["attention"]["distance"]["student"]["relative"][i]
            assert found == pytest.approx(float(sum(each) / len(each)), rel=1e-4)


def test_a_site_says_how_far_it_rounds_how_much_it_cuts_off_and_what_it_leaves_unused():
    quantizer = Static(Site("here", "activation", bits=2, signed=False))
    quantizer.scale.fill_(1.0)  # levels 0, 1, 2, 3
    quantizer.ready = True
    row = collect._site(quantizer, torch.tensor([0.0, 1.2, 3.5, 5.0]))
    assert row["error"] == pytest.approx((0.2**2 + 0.5**2 + 2**2) / (1.2**2 + 3.5**2 + 5**2))
    assert (row["saturated"], row["unused"], row["levels"]) == (0.25, 1, 4)  # 3.5 is rounded, 5 is cut off
    assert (row["low"], row["high"], row["smallest"], row["largest"]) == (0, 3, 0, 5)


def test_collecting_leaves_the_models_as_they_were(vit):
    opened = results.open_run(vit)
    models = {"teacher": opened.teacher(), "searched": opened.ptq(), "student": opened.calibrated()}
    before = {name: {k: v.clone() for k, v in model.state_dict().items()} for name, model in models.items()}
    names = {name: [n for n, _ in model.named_modules()] for name, model in models.items()}
    collect.collect(opened.recipe, 0, collect.images_of_rounds(RunFolder.read(vit), opened.recipe), models)
    for name, model in models.items():
        assert [n for n, _ in model.named_modules()] == names[name]
        assert all(torch.equal(value, before[name][key]) for key, value in model.state_dict().items())


def test_a_run_is_finished_even_where_nothing_could_be_collected(tmp_path, monkeypatch):
    def fail():
        raise RuntimeError("no memory left")

    hook(monkeypatch.setattr, "maskaq.report.collect:collect", 1, fail)
    done = quantize(tiny_vit(), small_recipe(), tmp_path / "run")
    assert (done.folder / runfolder.QUANTIZED).exists() and not (done.folder / collect.FACTS_FILE).exists()
    quantize(tiny_vit(), small_recipe(), tmp_path / "run")
    assert not (done.folder / collect.FACTS_FILE).exists()  # a finished run changes nothing; `maskaq report` collects


# ---- the page


def read_page(*folders: Path, out: Path | None = None) -> tuple[str, str]:
    page = results.write_report(*folders, out=out, device="cpu")
    return page.read_text(), page.with_suffix(".md").read_text()


def test_a_report_has_every_section_and_the_figures(finished):
    html, markdown = read_page(finished)
    assert [name for name in SECTIONS if f'<section id="{name}">' not in html] == []
    for text in (html, markdown):
        assert "91.50" in text and "31.50" in text and "79.50" in text and "some/data" in text
        assert "maskaq make it" in text and "80 %" in text
    worst = max(facts(finished)["sites"], key=lambda site: site["error"])
    assert f"`{worst['site']}`" in markdown and f"<code>{worst['site']}</code>" in html


def test_a_report_needs_no_teacher_when_its_data_was_kept(own):
    (own.parent / "vit.safetensors").unlink()
    html, markdown = read_page(own)
    assert "could not be had" not in html and "left out" not in markdown
    assert html.count("<canvas") == 4


def test_without_data_and_teacher_the_parts_that_need_it_say_so(own):
    forget(own)
    (own.parent / "vit.safetensors").unlink()
    html, markdown = read_page(own)
    assert html.count("could not be had") == 6  # confidence, maps, distances, sizes, sensitivity, information
    assert "vit.safetensors" in html and "left out" in markdown
    assert "The ten worst sites" in html  # the student is in the folder
    assert "<canvas" not in html and not (own / collect.FACTS_FILE).exists()


def test_a_run_of_a_model_in_memory_has_a_report_too(tmp_path):
    quantize(tiny_vit(), small_recipe(), tmp_path / "run")
    html, _ = read_page(tmp_path / "run")
    assert "could not be had" not in html and "maskaq.quantize(model" in html
    forget(tmp_path / "run")
    html, _ = read_page(tmp_path / "run")
    assert "without a name" in html and 'alt="Image 0, made for' in html


def test_a_run_that_was_not_evaluated_says_how_to(own):
    (own / "metrics.json").unlink()
    html, markdown = read_page(own)
    assert "Not evaluated yet" in html and "Not evaluated yet" in markdown


def test_a_run_without_strip_or_events_says_so(own):
    for path in own.rglob("trajectory.safetensors"):
        path.unlink()
    (own / "events.jsonl").unlink()
    html, _ = read_page(own)
    assert 'id="strip-round"' not in html and html.count('<p class="missing">') >= 2


@pytest.mark.parametrize("name", [collect.FACTS_FILE, collect.TENSORS_FILE])
@pytest.mark.parametrize("damage", [lambda data: data[: len(data) // 2], lambda data: data.replace(b"1", b"2") + b" "])
def test_damaged_data_is_named(own, name, damage):
    (own / name).write_bytes(damage((own / name).read_bytes()))
    with pytest.raises(RunFolderError, match=re.escape(str(own / name))):
        results.write_report(own, device="cpu")


@pytest.mark.parametrize("out", ["page.pdf", "run.json/page.html"])
def test_a_page_that_cannot_be_written_is_told_before_anything_is_collected(own, out):
    forget(own)
    with pytest.raises(RunFolderError, match=re.escape(str(own / out))):
        results.write_report(own, out=own / out, device="cpu")
    assert not (own / collect.FACTS_FILE).exists()


@pytest.mark.parametrize(("mine", "other"), [("notes.md", "notes.html"), ("notes.html", "notes.md")])
def test_a_file_of_the_users_is_not_written_over(own, tmp_path, mine, other):
    (tmp_path / mine).write_text("<!DOCTYPE html><title>mine</title>")
    with pytest.raises(RunFolderError, match=f"{mine} is there"):
        results.write_report(own, out=tmp_path / "notes.html", device="cpu")
    assert "mine" in (tmp_path / mine).read_text() and not (tmp_path / other).exists()
    for _ in range(2):  # its own it writes anew
        assert results.write_report(own, out=tmp_path / "page.html", device="cpu").exists()


@pytest.mark.parametrize(
    "text",
    [
        "Notes: this page was made by maskaq report, see below.\n",
        "\n<!-- made by maskaq report -->\n",
        "# Mine\n<!-- made by maskaq report -->\n",
        "<!DOCTYPE html>\n<html>\n<!-- made by maskaq report -->\n",
        "I compared it with <title>deit · maskaq</title>\n",
    ],
)
def test_a_file_that_only_speaks_of_a_report_is_the_users(text):
    from maskaq.report import page

    assert not page.is_ours(text.encode())


def test_a_page_of_several_runs_writes_over_no_file_either(own, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("compare.html").write_text("mine")
    with pytest.raises(RunFolderError, match=r"compare\.html is there"):
        results.write_report(own, own, device="cpu")
    assert Path("compare.html").read_text() == "mine"


def test_a_page_of_maskaq_0_1_0_is_written_anew(own, tmp_path):
    page = results.write_report(own, out=tmp_path / "page.html", device="cpu")
    page.write_text(page.read_text().replace("<!-- made by maskaq report -->\n", "", 1))
    results.write_report(own, out=page, device="cpu")
    assert "made by maskaq report" in page.read_text()[:100]


WRONG = {
    "images": {"images": []},
    "shown": {"images": {"shown": {}, "round": 0, "rounds": [], "names": {}}},
    "a label": {"images": {"shown": [{"number": 0, "label": "1"}], "round": 0, "rounds": [], "names": {}}},
    "model": {"model": [1]},
    "attention": {"attention": [1]},
    "sites": {"sites": {"a": 1}},
    "a site": {"sites": [3]},
    "an error": {"sites": [{"site": "x", "role": "weight", "bits": 4, "error": "0.5", "saturated": 0, "levels": 4}]},
    "sizes": {"sizes": [{"name": "x", "float_bytes": "4", "quantized_bytes": 1}]},
    "sensitivity": {"sensitivity": "none"},
    "information": {"information": [1, 2]},
    "a meaning": {"information": {"x": {"value": 1, "meaning": 3}}},
}


@pytest.mark.parametrize("edit", WRONG.values(), ids=WRONG.keys())
def test_collected_facts_of_a_wrong_kind_are_named_with_their_file_and_key(own, edit):
    (own / collect.FACTS_FILE).write_text(json.dumps(facts(own) | edit))
    (key,) = edit
    with pytest.raises(RunFolderError, match=re.escape(str(own / collect.FACTS_FILE)) + rf".*\b{key}\b.*delete"):
        results.write_report(own, device="cpu")


def test_collected_facts_of_images_that_are_not_there_are_told(own):
    edited = facts(own)
    edited["images"]["rounds"][0]["round"] = 77
    (own / collect.FACTS_FILE).write_text(json.dumps(edited))
    with pytest.raises(RunFolderError, match=f"{collect.FACTS_FILE}.*{re.escape(str(own))}"):
        results.write_report(own, device="cpu")


@pytest.mark.parametrize("accuracy", [[], "none", {CALIBRATED: {"top1": "3", "top5": 4, "standard_error": 1, "n": 2}}])
def test_accuracies_of_a_wrong_kind_are_left_out(own, accuracy):
    (own / "metrics.json").write_text(json.dumps({"data": ["x"], "accuracy": accuracy}))
    assert "Not evaluated yet" in read_page(own)[1]


def test_a_folder_whose_name_is_no_text_has_a_report_too(own):
    odd = own.rename(own.parent / os.fsdecode(b"run\xff"))
    assert results.write_report(odd, device="cpu").exists()


@pytest.mark.slow
def test_several_runs_stand_in_one_table_with_their_differences(own, finished, tmp_path):
    other = make(tmp_path, "vit", "calibration.lr=0.5", "synthesis.mask.end=0.2", "synthesis.terms.patch_entropy=0.1")
    html, markdown = read_page(own, other, finished, out=tmp_path / "deep" / "all.html")
    records = [Record(RunFolder.read(own), collect.read(RunFolder.read(own))) for own in (own, other)]
    expected = {"calibration.lr": [1e-3, 0.5], "synthesis.mask.end": [0.1, 0.2]}
    assert differences(records) == {**expected, "synthesis.terms.patch_entropy": [None, 0.1]}
    assert html.count("synthesis.terms.patch_entropy") == 2  # among the differences, and among all settings
    for text in (html, markdown):
        assert "calibration.lr" in text and "run (1)" in text and "run (3)" in text
    assert 'class="differs">0.5<' in html and "calibration.batch" not in markdown


@pytest.mark.slow
def test_a_page_of_64_large_images_stays_below_10_mb(tmp_path):
    recipe = small_recipe(*("synthesis.images=64", "synthesis.batch=64", "synthesis.steps=1", "calibration.epochs=0"))
    model = tiny_vit(img_size=224, patch_size=32, depth=1)  # after one step images are noise: the hardest to compress
    quantize(model, recipe, tmp_path / "run")

    def eight_rounds(text: str) -> str:
        found = json.loads(text)
        found["identity"]["recipe"]["calibration"]["epochs"] = 8
        found["identity"]["recipe"]["refresh"]["every"] = 1
        return json.dumps(found)

    rewrite_run_json(tmp_path / "run", eight_rounds)
    folder = RunFolder.read(tmp_path / "run")
    for round in range(8):
        path = folder.path(runfolder.TRAJECTORY_FILE.format(round=round))
        words = {"number": "0", "steps": " ".join(map(str, range(20)))}
        files.write_tensors(path, {"images": torch.randint(0, 256, (20, 3, 224, 224), dtype=torch.uint8)}, words)
    kept = collect.read(folder)
    kept.facts["images"]["rounds"] = [{"round": round, "places": list(range(8))} for round in range(8)]
    kept.tensors.update({f"round_{round:02}": kept.tensors["round_00"] for round in range(8)})
    collect.write(folder.root, kept)
    html, _ = read_page(tmp_path / "run")
    assert len(html.encode()) < 10e6
    assert html.count('alt="Image') == 64 + 64 and html.count('alt="round ') == 80  # rounds; four trajectories


def test_a_page_asks_the_network_for_nothing(vit):
    html, _ = read_page(vit)
    assert "default-src 'none'" in html  # the browser itself refuses what is not in the page
    ours = re.sub(r"<script>.*?</script>", "", html, flags=re.S)
    targets = re.findall(r'\b(?:src|href|action)="([^"]{0,30})', ours)
    assert len(targets) > 20 and not [target for target in targets if not target.startswith(("data:", "#"))]
    assert "@import" not in ours and "url(" not in ours


def test_names_are_text_never_markup(own):
    odd = own.with_name("<b>&amp; run")
    own.rename(odd)
    rewrite_run_json(odd, lambda text: text.replace("maskaq make it", "</script><script>alert(1)</script>"))
    html, _ = read_page(odd)
    assert "<b>&amp; run" not in html and "<script>alert" not in html
    assert "&lt;b&gt;&amp;amp; run" in html


HOSTILE = "</code></pre></details><script>alert(1)</script><img src=x onerror=alert(2)>`|![x](http://x/)\n\n```\n# top"


def test_nothing_that_a_run_folder_says_is_markup_in_the_markdown(own, vit):
    run_json = json.loads((own / "run.json").read_text())
    recipe = run_json["identity"]["recipe"]
    recipe["synthesis"]["folder"] = HOSTILE
    recipe["synthesis"] |= {"steps": 0, "start": "noise"}
    recipe["refresh"]["every"] = 0
    recipe["synthesis"]["terms"][HOSTILE] = recipe["calibration"]["terms"][HOSTILE] = 1.0
    run_json["facts"]["device"] = HOSTILE
    for facts_of in (run_json["facts"], *run_json.get("resumed", [])):
        facts_of["source"] |= {"name": HOSTILE, "command": HOSTILE, "checkpoint": HOSTILE}
    rewrite_run_json(own, lambda _: json.dumps(run_json))
    row = {"top1": 1, "top5": 2, "standard_error": 3, "n": 4}
    (own / "metrics.json").write_text(json.dumps({"data": HOSTILE, "accuracy": {HOSTILE: row, CALIBRATED: row}}))
    kept = collect.read(RunFolder.read(own))
    kept.facts["images"]["names"] = dict.fromkeys(map(str, range(4)), HOSTILE)
    kept.facts["sites"][0]["site"] = kept.facts["sensitivity"][1]["layer"] = HOSTILE
    kept.facts["sites"][0]["error"] = kept.facts["sensitivity"][1]["kl"] = 1e9
    kept.facts["information"] = {HOSTILE: {"value": 1, "meaning": HOSTILE}, "summary": {"value": 1, "meaning": HOSTILE}}
    collect.write(own, kept)
    (own / "events.jsonl").unlink()  # they tell of rounds that this recipe does not have
    odd = own.rename(own.with_name(HOSTILE.replace("/", "")))
    for runs, least in (((odd,), 8), ((odd, vit), 6)):
        html, markdown = read_page(*runs, out=odd.parent / "out.html")
        assert "<script>alert" not in html and "<img src=x" not in html
        assert markdown.count("alert(1)") >= least  # it is there, as text
        assert not re.search(r"<(script|img|/pre>.*alert|/details>.*alert)|\]\(", markdown)
        assert not [line for line in markdown.splitlines() if line.startswith(("# top", "```"))]
        assert "`" not in re.sub(r"`[\w.]+`", "", markdown)  # names of settings and layers
        tables = re.findall(r"(?:^\|.*\n)+", markdown, flags=re.M)
        assert all(len({len(re.findall(r"(?<!\\)\|", row)) for row in table.splitlines()}) == 1 for table in tables)


@pytest.mark.parametrize("end", ["\r", "\n", "\r\n", "\v", "\f", "\x1c", "\x85", "\u2028", "\u2029"])
def test_no_end_of_a_line_leaves_code_in_markdown(end):
    from maskaq.report import page

    for text in (f"a{end}# top", f"a{end}"):
        for written in (page.code(text), page.block(text)):
            assert len(written.splitlines()) == 1 and "`" not in written
    assert page.code("a b") == "`a b`" and page.block("a b") == "```\na b\n```"


def test_no_name_is_markup_in_a_chart(own, vit):
    from maskaq.report import charts

    name = "<a href='x'>a</a><br>&"
    odd = own.rename(own.with_name(name.replace("/", "")))
    records = [Record(RunFolder.read(folder), collect.read(RunFolder.read(folder))) for folder in (odd, vit)]
    facts = records[0].facts
    facts["sites"][0]["site"] = facts["sizes"][0]["name"] = facts["sensitivity"][1]["layer"] = name
    facts["attention"]["layers"][0]["name"] = name
    stages = charts.curves(records)
    drawn = [
        *stages["synthesis"],
        *stages["calibration"],
        *charts.distances(records),
        *charts.layers(records[0]).values(),
    ]
    shown = [
        text
        for chart in drawn
        for trace in chart.figure["data"]
        for text in (trace.get("name"), *trace.get("text", ()), *trace.get("x", ()))
        if isinstance(text, str)
    ]
    assert not [text for text in shown if "<" in text]
    assert sum("&lt;br&gt;&amp;" in text for text in shown) >= len(stages["synthesis"]) + 4


def test_the_markdown_says_what_its_time_and_its_tables_are_of(vit):
    _, markdown = read_page(vit)
    assert "sites and the most sensitive layers<" in markdown
    assert re.search(r"^\| time of synthesis and calibration \| .* on cpu", markdown, flags=re.M)


@pytest.mark.slow
@pytest.mark.parametrize(("every", "words"), [(0, "3 steps<"), (2, "refreshed once"), (1, "refreshed 3 times")])
def test_a_page_tells_how_often_the_images_were_refreshed(tmp_path, every, words):
    html, _ = read_page(make(tmp_path, "vit", f"refresh.every={every}"))
    assert words in html
    assert ("The same images over the rounds" in html) == bool(every)


def test_an_epoch_or_a_shard_done_again_counts_once(own):
    before = Record(RunFolder.read(own), collect.read(RunFolder.read(own)))
    lines = (own / "events.jsonl").read_text().splitlines(keepends=True)
    (own / "events.jsonl").write_text("".join([*lines[:1], *lines]) + lines[-1])
    after = Record(RunFolder.read(own), collect.read(RunFolder.read(own)))
    assert after.seconds == before.seconds
    assert after.synthesis == before.synthesis and after.calibration == before.calibration


def test_a_loss_that_is_not_a_number_is_a_gap_in_its_curve(own):
    lines = (own / "events.jsonl").read_text().splitlines(keepends=True)
    last = next(line for line in reversed(lines) if '"loss"' in line)
    (own / "events.jsonl").write_text("".join(lines) + re.sub(r'"loss": [^,]+', '"loss": NaN', last))
    html, _ = read_page(own)
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', html, flags=re.S)
    figure = json.loads(data, parse_constant=pytest.fail)["figures"]["calibration-loss"]  # a browser reads no NaN
    assert figure["data"][0]["y"][-1] is None


def test_curves_run_over_all_rounds_with_a_mark_at_each_refresh(vit):
    record = Record(RunFolder.read(vit), collect.read(RunFolder.read(vit)))
    assert record.synthesis["class_prior"].x == [0, 1, 2, 3, 4]  # 3 steps, then 2
    assert record.synthesis["class_prior"].marks == [3.0]
    assert record.calibration["loss"].x == [0, 1, 2, 3]
    assert record.calibration["lr"].marks == [2.0]


def test_information_has_its_sentence_and_its_table(own):
    kept = collect.read(RunFolder.read(own))
    assert kept.facts["information"]["teacher information"]["value"] is not None
    kept.facts["information"] = {
        "summary": {"value": None, "meaning": "What it says and what it does not."},
        "I(z_p; y)": {"value": 1.25, "meaning": "nats that P's prediction says of the class | in bits: 1.8"},
    }
    collect.write(own, kept)
    html, markdown = read_page(own)
    assert "<p>What it says and what it does not.</p>" in html and "\nWhat it says and what it does not.\n" in markdown
    assert "| I(z_p; y) | 1.25 | nats that P's prediction says of the class \\| in bits: 1.8 |\n" in markdown


# ---- images that were not synthesised


@pytest.fixture(scope="module")
def pictures(tmp_path_factory) -> Path:
    """A folder of images without labels."""
    folder = tmp_path_factory.mktemp("pictures")
    for number in range(8):
        Image.fromarray(torch.randint(0, 256, (32, 32, 3), dtype=torch.uint8).numpy()).save(folder / f"{number}.png")
    return folder


@pytest.fixture(scope="module")
def unlabelled(pictures, tmp_path_factory) -> dict[str, Path]:
    """Runs on real images and on noise."""
    overrides = {"real": ("synthesis.steps=0", "refresh.every=0", f"synthesis.folder={pictures}")}
    overrides |= {"noise": ("synthesis.steps=0", "refresh.every=0")}
    return {kind: make(tmp_path_factory.mktemp(kind), "vit", *words) for kind, words in overrides.items()}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["real", "noise"])
def test_without_labels_confidence_is_of_what_the_teacher_says(unlabelled, kind):
    opened = results.open_run(unlabelled[kind])
    teacher, images = opened.teacher(), opened.images()
    with torch.no_grad():
        probs = teacher(geometry(teacher).normalise(to_pixels(images.images))).softmax(dim=1)
    shown = facts(unlabelled[kind])["images"]["shown"]
    assert [picture["label"] for picture in shown] == [-1] * 8
    assert [picture["teacher"] for picture in shown] == probs.argmax(dim=1).tolist()
    assert [picture["confidence"] for picture in shown] == pytest.approx(probs.amax(dim=1).tolist(), rel=1e-4)
    html, _ = read_page(unlabelled[kind])
    assert "how sure P is of what it says" in html and "made for class" not in html and "class -1" not in html


@pytest.mark.parametrize("kind", ["real", "noise"])
def test_without_labels_information_says_that_it_needs_them(unlabelled, kind):
    found = facts(unlabelled[kind])["information"]
    for name in ("teacher information", "student information", "theorem 1"):
        assert found[name]["value"] is None and "needs labels" in found[name]["meaning"]
    assert 0 < found["eps joint"]["value"] <= found["eps image"]["value"] <= 1


def test_a_page_says_where_its_images_come_from(unlabelled, vit, pictures, tmp_path):
    real, noise, synthetic = (read_page(folder) for folder in (unlabelled["real"], unlabelled["noise"], vit))
    for text in real:
        assert f"REAL images of {pictures}" in text and "NOT data-free" in text and "synthesised" not in text
    assert "data-free quantization" not in real[0]
    for text in noise:
        assert "Gaussian noise" in text and "synthesised" not in text and "NOT data-free" not in text
    for text in synthetic:
        assert "synthesised from the model itself" in text and "NOT data-free" not in text
    for text in read_page(vit, unlabelled["real"], unlabelled["noise"], out=tmp_path / "all.html"):
        assert "(2) is calibrated on 8 REAL images" in text and "(3) is made from 8 images of Gaussian noise" in text


def test_a_run_has_one_colour_in_all_charts(unlabelled, vit):
    from maskaq.report import charts  # its library is an extra

    folders = [RunFolder.read(folder) for folder in (unlabelled["noise"], vit)]
    found = charts.curves([Record(folder, collect.read(folder)) for folder in folders])
    assert [trace["meta"]["colour"] for trace in found["synthesis"][0].figure["data"]] == [1]  # noise has no such curve
    assert [trace["meta"]["colour"] for trace in found["calibration"][0].figure["data"]] == [0, 1]


@pytest.mark.parametrize("kind", ["real", "noise"])
def test_images_that_were_not_optimised_have_no_curves_and_no_strip(unlabelled, kind):
    html, _ = read_page(unlabelled[kind])
    assert "There was none: the images are" in html and "not optimised" in html
    assert 'id="strip-step"' not in html and 'id="synthesis-lr"' not in html and 'id="calibration-lr"' in html


# ---- runs that are not whole


@pytest.fixture(scope="module")
def half(tmp_path_factory) -> Path:
    """A run that was stopped when its second round of images was made."""
    root = tmp_path_factory.mktemp("half")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        hook(patch.setattr, "maskaq.calibrate.calibrator:Calibrator.epoch", 3, interrupt)
        make(root)
    return root / "run"


def interrupt() -> None:
    raise KeyboardInterrupt


@pytest.mark.slow
def test_a_run_that_is_not_finished_says_so_and_keeps_nothing_of_it(half, tmp_path):
    shutil.copytree(half.parent, tmp_path / "own")
    own = tmp_path / "own" / "run"
    for text in read_page(own):
        assert "not finished" in text and "after 2 of 4 epochs" in text and f"maskaq calibrate {own}" in text
    assert not (own / collect.FACTS_FILE).exists()  # or the finished run would be told by the student of now
    quantize(tiny_vit(), small_recipe(), own, source=json.loads((own / "run.json").read_text())["facts"]["source"])
    assert "not finished" not in read_page(own)[0]
    sites = {site["site"]: site["error"] for site in facts(own)["sites"]}
    forget(own)
    read_page(own)
    assert sites == {site["site"]: site["error"] for site in facts(own)["sites"]}


def test_a_run_of_images_alone_shows_them_and_says_what_is_missing(tmp_path):
    model, source = tiny_vit(), {"name": VIT, "args": VIT_ARGS, "checkpoint": str(tmp_path / "vit.safetensors")}
    safetensors.torch.save_file(model.state_dict(), tmp_path / "vit.safetensors")
    quantize(model, small_recipe(), tmp_path / "run", source=source, only_images=True)
    html, _ = read_page(tmp_path / "run")
    assert 'alt="Image 0, made for' in html and "after 0 of 4 epochs" in html and "no checkpoint" in html
    assert "smaller" in html  # sizes need the full-precision model alone
    assert "as round 1 of 2 left them" in html


def test_time_is_not_zero_where_it_was_not_recorded(own):
    (own / "events.jsonl").unlink()
    for text in read_page(own):
        assert "not recorded" in text and "0.0 s" not in text


def test_events_and_figures_that_are_not_whole_are_left_out(own):
    with (own / "events.jsonl").open("a") as file:
        file.write('{"stage": "calibrate"}\n3\n{"stage": "synthesize", "round": 0}\n')
    (own / "metrics.json").write_text(json.dumps({"accuracy": {CALIBRATED: {"top1": 3.0}, RTN: "gone"}}))
    html, markdown = read_page(own)
    assert "Not evaluated yet" in html and "Not evaluated yet" in markdown


# ---- the trajectory


def test_the_strip_is_of_the_first_image_from_its_start_to_its_end_and_says_so(finished):
    record = Record(RunFolder.read(finished), collect.read(RunFolder.read(finished)))
    first = [collect._first_of(record.run, round, 1) for round in range(2)]
    for round, steps in enumerate([[0, 1, 2, 3], [0, 1, 2]]):
        trajectory = record.trajectories[round]
        assert (trajectory.number, trajectory.steps) == (0, steps)
        assert torch.equal(trajectory.images[-1], first[round].images[0])
    assert torch.equal(record.trajectories[1].images[0], first[0].images[0])  # a warm refresh starts where it was
    html, _ = read_page(finished)
    assert html.count('data-whose="image #0 of the grid: class 0"') == 2


def test_the_strip_is_of_an_image_that_is_there(tmp_path, monkeypatch):
    real = Synthesizer._make_part

    def non_finite(self, indices, round, start, attempt):
        images = real(self, indices, round, start, attempt)
        images[(indices == 0) | ((indices == 4) & (attempt == 0))] = float("nan")
        return images

    monkeypatch.setattr(Synthesizer, "_make_part", non_finite)
    recipe = small_recipe("synthesis.max_lost=0.5", "refresh.every=0")
    quantize(tiny_vit(), recipe, tmp_path / "run")
    record = Record(RunFolder.read(tmp_path / "run"), collect.read(RunFolder.read(tmp_path / "run")))
    assert record.trajectories[0].number == 4  # 0 was lost twice; 4 was made again, and it is that way which is shown
    taken = collect._first_of(record.run, 0, 4).indices  # as a run takes them: from all images
    assert taken.tolist() == [1, 2, 3, 4]
    images = collect._first_of(record.run, 0, 8)
    assert torch.equal(record.trajectories[0].images[-1], images.images[images.indices == 4][0])


# ---- the command


def test_the_command_writes_the_page_and_says_where(own, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["report", str(own), "--device", "cpu"]) == 0
    assert (own / "report.html").exists() and (own / "report.md").exists()
    assert f"report: {own / 'report.html'}" in capsys.readouterr().out
    assert cli.main(["report", str(own), str(own)]) == 0
    assert (tmp_path / "compare.html").exists() and (tmp_path / "compare.md").exists()


@pytest.mark.slow
def test_evaluating_a_run_brings_its_page_up_to_date(tmp_path, monkeypatch, capsys):
    small = "synthesis.images=4 synthesis.batch=4 synthesis.steps=1 calibration.epochs=1 calibration.batch=4"
    out = tmp_path / "run"
    assert cli.main(["quantize", "cifar10_vit", "--out", str(out), "--device", "cpu", "--set", *small.split()]) == 0
    assert f"report: {out / 'report.html'}" in capsys.readouterr().out
    assert "Not evaluated yet" in (out / "report.html").read_text()
    images, labels = zoo.test_images()
    monkeypatch.setattr(zoo, "test_images", lambda: (images[::100], labels[::100]))
    assert cli.main(["evaluate", str(out), "--data", "cifar10-demo", "--device", "cpu"]) == 0
    assert "cifar10-demo" in (out / "report.html").read_text()


def test_mistakes_of_the_command_are_told(own, tmp_path, capsys):
    for words, message in (
        ([tmp_path], "is not a run folder"),
        ([own, "-o", tmp_path / "page.pdf"], "ends in .html"),
        ([own, own, "--checkpoint", "x"], "--checkpoint is for one run"),
    ):
        assert cli.main(["report", *map(str, words)]) == 1
        assert message in capsys.readouterr().err


def test_weights_that_moved_are_found_by_checkpoint(own):
    forget(own)
    (own.parent / "vit.safetensors").rename(own.parent / "moved.safetensors")
    assert cli.main(["report", str(own), "--checkpoint", str(own.parent / "moved.safetensors"), "--device", "cpu"]) == 0
    assert facts(own)["attention"]


@pytest.mark.slow
def test_without_the_extra_a_run_ends_well_and_says_how_to_get_the_report(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "plotly", None)
    for name in ("maskaq.report.page", "maskaq.report.charts"):
        monkeypatch.delitem(sys.modules, name, raising=False)
        monkeypatch.delattr(sys.modules["maskaq.report"], name.rpartition(".")[2], raising=False)
    small = "synthesis.images=4 synthesis.batch=4 synthesis.steps=1 calibration.epochs=1 calibration.batch=4"
    words = ["quantize", "cifar10_vit", "--out", str(tmp_path / "run"), "--device", "cpu", "--set", *small.split()]
    assert cli.main(words) == 0
    assert 'pip install "maskaq[report]"' in capsys.readouterr().out
    with pytest.raises(DependencyError, match="plotly"):
        results.write_report(tmp_path / "run")


# ---- in a browser

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DRIVER = shutil.which("chromedriver")
WIDTHS = {"phone": 390, "desktop": 1280}


@pytest.fixture(scope="module")
def browser():
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    if not BROWSER or not DRIVER:
        pytest.skip("no browser: chromium and chromedriver are not installed (Debian: chromium, chromium-driver)")
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for word in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(word)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


def show(browser, page: Path, width: int, theme: str = "light") -> None:
    """Opens a page and waits until it is drawn."""
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    wishes = {"prefers-color-scheme": theme, "prefers-reduced-motion": "reduce"}  # or a click waits for the scrolling
    media = [{"name": name, "value": value} for name, value in wishes.items()]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": media})
    for kind in ("browser", "performance"):
        browser.get_log(kind)  # forgets what was before
    browser.get(page.resolve().as_uri())
    until(browser, "document.documentElement.dataset.drawn")
    if ask(browser, "document.getElementById('maps')"):
        until(browser, "document.getElementById('maps').dataset.ready")


def ask(browser, expression: str):
    return browser.execute_script(f"return {expression}")


def until(browser, expression: str, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not ask(browser, expression):
        assert time.monotonic() < end, f"{expression} did not come true"
        time.sleep(0.05)


def complaints(browser) -> list[str]:
    return [entry["message"] for entry in browser.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]


@pytest.fixture(scope="module")
def page(vit) -> Path:
    return results.write_report(vit, device="cpu")


@pytest.mark.slow
@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS.values(), ids=WIDTHS)
def test_the_page_opens_without_complaint_and_shows_everything(browser, page, width, theme):
    show(browser, page, width, theme)
    assert complaints(browser) == []
    visible = "[...document.querySelectorAll('section')].filter((s) => s.offsetHeight > 100).map((s) => s.id)"
    assert [name for name in SECTIONS[:-1] if name not in ask(browser, visible)] == []
    assert ask(browser, "document.querySelectorAll('img').length") > 16
    assert ask(browser, "[...document.images].filter((i) => !i.naturalWidth || !i.alt).length") == 0
    plots = "[...document.querySelectorAll('.plot')]"
    assert ask(browser, f"{plots}.length") > 8
    assert ask(browser, f"{plots}.filter((p) => !p.querySelector('svg.main-svg') || p.offsetWidth < 200).length") == 0
    assert ask(browser, "document.documentElement.scrollWidth") <= width  # nothing sticks out
    dark = ask(browser, "getComputedStyle(document.body).backgroundColor") != "rgb(255, 255, 255)"
    assert dark == (theme == "dark")


@pytest.mark.slow
def test_the_page_sends_no_request(browser, page):
    show(browser, page, 1280)
    sent = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    urls = [m["params"]["request"]["url"] for m in sent if m["method"] == "Network.requestWillBeSent"]
    assert [url[:80] for url in urls if not url.startswith(("data:", "blob:", page.resolve().as_uri()))] == []


@pytest.mark.slow
@pytest.mark.parametrize("width", WIDTHS.values(), ids=WIDTHS)
def test_the_choice_of_a_layer_changes_the_maps_by_keyboard_too(browser, page, width):
    from selenium.webdriver.common.keys import Keys

    show(browser, page, width)
    maps = "[...document.querySelectorAll('.maps canvas')].map((c) => c.toDataURL())"
    before, label = ask(browser, maps), ask(browser, "document.getElementById('map-label').textContent")
    slider = browser.find_element("id", "map-layer")
    slider.send_keys(Keys.ARROW_LEFT)
    after = ask(browser, maps)
    assert label != ask(browser, "document.getElementById('map-label').textContent")
    assert before[1:] != after[1:] and before[0] == after[0]  # the maps, not the image beside them
    browser.find_element("id", "show-region").click()
    assert ask(browser, maps)[0] != after[0]
    browser.find_element("css selector", "#map-image option:last-child").click()
    assert ask(browser, maps)[0] != before[0]
    assert complaints(browser) == []


@pytest.mark.slow
def test_the_slider_shows_one_image_from_noise_to_final(browser, page):
    from selenium.webdriver.common.keys import Keys

    show(browser, page, 390)
    final = ask(browser, "document.getElementById('strip-image').src")
    browser.find_element("id", "strip-step").send_keys(Keys.HOME)
    assert ask(browser, "document.getElementById('strip-label').textContent") == "round 1, step 0"
    assert ask(browser, "document.getElementById('strip-whose').textContent") == "image #0 of the grid: class 0"
    assert ask(browser, "document.getElementById('strip-image').src") != final


@pytest.mark.slow
@pytest.mark.parametrize("width", WIDTHS.values(), ids=WIDTHS)
def test_a_chart_zooms_and_takes_the_charts_of_its_stage_along(browser, page, width):
    from selenium.webdriver import ActionChains

    show(browser, page, width)
    span = "document.getElementById('{}')._fullLayout.xaxis.range"
    first, second = "calibration-loss", "calibration-lr"
    before = ask(browser, span.format(first))
    plot = browser.find_element("css selector", f"#{first} .nsewdrag")
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", plot)
    wide = plot.size["width"]
    start = ActionChains(browser).move_to_element_with_offset(plot, -wide // 4, 0).click_and_hold()
    start.move_by_offset(wide // 4, 0).move_by_offset(wide // 8, 0).release().perform()
    until(browser, f"{span.format(first)}[0] > {before[0]}", seconds=10)
    after = ask(browser, span.format(first))
    assert after[1] < before[1]
    until(browser, f"Math.abs({span.format(second)}[0] - {after[0]}) < 1e-6", seconds=10)
    assert complaints(browser) == []


@pytest.mark.slow
def test_a_page_of_several_runs_and_one_of_a_run_without_teacher_open_without_complaint(browser, own, vit, tmp_path):
    show(browser, results.write_report(own, vit, out=tmp_path / "both.html"), 390)
    assert complaints(browser) == [] and ask(browser, "document.documentElement.scrollWidth") <= 390
    forget(own)
    (own.parent / "vit.safetensors").unlink()
    for text in read_page(own, vit, out=tmp_path / "both.html"):
        assert "Parts of run (1) could not be had" in text
    show(browser, results.write_report(own, device="cpu"), 1280)
    assert complaints(browser) == []
    assert "could not be had" in browser.find_element("id", "attention").text


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["real", "noise"])
def test_a_page_of_images_that_were_not_optimised_opens_without_complaint(browser, unlabelled, kind):
    show(browser, results.write_report(unlabelled[kind], device="cpu"), 390)
    assert complaints(browser) == [] and ask(browser, "document.documentElement.scrollWidth") <= 390
    assert "needs labels" in browser.find_element("id", "information").text


@pytest.mark.slow
def test_the_page_prints(browser, page):
    show(browser, page, 1280)
    printed = browser.execute_cdp_cmd("Page.printToPDF", {})
    assert printed["data"].startswith("JVBERi0")  # %PDF-
    assert complaints(browser) == []
    size = {"width": 700, "height": 1000, "deviceScaleFactor": 1, "mobile": False}  # of A4, without margins
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    try:
        browser.execute_script("dispatchEvent(new Event('beforeprint'))")
        assert browser.find_element("id", "map-whose").text.startswith("image 0: class 0, layer 2 of 2")
        assert all(film.is_displayed() for film in browser.find_elements("class name", "film"))
        cut = "[...document.querySelectorAll('table')].filter((t) => t.offsetWidth > 700).length"
        assert ask(browser, cut) == 0 and ask(browser, "document.querySelectorAll('details:not([open])').length") == 0
    finally:
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})
