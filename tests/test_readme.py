"""README, USAGE and DEPLOYMENT work: Python runs as printed, commands run with a smaller budget, make targets exist."""

import re
import shlex
from importlib.util import find_spec
from pathlib import Path

import pytest

from maskaq import zoo
from maskaq.cli import evaluation
from maskaq.cli import main as cli
from maskaq.images.scenes import scene_images
from maskaq.losses.terms import SYNTHESIS_TERMS

ROOT = Path(__file__).parents[1]
PAGES = {name: (ROOT / name).read_text() for name in ("README.md", "docs/USAGE.md", "docs/DEPLOYMENT.md")}
SNIPPETS = [
    pytest.param(snippet, id=f"{name}-{number}")
    for name, text in PAGES.items()
    for number, snippet in enumerate(re.findall(r"```python\n(.*?)```", text, flags=re.S))
]
BLOCKS = [block for text in PAGES.values() for block in re.findall(r"```bash\n(.*?)```", text, flags=re.S)]
LINES = [line for block in BLOCKS for line in block.replace("\\\n", " ").splitlines()]
COMMANDS = [shlex.split(line, comments=True) for line in LINES]
MASKAQ = [words[1:] for words in COMMANDS if words[:1] == ["maskaq"]]
HAS_ONNX = all(find_spec(name) for name in ("onnx", "onnx_ir", "onnxruntime", "onnxscript"))
SMALL = (
    "synthesis.images=4 synthesis.batch=4 synthesis.steps=2 calibration.epochs=2 calibration.batch=4 refresh.every=1"
)


def runs_here(words):
    """Whether a command needs nothing but the package: no download, no file of the user's. Those for OpenVINO run in
    test_export.py, on a smaller model."""
    if words[0] in ("export", "bench-runtime") and not HAS_ONNX:
        return False
    for_openvino = any(word == "openvino" or word.endswith(".xml") for word in words)
    from_hub = any(word.startswith("hf:") for word in words)
    downloaded = from_hub or {"deit_tiny_patch16_224", "vit_small_patch14_dinov2"} & set(words)
    return not downloaded and not for_openvino and "--checkpoint" not in words


def test_the_pages_have_what_these_tests_look_for():
    assert len(SNIPPETS) >= 3
    assert len(MASKAQ) >= 8
    assert sum(runs_here(words) for words in MASKAQ) >= 6


def few_test_images(monkeypatch):
    images, labels = zoo.test_images()
    monkeypatch.setattr(zoo, "test_images", lambda: (images[::50], labels[::50]))
    monkeypatch.setattr(evaluation, "scene_images", lambda model, count, **options: scene_images(model, 8, **options))


@pytest.mark.slow
@pytest.mark.parametrize("snippet", SNIPPETS)
def test_python_of_the_pages_runs_as_printed(snippet, tmp_path, monkeypatch):
    few_test_images(monkeypatch)
    monkeypatch.chdir(tmp_path)
    known = set(SYNTHESIS_TERMS)
    try:
        exec(compile(snippet, "snippet", "exec"), {"__name__": "snippet"})
    finally:
        for added in set(SYNTHESIS_TERMS) - known:
            del SYNTHESIS_TERMS[added]


@pytest.mark.slow
def test_commands_of_the_pages_run_in_their_order(tmp_path, monkeypatch, capsys):
    few_test_images(monkeypatch)
    monkeypatch.chdir(tmp_path)
    for words in filter(runs_here, MASKAQ):
        budget = ["--set", *SMALL.split()] if words[0] in ("demo", "quantize", "compare") else []
        assert cli.main([*words, *budget]) == 0, words
        if words == ["demo"]:
            out = capsys.readouterr().out
            rows = ("full precision", "round to nearest", "searched ranges", "maskaq")
            assert "cifar10_vit w3a3 on cifar10-demo" in out and all(f"│ {row} " in out for row in rows)
    assert (tmp_path / "runs/swin/quantized/model.safetensors").exists()
    assert (tmp_path / "runs/swin.json").exists()


@pytest.mark.parametrize("words", [w for w in MASKAQ if not runs_here(w)], ids=" ".join)
def test_commands_that_need_a_users_files_are_well_formed(words):
    args = cli._parser().parse_args(words)
    assert args.command in ("quantize", "compare", "export", "bench-runtime")


def test_make_targets_of_the_pages_exist():
    makefile = (ROOT / "Makefile").read_text()
    for words in COMMANDS:
        if words[:1] == ["make"]:
            assert re.search(rf"^{words[1]}:", makefile, flags=re.M), words


def test_ci_runs_the_readmes_test_command():
    assert "\nmake test\n" in (ROOT / ".ci" / "run").read_text()


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))], ids=lambda page: page.name
)
def test_links_lead_to_files_and_headings_that_exist(page):
    for target, heading in re.findall(r"\]\(([^)#:]*)(?:#([^)]+))?\)", page.read_text()):
        linked = page.parent / target if target else page
        assert linked.exists(), target
        if heading:
            titles = re.findall(r"^#+ (.+)$", linked.read_text(), flags=re.M)
            assert heading in [re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles], heading


def test_every_test_that_the_method_page_cites_exists():
    cited = set(re.findall(r"`(test_\w+)`", (ROOT / "docs" / "METHOD.md").read_text()))
    written = set(re.findall(r"def (test_\w+)", "".join(p.read_text() for p in (ROOT / "tests").glob("test_*.py"))))
    assert cited and cited <= written, cited - written
