"""What the command line promises: every command end to end, and for every mistake one clear message, no traceback and
nothing half done."""

import argparse
import dataclasses
import errno
import importlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import safetensors.torch
import torch
from helpers import (
    SMALL,
    VIT,
    VIT_ARGS,
    WEIGHTS,
    assert_same,
    assert_same_run,
    content,
    hook,
    left_half_written,
    mostly_slow,
    small_recipe,
    tensors,
    tiny_swin,
    tiny_vit,
)
from PIL import Image
from rich.console import Console

import maskaq
from maskaq import zoo
from maskaq.artifact.saved import saved_digest
from maskaq.cli import console as draw
from maskaq.cli import main as cli
from maskaq.cli.arguments import DEMO_DATA, typed
from maskaq.losses.terms import CALIBRATION_TERMS, SYNTHESIS_TERMS
from maskaq.models import data_config, expose, geometry
from maskaq.quant.quantizers import QUANTIZERS
from maskaq.recipe.schema import describe_keys, shipped_recipes
from maskaq.storage.runfolder import QUANTIZED
from maskaq.tasks.classification import EvalResult

CLASSES = ("apple", "bread", "cherry", "date")
MODEL_ARGS = ["--model-arg", *(f"{key}={value}" for key, value in VIT_ARGS.items())]
ROWS = ["full precision", "round to nearest", "searched ranges", "maskaq"]
TERMS = [f"synthesis.terms.{name}" for name in SYNTHESIS_TERMS]
TERMS += [f"calibration.terms.{name}" for name in CALIBRATION_TERMS]


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    """Weights, one folder of images per class, and a subset of the classes with its index."""
    root = tmp_path_factory.mktemp("files")
    safetensors.torch.save_file(tiny_vit().state_dict(), root / "vit.safetensors")
    safetensors.torch.save_file(tiny_swin().state_dict(), root / "swin.safetensors")
    generator = torch.Generator().manual_seed(0)
    for folder, names in (("data", CLASSES), ("subset", CLASSES[1:3])):
        for name in names:
            (root / folder / name).mkdir(parents=True)
            for i in range(3):
                pixels = torch.randint(0, 256, (40, 40, 3), generator=generator, dtype=torch.uint8)
                Image.fromarray(pixels.numpy()).save(root / folder / name / f"{i}.png")
    (root / "index.json").write_text(json.dumps({name: i for i, name in enumerate(CLASSES)}))
    return root


def model(files: Path) -> list[str]:
    return [VIT, *MODEL_ARGS, "--checkpoint", str(files / "vit.safetensors")]


def quantize(files: Path, out: Path, *more: str, command: str = "quantize") -> list[str]:
    settings = ["--recipe", "paper", "--set", *SMALL, "--device", "cpu"]
    return [command, *model(files), "--out", str(out), *settings, *more]


@pytest.fixture(scope="module")
def finished(files, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("finished") / "run"
    assert cli.main(quantize(files, out)) == 0
    return out


@pytest.fixture
def call(capfd):
    """Runs a command in this process: its exit code, what it printed, and what it complained of."""

    def call(*argv: object) -> tuple[int, str, str]:
        capfd.readouterr()
        try:
            code = cli.main([str(word) for word in argv])
        except SystemExit as exit:  # argparse
            code = int(exit.code or 0)
        return code, *capfd.readouterr()

    return call


def by_process(*argv: str, **kwargs) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, *argv], capture_output=True, text=True, **kwargs)


# ---- help and lists

OPTIONS = {
    "quantize": "--checkpoint --model-arg --img-size --mean --std --bits --recipe --set --out --seed --device --data "
    "--class-index --crop-pct",
    "synthesize": "--checkpoint --model-arg --img-size --mean --std --bits --recipe --set --out --seed --device",
    "calibrate": "RUN --device --data --class-index --interpolation --readers --workers",
    "evaluate": "RUN_OR_MODEL --checkpoint --model-arg --img-size --mean --std --json --device --data --class-index",
    "inspect": "MODEL --checkpoint --model-arg --img-size --mean --std --bits --recipe --set",
    "list": "models recipes terms quantizers keys",
    "demo": "--model --bits --out --seed --set --device",
}


@pytest.mark.parametrize("command", OPTIONS)
def test_every_command_explains_its_options(call, command):
    code, out, err = call(command, "--help")
    assert code == 0 and not err
    assert [option for option in OPTIONS[command].split() if option not in out] == []


def test_help_shows_every_command_and_an_example_of_each_of_the_main_ones(call):
    code, out, _ = call("--help")
    assert code == 0 and [name for name in OPTIONS if name not in out] == []
    assert all(f"maskaq {name}" in out for name in ("quantize", "evaluate", "inspect", "list", "demo"))


def test_maskaq_alone_prints_the_help(call):
    assert call() == (0, call("--help")[1], "")


def test_the_version_is_told_by_the_module_without_loading_torch():
    done = by_process("-X", "importtime", "-m", "maskaq", "--version")
    assert done.returncode == 0 and done.stdout == f"maskaq {maskaq.__version__}\n"
    imported = {line.split("|")[-1].strip() for line in done.stderr.splitlines()}
    assert "maskaq.cli.main" in imported and "torch" not in imported


def test_words_are_parsed_and_mistakes_told_without_loading_torch():
    code = """
import sys
from maskaq.cli import main as cli
for words in (["quantize", "--help"], ["export"], ["bench", "--steps", "0"]):
    try:
        cli.main(words)
    except SystemExit as exit:
        print(exit.code, "torch" in sys.modules, file=sys.stderr)
"""
    done = by_process("-c", code)
    ends = [line for line in done.stderr.splitlines() if line.endswith(("True", "False"))]
    assert done.returncode == 0 and ends == ["0 False", "2 False", "2 False"]


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_arguments_are_frozen_and_hold_every_option_of_their_command(name):
    command, parser = cli.COMMANDS[name], argparse.ArgumentParser()
    command.add_arguments(parser)
    options = {action.dest: action.default for action in parser._actions if action.dest != "help"}
    arguments = typed(command.Arguments, argparse.Namespace(**options))
    held = {}
    for field in dataclasses.fields(arguments):
        value = getattr(arguments, field.name)
        held |= vars(value) if dataclasses.is_dataclass(value) else {field.name: value}
    assert {key: held[key] for key in options} == {
        key: tuple(value) if isinstance(value, list) else value for key, value in options.items()
    }
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(arguments, dataclasses.fields(arguments)[0].name, None)


@pytest.mark.parametrize(
    ("what", "names"),
    [
        ("models", ["cifar10_vit (embedded)", "cifar10_swin (embedded)", VIT, "deit_tiny_patch16_224"]),
        ("recipes", list(shipped_recipes())),
        ("terms", TERMS),
        ("quantizers", list(QUANTIZERS)),
        ("keys", [key for key, _, _ in describe_keys()]),
    ],
)
def test_list_prints_every_name_at_the_start_of_a_line_and_what_it_means(call, what, names):
    code, out, err = call("list", what)
    lines = out.splitlines()
    assert code == 0 and not err
    assert [name for name in names if not any(line == name or line.startswith(f"{name} ") for line in lines)] == []
    if what != "models":
        assert all(len(line.split()) > 1 for line in lines)


def test_list_models_shows_the_tags_of_timms_weights_and_what_helps_where_they_do_not(call):
    lines = {line.split()[0]: line for line in call("list", "models")[1].splitlines()}
    assert {"flexivit_small", "eva_large_patch14_336", "beit3_base_patch16_224", "aimv2_large_patch14_224"} <= set(
        lines
    )
    assert "fb_in1k" in lines["deit_tiny_patch16_224"] and "--checkpoint" not in lines["deit_tiny_patch16_224"]
    classifiers, _, towers = lines["vit_base_patch16_clip_224"].partition("features: ")
    assert "openai_ft_in1k" in classifiers and "openai" in re.split(r"\W+", towers)
    assert lines["vit_small_patch14_dinov2"].endswith("features: lvd142m")
    assert "timm has no weights" in lines["vit_giant_patch14_224"]


def test_list_recipes_prints_whole_sentences_and_list_keys_whole_columns(call):
    recipes = call("list", "recipes")[1]
    assert all(len(line) <= 120 for line in recipes.splitlines())
    assert all(text.rstrip().endswith(".") for text in re.split(r"^\w+ +", recipes, flags=re.M)[1:])
    lines = call("list", "keys")[1].splitlines()
    columns = {line.index(f"  {doc}") for line, (_, _, doc) in zip(lines, describe_keys(), strict=True) if doc}
    assert len(columns) == 1


@pytest.mark.parametrize(
    ("what", "pattern", "there"),
    [
        ("models", "swin_t*", "swin_tiny_patch4_window7_224"),
        ("models", "cifar10_*", "cifar10_vit"),
        ("keys", "refresh.*", "refresh.every"),
        ("recipes", "q*", "quick"),
    ],
)
def test_a_pattern_lists_the_names_that_match_it(call, what, pattern, there):
    code, out, err = call("list", what, pattern)
    names = [line.split()[0] for line in out.splitlines() if not line.startswith(" ")]
    assert code == 0 and not err and there in names
    assert all(name.startswith(pattern.rstrip("*")) for name in names)


@pytest.mark.slow
def test_a_list_cut_short_by_its_reader_is_no_error():
    script = f"{sys.executable} -m maskaq list keys | head -n 1"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
    assert done.stdout.startswith("quantization.bits") and done.stderr == ""


def test_inspect_shows_layers_bits_and_how_small_it_gets(call, files):
    code, out, err = call("inspect", *model(files), "--bits", "w4a8", "--set", "quantization.first_last=8")
    assert code == 0 and not err
    (row,) = [line for line in out.splitlines() if "blocks.0.attn.qkv" in line]
    assert row.replace("│", " ").split()[:7] == ["blocks.0.attn.qkv", "linear", "48", "x", "16", "4", "8"]
    assert "x smaller" in out and "blocks.1.mlp.fc2" in out and "head" in out


def test_inspect_needs_no_weights(call, monkeypatch):
    monkeypatch.setattr("maskaq.models.load.pretrained_timm", lambda *_: pytest.fail("downloaded"))
    code, out, err = call("inspect", "deit_tiny_patch16_224")
    assert code == 0 and not err and "blocks.11.mlp.fc2" in out and "22.87 MB in float32" in out


# ---- end to end


def test_quantize_with_images_prints_plan_progress_and_table_in_plain_lines(call, files, tmp_path, finished):
    code, out, err = call(*quantize(files, tmp_path / "run", "--data", str(files / "data")))
    assert code == 0 and not err
    assert "\x1b" not in out and "\r" not in out  # not a terminal: plain lines
    for words in (
        "w4a4",
        "8 from noise, x 3 steps",
        "refresh",
        "estimate",
        "calibrate, round 2 of 2: 100 %",
        *ROWS,
        QUANTIZED,
    ):
        assert words in out, words
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert list(metrics["accuracy"]) == ROWS and all(row["n"] == 12 for row in metrics["accuracy"].values())
    assert metrics["data"] == str(files / "data")
    assert_same_run(tmp_path / "run", finished)  # evaluating changes nothing


def test_quantize_without_images_says_how_to_evaluate(call, files, finished):
    code, out, _ = call(*quantize(files, finished))
    assert code == 0 and f"evaluate it with: maskaq evaluate {finished} --data DIR" in out


def test_a_finished_run_says_that_it_is_and_is_still_evaluated(call, files, finished):
    code, out, _ = call(*quantize(files, finished, "--data", str(files / "data")))
    assert code == 0 and f"{finished} is finished" in out and "calibrate, round" not in out
    assert "estimate" not in out and all(row in out for row in ROWS)


def test_quantize_with_a_subset_of_the_classes_needs_their_index(call, files, tmp_path):
    subset = ("--data", str(files / "subset"))
    code, _, err = call(*quantize(files, tmp_path / "run", *subset))
    assert code == 1 and "2 class folders, the model 4 classes" in err and not (tmp_path / "run").exists()
    index = ("--class-index", str(files / "index.json"))
    code, out, err = call(*quantize(files, tmp_path / "run", *subset, *index, "--set", "calibration.epochs=0"))
    assert code == 0 and not err and "maskaq" in out
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert {row["n"] for row in metrics["accuracy"].values()} == {6}


def test_the_default_folder_is_named_after_model_and_bits(call, files, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    argv = quantize(files, tmp_path, "--bits", "W3A5", "--set", "calibration.epochs=0")
    del argv[argv.index("--out") : argv.index("--out") + 2]
    assert call(*argv)[0] == 0
    assert (tmp_path / "runs" / f"{VIT}-w3a5" / QUANTIZED).exists()


def test_synthesize_then_calibrate_is_the_same_as_quantize(call, files, tmp_path, finished):
    out = tmp_path / "run"
    code, text, _ = call(*quantize(files, out, command="synthesize"))
    assert code == 0 and f"go on with: maskaq calibrate {out}" in text and not (out / QUANTIZED).exists()
    code, text, err = call("calibrate", out, "--device", "cpu", "--data", files / "data")
    assert code == 0 and not err and "synthesize, round 1 of 2: 100 % from before" in text and ROWS[-1] in text
    assert_same_run(out, finished)
    before = content(out)
    assert call("calibrate", out, "--device", "cpu")[0] == 0
    assert content(out) == before


NORMALIZED = ("--mean", "0.1,0.2,0.3", "--std", "0.4")


@pytest.mark.slow
def test_image_size_mean_and_std_go_through_a_run_and_belong_to_it(call, files, tmp_path):
    out = tmp_path / "run"
    argv = quantize(files, out, *NORMALIZED, "--img-size", "32", "--set", "calibration.epochs=1")
    argv = [word for word in argv if not word.startswith("img_size=")]
    code, text, err = call(*argv)
    assert code == 0 and not err and "32 x 32 pixels, mean 0.1 0.2 0.3, std 0.4 0.4 0.4" in text
    told = json.loads((out / "run.json").read_text())
    expected = {"image_size": [32, 32], "mean": [0.1, 0.2, 0.3], "std": [0.4, 0.4, 0.4]}
    assert told["identity"]["preparation"] == expected
    opened = maskaq.open_run(out)
    assert geometry(opened.teacher()).mean == (0.1, 0.2, 0.3) == geometry(opened.calibrated()).mean
    assert geometry(opened.student()).std == (0.4, 0.4, 0.4)
    assert call("evaluate", out, "--data", files / "data", "--device", "cpu")[0] == 0
    code, text, err = call("calibrate", out, "--device", "cpu")
    assert code == 0 and not err and "mean 0.1 0.2 0.3" in text
    code, _, err = call(*[word for word in argv if word not in NORMALIZED[:2]])
    assert code == 1 and "preparation.mean" in err and "preparation.std" not in err


def test_evaluate_and_inspect_take_image_size_mean_and_std(call, files, monkeypatch):
    seen = []
    monkeypatch.setattr("maskaq.cli.evaluation.evaluate", lambda model, *_: seen.append(model) or EvalResult(0, 0, 1))
    assert call("evaluate", *model(files), "--data", files / "data", "--device", "cpu", *NORMALIZED)[0] == 0
    config = data_config(seen[0])
    assert (config["mean"], config["std"]) == ((0.1, 0.2, 0.3), (0.4, 0.4, 0.4))
    code, out, err = call("inspect", "deit_tiny_patch16_224", "--img-size", "64x96", *NORMALIZED)
    assert code == 0 and not err and "64 x 96 pixels, mean 0.1 0.2 0.3, std 0.4 0.4 0.4" in out


@pytest.mark.parametrize("option", [("--img-size", "48"), ("--mean", "0.5"), ("--std", "0.5")])
def test_runs_saved_and_embedded_models_have_their_image_size_mean_and_std(call, files, finished, option):
    data = ("--data", files / "data", "--device", "cpu")
    for argv in (
        ("evaluate", finished, *data),
        ("evaluate", finished / QUANTIZED, *data),
        ("inspect", finished / QUANTIZED),
        ("inspect", "cifar10_vit"),
        ("evaluate", "cifar10_vit", *data),
    ):
        code, _, err = call(*argv, *option)
        assert code == 1 and err.startswith("error: ") and ("embedded" in err or option[0] in err)


def test_evaluate_a_run_prints_the_table_and_writes_it_as_json(call, files, finished, tmp_path):
    argv = ("evaluate", finished, "--data", files / "data", "--device", "cpu", "--json", tmp_path / "table.json")
    code, out, err = call(*argv)
    assert code == 0 and not err and all(name in out for name in ROWS)
    table = json.loads((tmp_path / "table.json").read_text())["accuracy"]
    assert list(table) == ROWS and table["maskaq"]["n"] == 12
    assert set(table["maskaq"]) == {"top1", "top5", "n", "standard_error"}
    kept = json.loads((finished / "metrics.json").read_text())
    assert kept.pop("model") == saved_digest(finished / "quantized")  # whose figures these are
    assert json.loads((tmp_path / "table.json").read_text()) == kept


def test_evaluate_a_model_of_ones_own(call, files, tmp_path):
    options = ("--data", files / "data", "--device", "cpu", "--crop-pct", "1.0", "--interpolation", "nearest")
    code, out, err = call("evaluate", *model(files), *options, "--json", tmp_path / "table.json")
    assert code == 0 and not err and "full precision" in out and "round to nearest" not in out
    assert json.loads((tmp_path / "table.json").read_text())["accuracy"]["full precision"]["n"] == 12


def test_a_saved_model_is_evaluated_and_inspected_by_its_folder(call, files, finished, tmp_path):
    saved = finished / QUANTIZED
    argv = ("evaluate", f"{saved}/", "--data", files / "data", "--device", "cpu", "--json", tmp_path / "table.json")
    before = content(saved)
    code, out, err = call(*argv)
    assert code == 0 and not err and f"{saved} on " in out and ROWS[-1] in out and ROWS[0] not in out
    alone = json.loads((tmp_path / "table.json").read_text())["accuracy"]
    assert content(saved) == before
    assert call("evaluate", finished, *argv[2:])[0] == 0
    assert json.loads((tmp_path / "table.json").read_text())["accuracy"]["maskaq"] == alone["maskaq"]
    code, out, err = call("inspect", saved)
    assert code == 0 and not err and "blocks.1.mlp.fc2" in out and "x smaller" in out
    assert call("inspect", finished)[1].replace(str(finished), str(saved)) == out  # the model of a run


@pytest.mark.parametrize(
    "option", ["--bits=w3a3", "--recipe=nope", "--set=synthesis.steps=3", "--checkpoint=x.pth", "--model-arg=depth=3"]
)
def test_options_that_a_quantized_model_cannot_follow_are_refused(call, finished, option):
    for folder, words in ((finished / QUANTIZED, "is a saved model"), (finished, "is a run")):
        code, _, err = call("inspect", folder, option)
        assert code == 1 and words in err and option.split("=")[0] in err


def test_inspecting_a_run_that_is_not_finished_says_how_to_finish_it(call, files, tmp_path):
    assert call(*quantize(files, tmp_path / "run", command="synthesize"))[0] == 0
    code, _, err = call("inspect", tmp_path / "run")
    assert code == 1 and f"maskaq calibrate {tmp_path / 'run'}" in err and "unknown model" not in err


@pytest.mark.parametrize("inside", ["", QUANTIZED])
def test_what_is_quantized_already_is_not_quantized_again(call, finished, tmp_path, inside):
    before = content(finished)
    for command in ("quantize", "synthesize"):
        code, _, err = call(command, finished / inside, "--out", tmp_path / "new")
        assert code == 1 and "quantized already" in err and str(finished / inside) in err
    assert content(finished) == before and not (tmp_path / "new").exists()


def test_an_evaluated_run_has_its_accuracy_in_its_models_card(call, files, tmp_path):
    out = tmp_path / "run"
    assert call(*quantize(files, out, "--data", str(files / "data")))[0] == 0
    card = (out / QUANTIZED / "README.md").read_text()
    assert all(f"| {row} | " in card for row in ROWS) and " | 12 |" in card and "`data`" in card
    assert "maskaq quantize" in card and "seed: 0" in card and "saved with maskaq" in card
    config = json.loads((out / QUANTIZED / "config.json").read_text())
    assert config["made"]["metrics"]["accuracy"] == json.loads((out / "metrics.json").read_text())["accuracy"]
    assert config["timm"]["name"] == VIT and config["made"]["seed"] == 0
    before = content(out / QUANTIZED)
    assert call(*quantize(files, out))[0] == 0
    assert content(out / QUANTIZED) == before


@pytest.mark.slow
def test_a_run_that_is_evaluated_loads_its_model_and_lists_the_images_once(call, files, tmp_path, monkeypatch):
    loaded, listed = [], []

    def count(where: str, calls: list) -> None:
        module, name = where.rsplit(".", 1)
        original = getattr(importlib.import_module(module), name)
        monkeypatch.setattr(where, lambda *args, **kwargs: calls.append(where) or original(*args, **kwargs))

    count("maskaq.cli.resolve.load_model", loaded)
    count("maskaq.runs.opened.load_model", loaded)
    count("maskaq.images.sets.ImageFolder", listed)
    data = ("--data", str(files / "data"))
    assert call(*quantize(files, tmp_path / "run", *data))[0] == 0
    assert len(loaded) == 1 and len(listed) == 1
    moved = ("--checkpoint", files / "vit.safetensors")
    for argv in (("calibrate", tmp_path / "run", *moved), ("evaluate", tmp_path / "run", *moved)):
        loaded.clear(), listed.clear()
        assert call(*argv, *data, "--device", "cpu")[0] == 0
        assert len(loaded) == 1 and len(listed) == 1


def test_evaluate_an_embedded_model_on_the_packaged_images(call, monkeypatch):
    images, labels = zoo.test_images()
    monkeypatch.setattr(zoo, "test_images", lambda: (images[::20], labels[::20]))
    code, out, _ = call("evaluate", "cifar10_vit", "--data", DEMO_DATA, "--device", "cpu")
    (row,) = [line for line in out.splitlines() if "full precision" in line]
    assert code == 0 and float(row.split("│")[2]) > 60 and row.split("│")[5].split() == ["50"]


def test_a_folder_with_brackets_and_colons_in_its_name_is_printed_as_it_is(call, files, tmp_path):
    out = tmp_path / "[red]run[/] :star:"
    code, text, _ = call(*quantize(files, out, "--set", "calibration.epochs=0"))
    assert code == 0 and f"quantized model: {out}/{QUANTIZED}" in text
    assert f"maskaq evaluate {shlex.quote(str(out))} --data DIR" in text  # a command is printed as a shell takes it


def test_a_trailing_slash_is_dropped_from_what_is_printed(call, files, tmp_path):
    argv = quantize(files, tmp_path / "run", command="synthesize")
    argv[argv.index(str(tmp_path / "run"))] += "/"
    code, out, _ = call(*argv)
    assert code == 0 and f"go on with: maskaq calibrate {tmp_path / 'run'}\n" in out and "run/;" not in out


# ---- what is said of a plan and of its outcome


def plan(*overrides: str) -> str:
    console = Console(width=200, record=True, file=io.StringIO())
    exposed = expose(tiny_vit())
    console.print(draw.plan_table("mine", exposed, geometry(exposed), small_recipe(*overrides), "cpu", "runs/mine"))
    return re.sub(" +\n", "\n", console.export_text())


def test_the_plan_shows_image_size_classes_mean_and_std(call, files, tmp_path):
    facts = replace(geometry(expose(tiny_vit())), image_size=(32, 48), mean=(0.25,) * 3, std=(0.1, 0.2, 0.3))
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(draw.plan_table("mine", tiny_vit(), facts, small_recipe(), "cpu", "runs/mine"))
    text = console.export_text()
    assert "4 classes" in text and "32 x 48 pixels, mean 0.25 0.25 0.25, std 0.1 0.2 0.3" in text


def test_the_plan_names_sizes_that_are_not_zero_and_a_refresh_that_will_not_be():
    assert "refresh    once, continuing, 2 steps\n" in plan() and "images: about 49 kB" in plan()
    assert "images: about 49 MB" in plan("synthesis.images=8000")
    assert "no refresh: refresh.every 4 is not below calibration.epochs 4" in plan("refresh.every=4")
    assert "no refresh\n" in plan("refresh.every=0")


def test_the_plan_says_how_images_are_made():
    assert "from noise, x 4 steps" in plan("synthesis.steps=4")
    still = plan("synthesis.steps=0", "refresh.every=0")
    assert "not optimised" in still and "steps" not in still
    generated = plan("synthesis.steps=0", "refresh.every=0", "synthesis.generator.steps=70")
    assert "generator trained for 70 steps" in generated and "noise" not in generated


@pytest.mark.parametrize(
    ("top1", "words"),
    [
        ((90.0, 50.0, 80.0), "round to nearest loses 40.0 points of top-1; maskaq recovers 75 % of that"),
        ((90.0, 50.0, 40.0), "maskaq is worse still"),
        (
            (90.0, 89.5, 90.1),
            "costs nothing measurable on 1000 images: 0.5 points of top-1, with a standard error of 1.4",
        ),
        ((90.0, 90.2, 90.1), "costs nothing measurable on 1000 images: -0.2 points"),
        ((100.0, 100.0, 100.0), "costs nothing measurable"),
    ],
)
def test_a_share_is_only_told_of_a_loss_that_can_be_measured(top1, words):
    full, nearest, ours = (EvalResult(top1=value, top5=100.0, n=1000) for value in top1)
    sentence = draw.what_was_recovered({"full precision": full, "round to nearest": nearest, "maskaq": ours})
    assert words in sentence and ("%" in sentence) == ("recovers" in words)


# ---- mistakes


@pytest.fixture
def place(tmp_path) -> Path:
    """Where a mistaken command works: a file, a foreign folder, a folder that cannot be."""
    (tmp_path / "file").write_text("mine")
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "thesis.txt").write_text("mine")
    (tmp_path / "broken.safetensors").write_bytes(b"\0" * 100)
    (tmp_path / "bad.toml").write_text("[synthesis\n")
    untrained = tiny_vit().state_dict()
    safetensors.torch.save_file(untrained | {"head.weight": torch.zeros(4, 16)}, tmp_path / "untrained.safetensors")
    (tmp_path / "bad.json").write_text("{")
    return tmp_path


def change(files: Path, out: Path, old: str, *new: str) -> list[str]:
    """The sound command with one word replaced."""
    argv = quantize(files, out)
    i = argv.index(old)
    return [*argv[:i], *new, *argv[i + 1 :]]


def weights(files: Path) -> str:
    return str(files / "vit.safetensors")


MISTAKES = {
    "unknown model": (
        lambda f, p: change(f, p / "run", VIT, "vit_tiny_patch16_244"),
        ["unknown model 'vit_tiny_patch16_244'", "Did you mean 'vit_tiny_patch16_224'?", "maskaq list models"],
    ),
    "weights in place of a name": (
        lambda f, p: change(f, p / "run", VIT, weights(f)),
        ["vit.safetensors is a weights file", "--checkpoint"],
    ),
    "weights in place of a name to inspect": (
        lambda f, p: ["inspect", weights(f)],
        ["is a weights file", "--checkpoint"],
    ),
    "weights in place of a name to evaluate": (
        lambda f, p: ["evaluate", weights(f), "--data", str(f / "data")],
        ["is a weights file", "--checkpoint"],
    ),
    "mean of pixels to 255": (
        lambda f, p: [*quantize(f, p / "run"), "--mean", "127.5", "--std", "127.5"],
        ["mean: expected numbers from -1 to 2", "0.5"],
    ),
    "std of pixels to 255": (lambda f, p: ["inspect", VIT, "--std", "51"], ["std: expected numbers from", "0.2"]),
    "a list of nothing": (lambda f, p: ["list", "models", "swine*"], ["'swine*'"]),
    "unsupported model": (
        lambda f, p: ["quantize", "resnet18", "--out", str(p / "run")],
        ["ResNet has no attention layer"],
    ),
    "unsupported model to inspect": (lambda f, p: ["inspect", "resnet18"], ["ResNet has no attention layer"]),
    "bad model argument": (
        lambda f, p: [*quantize(f, p / "run"), "--model-arg", "depht=3"],
        ["timm cannot build", "depht"],
    ),
    "model argument without value": (
        lambda f, p: [*quantize(f, p / "run"), "--model-arg", "depth"],
        ["--model-arg 'depth': expected key=value"],
    ),
    "image size said twice": (
        lambda f, p: [*quantize(f, p / "run"), "--img-size", "32", "--model-arg", "img_size=32"],
        ["--img-size and --model-arg img_size"],
    ),
    "absurd image size": (
        lambda f, p: ["quantize", "deit_tiny_patch16_224", "--img-size", "100000", "--out", str(p / "run")],
        ["img_size 100000", "4096"],
    ),
    "mean for other channels": (
        lambda f, p: [*quantize(f, p / "run"), "--mean", "0.5,0.5"],
        ["mean: expected one number, or one for each of 3 channels, got 2"],
    ),
    "std of zero": (lambda f, p: [*quantize(f, p / "run"), "--std", "0"], ["std: expected finite numbers above 0"]),
    "missing checkpoint": (
        lambda f, p: change(f, p / "run", weights(f), str(p / "gone.safetensors")),
        ["gone.safetensors"],
    ),
    "damaged checkpoint": (
        lambda f, p: change(f, p / "run", weights(f), str(p / "broken.safetensors")),
        ["broken.safetensors"],
    ),
    "checkpoint of another architecture": (
        lambda f, p: change(f, p / "run", weights(f), str(f / "swin.safetensors")),
        ["do not fit", "missing in the file:", "cls_token", "unexpected", "layers.0.blocks.0.attn", "look like a Swin"],
    ),
    "checkpoint of an untrained classifier": (
        lambda f, p: change(f, p / "run", weights(f), str(p / "untrained.safetensors")),
        ["'head'"],
    ),
    "unknown recipe": (
        lambda f, p: change(f, p / "run", "paper", "qick"),
        ["unknown recipe 'qick'", "Did you mean 'quick'?", "ends in .toml"],
    ),
    "missing recipe file": (
        lambda f, p: change(f, p / "run", "paper", str(p / "gone.toml")),
        ["cannot read recipe file", "gone.toml"],
    ),
    "recipe that is not TOML": (
        lambda f, p: change(f, p / "run", "paper", str(p / "bad.toml")),
        ["bad.toml is not valid TOML"],
    ),
    "typo in a key": (
        lambda f, p: quantize(f, p / "run", "--set", "synthesis.stpes=3"),
        ["[synthesis]: unknown key 'stpes'", "Did you mean 'steps'?"],
    ),
    "override without value": (
        lambda f, p: quantize(f, p / "run", "--set", "synthesis.steps"),
        ["--set 'synthesis.steps': expected key=value"],
    ),
    "wrong type": (
        lambda f, p: quantize(f, p / "run", "--set", "synthesis.steps=many"),
        ["synthesis.steps: expected a whole number, got 'many'"],
    ),
    "value out of range": (
        lambda f, p: quantize(f, p / "run", "--set", "synthesis.images=0"),
        ["synthesis.images: expected a number from 1 to 10000000, got 0"],
    ),
    "unknown term": (
        lambda f, p: quantize(f, p / "run", "--set", "synthesis.terms.clas_prior=1"),
        ["[synthesis.terms] unknown term 'clas_prior'", "Did you mean 'class_prior'?"],
    ),
    "no term left": (
        lambda f, p: quantize(f, p / "run", "--set", *[f"calibration.terms.{t}=0" for t in CALIBRATION_TERMS]),
        ["[calibration.terms] no term is left"],
    ),
    "unknown quantizer": (
        lambda f, p: quantize(f, p / "run", "--set", "quantization.activation=lqs"),
        ["unknown quantizer 'lqs'", "Did you mean 'lsq'?"],
    ),
    "bad bits": (lambda f, p: quantize(f, p / "run", "--bits", "w1a4"), ["quantization.bits 'w1a4': expected wXaY"]),
    "bad bits of inspect": (lambda f, p: ["inspect", *model(f), "--bits", "4"], ["quantization.bits '4'"]),
    "no CUDA": (lambda f, p: quantize(f, p / "run", "--device", "cuda"), ["device 'cuda' cannot be used"]),
    "no such device": (lambda f, p: quantize(f, p / "run", "--device", "gpu"), ["device 'gpu' cannot be used"]),
    "not a real device": (lambda f, p: quantize(f, p / "run", "--device", "meta"), ["device 'meta' cannot be used"]),
    "data missing": (
        lambda f, p: quantize(f, p / "run", "--data", str(p / "gone")),
        ["image folder", "gone does not exist"],
    ),
    "data without images": (
        lambda f, p: quantize(f, p / "run", "--data", str(p / "foreign")),
        ["foreign is not an image folder"],
    ),
    "wrong number of classes": (
        lambda f, p: quantize(f, p / "run", "--data", str(f / "subset")),
        ["2 class folders, the model 4 classes", "--class-index"],
    ),
    "class index missing": (
        lambda f, p: quantize(f, p / "run", "--data", str(f / "subset"), "--class-index", str(p / "gone.json")),
        ["cannot read the class index", "gone.json"],
    ),
    "class index that is not JSON": (
        lambda f, p: quantize(f, p / "run", "--data", str(f / "subset"), "--class-index", str(p / "bad.json")),
        ["cannot read the class index", "bad.json"],
    ),
    "packaged images for another model": (
        lambda f, p: quantize(f, p / "run", "--data", DEMO_DATA),
        ["cifar10-demo is for the embedded CIFAR-10 models"],
    ),
    "out is a file": (lambda f, p: quantize(f, p / "file"), ["file exists and is not a run folder"]),
    "out is below a file": (
        lambda f, p: quantize(f, p / "file" / "run"),
        ["cannot be written", "is not a folder", "choose another --out"],
    ),
    "out is a foreign folder": (
        lambda f, p: quantize(f, p / "foreign"),
        ["foreign exists and is not a run folder: choose another --out"],
    ),
    "evaluate a foreign folder": (
        lambda f, p: ["evaluate", str(p / "foreign"), "--data", str(f / "data")],
        ["foreign is neither a run folder (it has no run.json) nor a saved model"],
    ),
    "evaluate nothing": (
        lambda f, p: ["evaluate", f"{p / 'gone'}/", "--data", str(f / "data")],
        ["there is no run folder", "gone: expected the --out of an earlier run"],
    ),
    "evaluate an unknown model": (
        lambda f, p: ["evaluate", "cifar10_vti", "--data", str(f / "data")],
        ["unknown model 'cifar10_vti'", "Did you mean 'cifar10_vit'?"],
    ),
    "calibrate a foreign folder": (lambda f, p: ["calibrate", str(p / "foreign")], ["foreign is not a run folder"]),
    "calibrate nothing": (lambda f, p: ["calibrate", str(p / "gone")], ["gone does not exist: expected the --out"]),
    "embedded model with arguments": (
        lambda f, p: ["inspect", "cifar10_vit", "--model-arg", "depth=3"],
        ["cifar10_vit is embedded with its weights"],
    ),
}


if torch.cuda.is_available():
    del MISTAKES["no CUDA"]


@pytest.mark.parametrize(("argv", "words"), MISTAKES.values(), ids=MISTAKES.keys())
def test_a_mistake_gets_one_clear_message_and_leaves_nothing_behind(call, files, place, argv, words):
    before = content(place)
    code, out, err = call(*argv(files, place))
    assert code == 1
    assert err.startswith("error: ") and err.count("error: ") == 1 and "Traceback" not in err + out
    assert [word for word in words if word not in err] == []
    assert "calibrate" not in out  # no plan for what is refused
    assert content(place) == before and left_half_written(place) == []
    assert not (place / "run").exists()


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["quantise", "x"], "quantise"),
        (["quantize"], "MODEL"),
        (["evaluate", "x"], "--data"),
        (["list", "colours"], "colours"),
        (["quantize", "x", "--seed", "many"], "--seed"),
        (["quantize", "x", "--colour", "red"], "--colour"),
        (["evaluate", "x", "--data", "y", "--interpolation", "cubic"], "--interpolation"),
        (["evaluate", "x", "--data", "y", "--workers", "-1"], "--workers"),
        (["evaluate", "x", "--data", "y", "--crop-pct", "0"], "--crop-pct: expected a number above 0 and at most 1"),
        (["evaluate", "x", "--data", "y", "--crop-pct", "nan"], "--crop-pct"),
        (["evaluate", "x", "--data", "y", "--crop-pct", "wide"], "--crop-pct"),
        (["bench", "--json", "."], "--json: . is a folder"),
        (["evaluate", "x", "--data", "y", "--json", "."], "--json: . is a folder"),
        (["bench", "--json", ""], "--json: expected the name of a file to write, got an empty one"),
        (["bench", "--json", "/dev/null"], "/dev/null is a device or a pipe"),
        (["evaluate", "x", "--data", "y", "--json", "n" * 250], "cannot be written: File name too long"),
        (["report", "RUN", "-o", "/dev/null/page.html"], "/dev/null is not a folder"),
        (["demo", "--model", "resnet"], "resnet"),
        (["quantize", "x", "--out", ""], "--out: expected a path, got an empty"),
        (["synthesize", "x", "--out", ""], "--out: expected a path, got an empty"),
        (["demo", "--out", ""], "--out: expected a path, got an empty"),
        (["report", "RUN", "--out", ""], "--out: expected the name of a file to write, got an empty one"),
        (["export", "RUN", "--output", ""], "--output: expected a path, got an empty"),
        (["quantize", "x", "--data", ""], "--data: expected a path, got an empty"),
        (["quantize", "x", "--img-size", "large"], "--img-size: expected N or HxW"),
        (["quantize", "x", "--img-size", "1x2x3"], "--img-size"),
        (["inspect", "x", "--mean", "0.5;0.5"], "--mean: expected one number or one per channel"),
    ],
)
def test_a_command_that_cannot_be_parsed_exits_with_2_and_shows_the_usage(call, argv, words):
    code, out, err = call(*argv)
    assert code == 2 and not out and err.startswith("usage: maskaq") and words in err and "Traceback" not in err


def test_an_option_that_a_command_does_not_have_is_answered_with_those_it_has(call):
    code, _, err = call("demo", "--data", "scenes:20")
    assert code == 2 and err.startswith("usage: maskaq demo") and "--bits" in err and "--data scenes:20" in err


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES])
def test_a_folder_that_cannot_be_written_is_named(call, files, tmp_path, monkeypatch, number):
    def refuse(*_, **__):  # for root nothing is read-only, so it is played
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "mkdir", refuse)
    code, _, err = call(*quantize(files, tmp_path / "run"))
    assert code == 1 and f"error: cannot write to {tmp_path / 'run'}" in err and "choose another --out" in err
    assert os.listdir(tmp_path) == []


def test_the_folder_of_another_run_is_refused_with_the_setting_that_differs(call, files, finished):
    before = content(finished)
    code, out, err = call(*quantize(files, finished, "--seed", "3", "--set", "synthesis.lr=0.5"))
    assert code == 1 and not out and "holds another run" in err and "Traceback" not in err
    assert "seed: 0 in the folder, 3 asked" in err and "recipe.synthesis.lr: 0.1 in the folder, 0.5 asked" in err
    assert content(finished) == before


def test_a_run_that_is_not_finished_cannot_be_evaluated_and_says_how_to_finish_it(call, files, tmp_path):
    assert call(*quantize(files, tmp_path / "run", command="synthesize"))[0] == 0
    code, _, err = call("evaluate", tmp_path / "run", "--data", files / "data", "--device", "cpu")
    assert code == 1 and "is not finished" in err and "maskaq calibrate" in err


def test_calibrating_without_the_teachers_file_names_it(call, files, tmp_path):
    mine = tmp_path / "mine.safetensors"
    mine.write_bytes((files / "vit.safetensors").read_bytes())
    argv = quantize(files, tmp_path / "run", command="synthesize")
    argv[argv.index(weights(files))] = str(mine)
    assert call(*argv)[0] == 0
    mine.unlink()
    code, _, err = call("calibrate", tmp_path / "run", "--device", "cpu")
    assert code == 1 and str(mine) in err and "Traceback" not in err


def test_a_full_disk_is_told_with_how_to_go_on_and_that_is_true(call, files, tmp_path, finished):
    def disk_full():
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    out = tmp_path / "run"
    with pytest.MonkeyPatch.context() as patch:
        hook(patch.setattr, "os:replace", 5, disk_full)
        code, _, err = call(*quantize(files, out))
    assert code == 1 and "error: disk full" in err and "run the same command again" in err
    assert left_half_written(out) == []
    assert call(*quantize(files, out))[0] == 0
    assert_same_run(out, finished)


def test_memory_too_small_for_one_image_is_told_without_a_traceback(call, files, tmp_path, monkeypatch):
    def full():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    hook(monkeypatch.setattr, "maskaq.images.synthesis:Synthesizer._make", 1, full)
    code, _, err = call(*quantize(files, tmp_path / "run"))
    assert code == 1 and err.startswith("error: out of GPU memory even with one image at a time")


INTERRUPTS = {
    "in synthesis": ("maskaq.images.synthesis:Synthesizer._view", 10),  # six are the forecast's
    "in calibration": ("maskaq.calibrate.calibrator:Calibrator._step", 3),
    "before a checkpoint": ("maskaq.storage.runfolder:RunFolder.save_checkpoint", 1),
    "before the model is saved": ("maskaq.runs.finish:save_model", 1),
}


@pytest.mark.parametrize(("where", "n"), mostly_slow(INTERRUPTS, "in synthesis", "before the model is saved"))
def test_an_interrupt_says_how_to_go_on_and_the_run_ends_as_if_there_had_been_none(
    call, files, tmp_path, finished, where, n
):
    def interrupt():
        raise KeyboardInterrupt

    out = tmp_path / "run"
    with pytest.MonkeyPatch.context() as patch:
        hook(patch.setattr, where, n, interrupt)
        code, _, err = call(*quantize(files, out))
    assert code == 130 and "latest checkpoint are kept, work since then is done again" in err and "Traceback" not in err
    assert "give the same command again to go on" in err
    assert left_half_written(out) == [] and not (out / QUANTIZED).exists()
    assert call(*quantize(files, out))[0] == 0
    assert_same_run(out, finished)


@pytest.mark.slow
def test_sigterm_is_told_in_one_line_with_143_and_the_folder_is_free_again(files, tmp_path, finished):
    out = tmp_path / "run"
    slow = "import time; from helpers import hook; from maskaq.cli import main as cli; "
    slow += "hook(setattr, 'maskaq.calibrate.calibrator:Calibrator._step', 3, "
    slow += "lambda: (print('now', flush=True), time.sleep(60)))"
    code = f"import sys; {slow}; sys.exit(cli.main(sys.argv[1:]))"
    path = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
    argv = [sys.executable, "-c", code, *quantize(files, out)]
    pipe = subprocess.PIPE
    with subprocess.Popen(argv, stdout=pipe, stderr=pipe, text=True, env=os.environ | {"PYTHONPATH": path}) as process:
        assert "now\n" in iter(process.stdout.readline, "")
        process.terminate()
        err = process.communicate()[1]
    assert process.returncode == 143
    assert err.strip().startswith("terminated. Finished shards") and len(err.strip().splitlines()) == 1
    assert cli.main(quantize(files, out)) == 0
    assert_same_run(out, finished)


def test_an_interrupted_look_promises_nothing(call, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("maskaq.cli.inspect.run", interrupt)
    assert call("inspect", "cifar10_vit") == (130, "", "\ninterrupted\n")


@pytest.mark.slow
def test_a_terminal_gets_bars_and_the_same_model(files, tmp_path, finished):
    """Through a pseudo terminal, whose output has what a file's must not have: escape codes."""
    pty = pytest.importorskip("pty")
    ours, theirs = pty.openpty()
    argv = [sys.executable, "-m", "maskaq", *quantize(files, tmp_path / "run")]
    environment = {**os.environ, "TERM": "xterm", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(argv, stdout=theirs, stderr=subprocess.PIPE, env=environment)
    os.close(theirs)
    shown = b""
    while True:
        try:
            part = os.read(ours, 1 << 16)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        shown += part
    os.close(ours)
    assert process.wait() == 0 and process.stderr.read() == b""
    assert b"\x1b[" in shown and b"calibrate, round 2 of 2" in shown
    assert_same(tensors(tmp_path / "run" / WEIGHTS), tensors(finished / WEIGHTS))


@pytest.mark.slow
def test_a_terminal_that_lacks_letters_still_gets_the_table(files, finished):
    ascii_only = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = by_process("-m", "maskaq", "evaluate", str(finished), "--data", str(files / "data"), env=ascii_only)
    assert done.returncode == 0 and all(row in done.stdout for row in ROWS) and "Traceback" not in done.stderr


def test_a_table_is_shown_and_its_json_written_before_a_folder_that_cannot_be_is_named(
    call, files, finished, tmp_path, monkeypatch
):
    rename = os.replace

    def refuse_in_run(source: Path, target: Path) -> None:
        if finished in Path(target).parents:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        rename(source, target)

    monkeypatch.setattr(os, "replace", refuse_in_run)
    table = tmp_path / "table.json"
    code, out, err = call("evaluate", finished, "--data", files / "data", "--device", "cpu", "--json", table)
    assert code == 1 and all(row in out for row in ROWS) and "metrics.json: Read-only file system" in err
    assert set(json.loads(table.read_text())["accuracy"]) == set(ROWS)


@pytest.mark.slow
def test_a_runs_weights_that_moved_are_given_and_others_are_told(call, files, tmp_path):
    moved = tmp_path / "moved.safetensors"
    moved.write_bytes((files / "vit.safetensors").read_bytes())
    argv = quantize(files, tmp_path / "run")
    argv[argv.index(str(files / "vit.safetensors"))] = str(moved)
    assert call(*argv)[0] == 0
    moved.unlink()
    evaluate = ("evaluate", tmp_path / "run", "--data", files / "data", "--device", "cpu")
    assert "no such file" in call(*evaluate)[1]
    code, out, _ = call(*evaluate, "--checkpoint", files / "vit.safetensors")
    assert code == 0 and "no such file" not in out
    code, _, err = call(*evaluate, "--model-arg", "depth=3")
    assert code == 1 and "knows its model" in err


@pytest.fixture(scope="module")
def embedded(tmp_path_factory) -> Path:
    """A finished run of an embedded model."""
    out = tmp_path_factory.mktemp("embedded") / "run"
    small = "synthesis.images=4 synthesis.batch=4 synthesis.steps=1 calibration.epochs=1 calibration.batch=4"
    assert cli.main(["quantize", "cifar10_vit", "--out", str(out), "--device", "cpu", "--set", *small.split()]) == 0
    return out


@pytest.mark.slow
def test_a_checkpoint_that_is_not_the_runs_is_refused_before_anything_is_evaluated_or_written(
    call, files, finished, embedded, tmp_path, monkeypatch
):
    other = tmp_path / "other.safetensors"
    safetensors.torch.save_file(tiny_vit(seed=1).state_dict(), other)
    (tmp_path / "damaged.safetensors").write_bytes(b"\0" * 100)
    monkeypatch.setattr("maskaq.runs.opened.evaluate", lambda *_: pytest.fail("evaluated"))
    unfit = other, tmp_path / "damaged.safetensors", tmp_path / "gone.safetensors", tmp_path
    for out, data, given in ((finished, files / "data", unfit), (embedded, DEMO_DATA, unfit[:1])):
        before = content(out)
        for file in given:
            for words in (("evaluate", out, "--data", data), ("calibrate", out), ("report", out)):
                code, _, err = call(*words, "--device", "cpu", "--checkpoint", file)
                assert code == 1 and err.startswith("error: ") and err.count("\n") < 40
                assert (str(file) if out is finished else "cifar10_vit") in err
        assert content(out) == before


@pytest.mark.slow
def test_a_row_that_cannot_be_measured_any_more_keeps_its_figures(call, files, tmp_path):
    weights, out = tmp_path / "weights.safetensors", tmp_path / "run"
    weights.write_bytes((files / "vit.safetensors").read_bytes())
    argv = quantize(files, out)
    argv[argv.index(str(files / "vit.safetensors"))] = str(weights)
    evaluate = ("evaluate", out, "--device", "cpu", "--class-index", files / "index.json", "--data")
    assert call(*argv)[0] == call(*evaluate, files / "data")[0] == 0
    measured = json.loads((out / "metrics.json").read_text())
    weights.unlink()
    code, text, _ = call(*evaluate, files / "data")
    assert code == 0 and "no such file" in text
    assert json.loads((out / "metrics.json").read_text()) == measured
    assert (
        json.loads((out / QUANTIZED / "config.json").read_text())["made"]["metrics"]["accuracy"] == measured["accuracy"]
    )
    assert call(*evaluate, files / "subset")[0] == 0  # other images: the old figures are not theirs
    rows = json.loads((out / "metrics.json").read_text())["accuracy"]
    assert isinstance(rows["full precision"], str) and rows["maskaq"]["n"] == 6


LONG = "n" * 300
PATHS = {
    "quantize --out": ["quantize", "cifar10_vit", "--out", LONG],
    "synthesize --out": ["synthesize", "cifar10_vit", "--out", LONG],
    "demo --out": ["demo", "--out", LONG],
    "quantize": ["quantize", LONG],
    "quantize --checkpoint": ["quantize", VIT, "--checkpoint", LONG],
    "quantize --recipe": ["quantize", "cifar10_vit", "--recipe", LONG],
    "quantize --recipe, a file": ["quantize", "cifar10_vit", "--recipe", f"{LONG}.toml"],
    "quantize --recipe, images": ["quantize", "cifar10_vit", "--recipe", f"images:{LONG}"],
    "quantize --recipe, a home": ["quantize", "cifar10_vit", "--recipe", f"images:~{LONG}"],
    "quantize --data": ["quantize", "cifar10_vit", "--data", LONG],
    "calibrate": ["calibrate", LONG],
    "evaluate": ["evaluate", LONG, "--data", "x"],
    "evaluate a folder": ["evaluate", f"x/{LONG}", "--data", "x"],
    "evaluate --data": ["evaluate", "cifar10_vit", "--data", LONG],
    "evaluate --class-index": ["evaluate", "cifar10_vit", "--data", ".", "--class-index", LONG],
    "evaluate --checkpoint": ["evaluate", VIT, "--data", ".", "--checkpoint", LONG],
    "export": ["export", LONG],
    "export -o": ["export", "x", "-o", f"{LONG}.onnx"],
    "report": ["report", LONG],
    "report -o": ["report", "x", "-o", f"{LONG}.html"],
    "inspect": ["inspect", LONG],
    "inspect --checkpoint": ["inspect", VIT, "--checkpoint", LONG],
    "bench-runtime": ["bench-runtime", f"{LONG}.onnx"],
}


@pytest.mark.parametrize("odd", [LONG, "a\0b"], ids=["too long", "NUL"])
@pytest.mark.parametrize("argv", PATHS.values(), ids=PATHS.keys())
def test_a_path_that_no_system_takes_is_told_without_a_traceback(call, tmp_path, monkeypatch, argv, odd):
    monkeypatch.chdir(tmp_path)
    code, _, err = call(*(word.replace(LONG, odd) for word in argv))
    assert code in (1, 2) and "error: " in err and "Traceback" not in err
    assert not list(tmp_path.iterdir())


def test_a_file_that_no_command_foresaw_is_told_without_a_traceback(call, monkeypatch):
    def stumble(*_: object) -> None:
        Path("/dev/null/x").read_bytes()

    monkeypatch.setattr("maskaq.cli.inspect.run", stumble)
    assert call("inspect", "cifar10_vit") == (1, "", "error: /dev/null/x: Not a directory\n")


DEEP = "[" * 20_000


def test_what_is_nested_too_deeply_is_told_without_a_traceback(call, files, tmp_path):
    (tmp_path / "deep.json").write_text(DEEP)
    (tmp_path / "deep.toml").write_text(f"v = {DEEP}")
    for i in range(2000):
        (tmp_path / f"{i}.toml").write_text(f'extends = "{i + 1}.toml"')
    key = "synthesis.steps" + ".a" * 20_000
    for argv, words in (
        (("evaluate", *model(files), "--data", files / "data", "--class-index", tmp_path / "deep.json"), "deep.json"),
        (("inspect", "cifar10_vit", "--recipe", tmp_path / "deep.toml"), "deep.toml"),
        (("inspect", "cifar10_vit", "--recipe", tmp_path / "0.toml"), "0.toml"),
        (("inspect", "cifar10_vit", "--set", f"synthesis.steps={DEEP}"), "synthesis.steps"),
        (("inspect", "cifar10_vit", "--set", f"{key}=1"), "synthesis.steps"),
        (("inspect", "cifar10_vit", "--set", f"{key}=1", f"{key}=2"), "synthesis.steps"),
        (("inspect", VIT, "--model-arg", f"depth={DEEP}"), "depth"),
        (("inspect", VIT, "--model-arg", f"depth={'-' * 20_000}1"), "depth"),
    ):
        code, _, err = call(*argv)
        assert code == 1 and err.startswith("error: ") and words in err and "Traceback" not in err
        assert len(err) < 50_000


def test_evaluate_offers_no_option_that_it_would_ignore(call):
    assert "--plain" not in call("evaluate", "--help")[1] and "--plain" in call("quantize", "--help")[1]


def test_memory_that_the_machine_does_not_have_is_told_without_a_traceback(call, monkeypatch):
    def allocate(*_: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8000000000000 bytes.")

    monkeypatch.setattr("maskaq.cli.inspect.run", allocate)
    code, _, err = call("inspect", "cifar10_vit")
    assert code == 1 and err.startswith("error: out of memory: lower --batch, or in a recipe synthesis.images")


@pytest.mark.parametrize("kind", [draw.ProgressBar, draw.ProgressLines])
def test_progress_survives_an_advance_before_any_stage(kind):
    out = io.StringIO()
    with kind(Console(file=out, width=140)) as progress:
        progress.advance(3, loss=1.0)
        progress.stage("make", 4)
        progress.advance(4)
    assert "make" in out.getvalue() and "3" not in out.getvalue().split("make")[0]


@pytest.mark.parametrize(("agreement", "said", "lines"), [(0.75, "6 of 8 images", 4), (1.0, "8 of 8 images", 3)])
def test_an_export_says_on_how_many_images_file_and_model_agree(agreement, said, lines):
    facts = {"weights": 3, "sites": 4, "codes": 50, "turned": 0, "farthest": 0.0, "logits": 1e-6, "images": 8}
    found = SimpleNamespace(**facts, agreement=agreement, agreement_means="predict the same class", correlation=0.9)
    text = list(draw.verification(found, "ONNX Runtime", "products"))
    assert said in text[1] and "%" not in text[1] and len(text) == lines
