"""What the fast engine promises: the plain engine's numbers, from compiled blocks and fused kernels.

No GPU is needed. The fast engine runs on the CPU in float32: kernels in Triton's interpreter, blocks through the front
half of the compiler, no CUDA graph. That takes a process of its own, because Triton reads its switch at import.
"""

import gc
import importlib.util
import json
import math
import os
import re
import subprocess
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import timm
import torch
from families import small
from helpers import (
    DENSE_TERMS,
    INTERPRETED,
    Ears,
    assert_same,
    inside,
    outside,
    pair,
    small_recipe,
    tiny_swin,
    tiny_vit,
)
from torch import nn

from maskaq import bench, models
from maskaq.calibrate.calibrator import Calibrator
from maskaq.calibrate.reconstruction import Reconstructor
from maskaq.cli import main as cli
from maskaq.engine import PLAIN, Engine, pick_engine
from maskaq.images.synthesis import Synthesizer
from maskaq.losses.terms import SYNTHESIS_TERMS, Objective, synthesis_term
from maskaq.models import AttentionProducts, expose
from maskaq.quant import grid
from maskaq.quant.quantizers import LSQ, QUANTIZERS, quantizer

needs_triton = pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="the fast engine needs triton")

SIZE = (16, 8)
CLASS_TOKEN = partial(tiny_vit, img_size=SIZE, patch_size=4)
AVERAGE = partial(CLASS_TOKEN, depth=1, global_pool="avg", class_token=False)
SHIFTED = partial(tiny_swin, img_size=SIZE, window_size=2, depths=(2,), num_heads=(2,))
MERGING = partial(tiny_swin, img_size=16, window_size=2, depths=(1, 1), num_heads=(2, 2))
PLAIN_PRODUCTS = ("attention_prior",)  # terms that read probabilities, which the fused kernel never writes
TERMS = [name for name in SYNTHESIS_TERMS if name not in (*PLAIN_PRODUCTS, *DENSE_TERMS)]


@pytest.mark.slow
@outside
@needs_triton
def test_in_the_interpreter():
    """These tests and those of the kernels: one process, which imports and compiles once for all."""
    names = ("engine", "kernels_attention", "kernels_maps", "kernels_rotation")
    files = [Path(__file__).with_name(f"test_{name}.py") for name in names]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    # Without records of logging: a failure would print thousands of the compiler's.
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:logging", *files]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed and int(passed[1]) > 100, f"most were skipped: {done.stdout[-500:]}"


if INTERPRETED:
    from torch._dynamo.backends.debugging import aot_eager

    from maskaq.engine.fast import FastEngine

    class FastOnCpu(FastEngine):
        """Keeps every graph it compiles."""

        def __init__(self) -> None:
            self.graphs: list[torch.fx.GraphModule] = []
            super().__init__(torch.device("cpu"), backend=self._compile)

        def _compile(self, graph, inputs):
            self.graphs.append(graph)
            return aot_eager(graph, inputs)

        def precision(self):
            return nullcontext()

        def repeated(self, step):
            return step

        def blocks(self, fused: bool) -> int:
            """How many of its graphs are transformer blocks with, or without, the fused attention."""
            called = [{str(node.target) for node in graph.graph.nodes} for graph in self.graphs]
            return sum(any("gelu" in name for name in names) and _is_fused(names) == fused for names in called)

        def rotating(self) -> int:
            """How many of its graphs call the fused rotation of hidden channels."""
            return sum(any("rotated_gelu" in str(node.target) for node in graph.graph.nodes) for graph in self.graphs)

    FAST = FastOnCpu()


@outside
@needs_triton
def test_blocks_embedding_and_merging_are_compiled():
    from maskaq.engine.fast import _regions

    vit = expose(tiny_vit())
    assert _regions(vit) == ["patch_embed", *(f"blocks.{i}" for i in range(len(vit.blocks)))]
    stages = [[f"layers.{i}.downsample", f"layers.{i}.blocks.0", f"layers.{i}.blocks.1"] for i in range(2)]
    assert _regions(expose(tiny_swin())) == ["patch_embed", *stages[0][1:], *stages[1]]


@outside
@needs_triton
def test_a_block_that_holds_another_is_compiled_in_parts(monkeypatch):
    from maskaq.engine import fast

    inner = nn.ModuleDict({"norm": nn.LayerNorm(4), "block": nn.Linear(4, 4), "mlp": nn.Linear(4, 4)})
    model = nn.ModuleDict({"embed": nn.Linear(4, 4), "outer": inner, "head": nn.Linear(4, 4)})
    for module in (fast, models):
        monkeypatch.setattr(module, "geometry", lambda model: SimpleNamespace(blocks=("outer", "outer.block")))
    assert fast._regions(model) == ["embed", "outer.norm", "outer.block", "outer.mlp"]


@outside
@needs_triton
def test_padded_layouts_are_left_out_where_the_compiler_reads_them_wrongly():
    from torch.torch_version import TorchVersion

    from maskaq.engine.fast import _unpadded

    found = {text: _unpadded("inductor", TorchVersion(text)) for text in ("2.9.1", "2.11.0+cu130", "2.13.0", "2.15")}
    assert found == {
        "2.9.1": {"comprehensive_padding": False},
        "2.11.0+cu130": {"comprehensive_padding": False},
        "2.13.0": None,
        "2.15": None,
    }
    assert "comprehensive_padding" in torch._inductor.list_options(), "torch.compile refuses options that it has not"
    assert _unpadded("aot_eager", TorchVersion("2.11")) is None


@outside
@needs_triton
@pytest.mark.parametrize(
    ("name", "options", "pads"),
    [
        ("deit_tiny_patch16_224", {"img_size": 32, "depth": 1}, True),
        ("swin_tiny_patch4_window7_224", {"img_size": 56, "depths": (1, 1)}, True),
        ("vit_small_patch16_dinov3", {"img_size": 32, "depth": 1, "num_classes": 10}, False),
    ],
)
def test_blocks_are_padded_only_where_q_k_and_v_are_split_by_this_package(name, options, pads):
    from maskaq.engine.fast import _may_pad
    from maskaq.models import AttentionProducts

    model = expose(timm.create_model(name, **options))
    assert _may_pad([module for module in model.modules() if isinstance(module, AttentionProducts)]) == pads


@outside
@needs_triton
def test_nothing_is_freed_during_a_capture():
    from maskaq.engine.fast import _without_garbage

    freed = []

    class Graph:
        def __del__(self):
            freed.append(self)

    def leave_one():
        old = Graph()
        old.itself = old

    gc.collect()
    leave_one()
    with _without_garbage():
        assert len(freed) == 1, "garbage of before is gone"
        leave_one()
        [[] for _ in range(10_000)]  # enough to start a collection
        assert len(freed) == 1 and not gc.isenabled()
    assert gc.isenabled()
    gc.collect()
    assert len(freed) == 2


def _is_fused(names: set[str]) -> bool:
    return any(name.startswith("maskaq.attention") for name in names)


def _yes(*_) -> bool:
    return True


@pytest.fixture
def fast(monkeypatch):
    """One for all tests, without the graphs of those before: what is compiled already is not compiled again."""
    monkeypatch.setattr("maskaq.engine.kernels.attention.fits", _yes)  # float32 too
    torch._dynamo.utils.counters.clear()
    FAST.graphs.clear()
    yield FAST
    assert not torch._dynamo.utils.counters["graph_break"]


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    assert got.shape == want.shape and want.any()
    return float((got - want).norm() / want.norm())


# ---- synthesis


class Probe(Objective):
    """Keeps each term and its gradient on the pixels, and those of the student's attention alone."""

    def __call__(self, view):
        values = {term.name: term.function(view) for term, _ in self.parts}
        if view.student_attention:
            values["student"] = torch.stack([alpha.square().sum() for alpha in view.student_attention])
        self.seen = {}
        for name, value in values.items():
            (gradient,) = torch.autograd.grad(value.sum(), view.images, retain_graph=True)
            self.seen[name] = value.detach(), gradient
        return view.images.square().sum(dim=(1, 2, 3)), {}


def assert_alike(fast: Engine, *overrides: str, build=CLASS_TOKEN, only: tuple[str, ...] | None = None) -> set[str]:
    """One step of two images from noise: terms and their gradients are those of the plain engine. The terms' names."""
    weights = [f"synthesis.terms.{name}={int(only is None or name in only)}" for name in SYNTHESIS_TERMS]
    recipe = small_recipe("synthesis.steps=1", *weights, *overrides)
    teacher, student = pair(recipe, build)
    seen = []
    for engine in (PLAIN, fast):
        make = Synthesizer(teacher, student, recipe, engine=engine)
        make.objective = Probe(SYNTHESIS_TERMS, recipe.synthesis.terms, "synthesis.terms")
        make(torch.arange(2))
        seen.append(make.objective.seen)
    want, got = seen
    for name, (value, gradient) in want.items():
        assert relative_error(got[name][0], value) <= 1e-4, name
        # A kernel of width 0.01, narrow bins, and a scale from the images' own range, make rounding ten times larger.
        close = 1e-3 if name in ("patch_entropy", "similarity_histogram", "entropy_margin") else 1e-4
        assert relative_error(got[name][1], gradient) <= close, f"gradient of {name}"
    return set(want)


@inside
@pytest.mark.parametrize(
    ("build", "graphs"),
    [(CLASS_TOKEN, 2), (AVERAGE, 2), (SHIFTED, 4)],  # of teacher and student; shifted blocks and others
    ids=["class_token", "average", "shifted"],
)
def test_every_synthesis_term_and_its_gradient_are_the_plain_ones(fast, build, graphs):
    """The student's attention is there alone, too: torch.compile (2.11) once lost its gradient, and no other."""
    assert assert_alike(fast, build=build, only=tuple(TERMS)) == {*TERMS, "student"}
    assert 0 < fast.blocks(fused=True) <= graphs and not fast.blocks(fused=False), "blocks alike share a graph"


@inside
@pytest.mark.parametrize("family", ["eva02", "dinov3", "swinv2"])
def test_other_families_take_the_fused_kernel(fast, family):
    """Rotary positions, and a gain of each head in the place of one scale."""
    before = len(fast.graphs)
    assert_alike(fast, build=partial(small, family), only=("head_similarity", "attention_alignment"))
    called = [{str(node.target) for node in graph.graph.nodes} for graph in fast.graphs[before:]]
    assert any(map(_is_fused, called))


@inside
def test_operands_that_autocast_left_in_full_precision_take_the_fused_kernel():
    """As the normalised queries and keys of Swin V2 do."""
    from maskaq.engine.fast import _fused_attention

    attention = AttentionProducts()
    attention.scale = 0.5
    attention.listened = ("scores",)
    q, k, v = torch.randn(3, 2, 2, 13, 8, generator=torch.Generator().manual_seed(0))
    gain = torch.tensor([2.0, 3.0]).view(2, 1, 1)
    with torch.autocast("cpu", torch.float16):  # the interpreter cannot multiply bfloat16
        expected = attention.products(q, k, v, None, gain)
        attention.products = None  # type: ignore[method-assign]
        found = _fused_attention(attention, q, k, v, None, gain)
    assert found["heads"].dtype == found["scores"].dtype == torch.float16
    torch.testing.assert_close(found["heads"], expected["heads"], atol=5e-3, rtol=5e-3)
    torch.testing.assert_close(found["scores"][..., :13].float(), expected["scores"].float(), atol=2e-2, rtol=5e-3)


@inside
def test_merged_patches_give_the_plain_gradients(fast):
    names = ("class_prior", "attention_alignment")
    assert assert_alike(fast, build=MERGING, only=names) == {*names, "student"}


@inside
def test_a_term_of_ones_own(fast):
    def difference(p, q):
        return float(p.shape[1]) * (p - q).abs().sum(dim=1)

    def spread(maps):
        return maps.std(dim=4).mean(dim=(1, 2, 3))

    @synthesis_term(needs=("student",))
    def own(v):
        attention = v.run(difference, v.attention[-1], v.student_attention[-1])
        return attention + v.run.over_maps(spread, v) + v.patch_maps[0].sin().mean(dim=(1, 2, 3, 4)) + v.logits[:, 0]

    try:
        assert assert_alike(fast, only=("own",)) == {"own", "student"}
    finally:
        del SYNTHESIS_TERMS["own"]


@inside
@pytest.mark.parametrize("build", [CLASS_TOKEN, SHIFTED], ids=["class_token", "shifted"])
def test_terms_that_read_probabilities_take_the_plain_products(fast, build):
    assert assert_alike(fast, build=build, only=PLAIN_PRODUCTS) == set(PLAIN_PRODUCTS)
    assert fast.blocks(fused=False) and not fast.blocks(fused=True)


@inside
def test_maps_of_probabilities_take_the_plain_products(fast):
    named = ("head_similarity", "similarity_entropy", "attention_alignment")
    assert assert_alike(fast, "synthesis.map=probs", only=named) == {*named, "student"}
    assert fast.blocks(fused=False) == 2 and not fast.blocks(fused=True)


@inside
@pytest.mark.parametrize("build", [CLASS_TOKEN, SHIFTED], ids=["class_token", "shifted"])
def test_a_log_grid_and_ranges_of_heads_take_the_fused_kernel(fast, build):
    rules = ('{match="*.av.a", quantizer="log"}', '{match="*.qk.*", granularity="head"}')
    rules = (*rules, '{match="*.av.*", granularity="head"}')
    names = ("class_prior", "attention_alignment")
    settings = ("quantization.gelu=log", *(f"quantization.rule={rule}" for rule in rules))
    assert_alike(fast, *settings, build=build, only=names)
    assert fast.blocks(fused=True) and not fast.blocks(fused=False)


@inside
@pytest.mark.parametrize(
    ("build", "graphs"), [(CLASS_TOKEN, 1), (SHIFTED, 2), (MERGING, 2)], ids=["class_token", "shifted", "merging"]
)
def test_rotated_hidden_channels_take_the_fused_kernel(fast, build, graphs):
    names = ("class_prior", "attention_alignment")
    assert_alike(fast, "quantization.rotate=heads,residual,hidden", build=build, only=names)
    assert fast.rotating() == graphs, "the student's; blocks alike share a graph"


@inside
@pytest.mark.parametrize("exception", ['quantizer="square_root"', 'bits="float"'])
def test_what_the_rotation_kernel_has_not_takes_the_plain_path(fast, exception):
    @quantizer("square_root")
    class SquareRoot(LSQ):
        """Finer for small values."""

        def fake_quantize(self, x):
            return super().fake_quantize(x.sign() * x.abs().sqrt()).square()

    rule = f'quantization.rule={{match="*.fc2.input", {exception}}}'
    try:
        assert_alike(fast, "quantization.rotate=hidden", rule, only=("class_prior", "attention_alignment"))
    finally:
        del QUANTIZERS["square_root"]
    assert fast.blocks(fused=True) and not fast.rotating()


@inside
@pytest.mark.parametrize("fault", ["fails", "gives other values", "gives gradients of NaN"])
def test_a_rotation_kernel_that_does_not_serve_this_gpu_is_left_out_with_a_note(monkeypatch, fault):
    from maskaq.engine.kernels import rotation

    def broken(x, *rest):
        if fault == "fails":
            raise RuntimeError("no such instruction\non this GPU")
        y = kernel(x, *rest)
        if fault == "gives gradients of NaN":
            y.register_hook(lambda gradient: gradient * torch.nan)
            return y
        return 2 * y

    kernel, notes, engine = rotation.rotated_gelu, [], FastOnCpu()
    monkeypatch.setattr(engine, "note", notes.append)
    monkeypatch.setattr(rotation, "rotated_gelu", broken)
    assert_alike(engine, "quantization.rotate=hidden", only=("class_prior", "attention_alignment"))
    assert len(notes) == 1 and ("no such instruction" if fault == "fails" else "%") in notes[0]
    assert not engine.rotating()


@inside
def test_a_quantizer_of_ones_own_takes_the_plain_products(fast):
    @quantizer("square_root")
    class SquareRoot(LSQ):
        """Finer where probabilities are small."""

        def fake_quantize(self, x):
            return super().fake_quantize(x) if self.site.signed else super().fake_quantize(x.sqrt()).square()

    try:
        assert_alike(fast, "quantization.activation=square_root", only=("class_prior", "attention_alignment"))
    finally:
        del QUANTIZERS["square_root"]
    assert fast.blocks(fused=False) == 1, "the student's"


@outside
def test_a_canvas_with_more_room_than_images_makes_the_same_images():
    """Up to one grey level: products of another size add up in another order."""

    class Replaying(Engine):
        captures = True  # keeps its buffers

    recipe = small_recipe("synthesis.batch=3")
    teacher, student = pair(recipe)
    roomy, fitting = (Synthesizer(teacher, student, recipe, engine=engine) for engine in (Replaying(), PLAIN))
    roomy(torch.arange(3))
    for numbers, round in (([3, 4], 0), ([5], 1), ([0, 1, 2, 3], 0)):
        got, want = (make(torch.tensor(numbers), round) for make in (roomy, fitting))
        assert (got.images.int() - want.images.int()).abs().max() <= 1
        assert got.labels.tolist() == want.labels.tolist() and got.indices.tolist() == numbers
    assert len(roomy._buffers.labels) == 3 and len(fitting._buffers.labels) == 1


@outside
def test_a_canvas_with_more_room_than_images_logs_their_mean():
    class Replaying(Engine):
        captures = True

    recipe = small_recipe("synthesis.batch=4")
    teacher, student = pair(recipe)
    roomy, fitting = (Synthesizer(teacher, student, recipe, engine=engine) for engine in (Replaying(), PLAIN))
    roomy(torch.arange(4))
    for make in (roomy, fitting):
        make(torch.arange(2))
    assert roomy.curves[0] == pytest.approx(fitting.curves[0], rel=1e-3)


@outside
@pytest.mark.parametrize("layout", ["expanded", "channels_last"])
def test_a_term_may_give_a_gradient_of_any_layout(layout):
    signs = torch.tensor([1.0, 1.0, 1.0] if layout == "expanded" else [1.0, -1.0, 1.0])

    @synthesis_term
    def ink(v):
        if layout == "expanded":
            return v.images.sum(dim=(1, 2, 3))
        return (v.images.permute(0, 2, 3, 1) * signs).sum(dim=(1, 2, 3))

    try:
        weights = [f"synthesis.terms.{name}={int(name == 'ink')}" for name in SYNTHESIS_TERMS]
        moved, start = (
            Synthesizer(*pair(recipe, CLASS_TOKEN), recipe)._make_part(torch.arange(2), 0, None, 0)
            for lr in (0.5, 0.0)
            for recipe in [small_recipe("synthesis.steps=1", f"synthesis.lr={lr}", *weights)]
        )
    finally:
        del SYNTHESIS_TERMS["ink"]
    steps = torch.where(start.abs() < 0.5, start - moved, 0.5 * signs[:, None, None])  # others may meet black or white
    torch.testing.assert_close(steps, (0.5 * signs[:, None, None]).expand_as(steps))


# ---- calibration


def calibrated(
    engine: Engine, build, count: int, *overrides: str
) -> tuple[dict[str, torch.Tensor], dict[str, float], Calibrator]:
    """How an epoch of one step has changed a student; its losses."""
    terms = [f"calibration.terms.{name}=1" for name in ("logit_kl", "head_structure", "block_error")]
    recipe = small_recipe("calibration.batch=2", "calibration.lr=1", "quantization.activation=lsq", *terms, *overrides)
    teacher, student = pair(recipe, build)
    before = {name: value.clone() for name, value in student.state_dict().items()}
    fit = Calibrator(teacher, student, recipe, engine=engine)
    losses = fit.epoch(bench._images(fit.geometry, count), 0)
    return {name: value - before[name] for name, value in student.state_dict().items()}, losses, fit


@inside
@pytest.mark.parametrize(
    ("build", "count", "rotate"),
    [(CLASS_TOKEN, 2, ""), (CLASS_TOKEN, 2, "hidden"), (CLASS_TOKEN, 1, ""), (SHIFTED, 1, ""), (SHIFTED, 1, "hidden")],
    ids=["class_token", "rotated", "rest", "shifted_rest", "rotated_shifted_rest"],
)
def test_calibration_changes_every_parameter_as_the_plain_one_does(fast, build, count, rotate):
    """A batch is of two images. One image, the rest of an epoch, meets the kernels but is not worth a compilation."""
    rotation = [f"quantization.rotate={rotate}"] if rotate else []
    want, losses, _ = calibrated(PLAIN, build, count, *rotation)
    got, fast_losses, fit = calibrated(fast, build, count, *rotation)
    assert losses.keys() == {"loss", "logit_kl", "head_structure", "block_error", "lr"}
    assert fast_losses == pytest.approx(losses, rel=1e-3)
    changed = [name for name, change in want.items() if change.any()]
    for part in ("proj.weight", "norm1.bias", "head", "qk.a_quantizer.scale", "av.a_quantizer.scale", "zero_point"):
        assert any(part in name for name in changed), f"no {part} has changed"
    for name, change in want.items():
        assert relative_error(got[name], change) <= 1e-3 if name in changed else not got[name].any(), name
    many = len(fast.graphs)
    assert bool(many) == (count == 2) and bool(fast.rotating()) == (count == 2 and bool(rotate))
    if count == 2:
        fit.epoch(bench._images(fit.geometry, 4), 1)
        assert len(fast.graphs) == many, "later steps compile nothing"


@inside
@pytest.mark.parametrize("build", [CLASS_TOKEN, MERGING], ids=["class_token", "merging"])
def test_reconstruction_changes_each_block_as_the_plain_one_does(fast, build):
    recipe = small_recipe(
        "calibration.batch=2",
        "calibration.stages=reconstruct",
        "calibration.reconstruct.epochs=2",
        "calibration.reconstruct.lr=1e-5",
    )
    found = []
    for engine in (PLAIN, fast):
        teacher, student = pair(recipe, build)
        before = {name: value.clone() for name, value in student.state_dict().items()}
        fit = Reconstructor(teacher, student, recipe, engine=engine)
        losses = [fit.epoch(bench._images(fit.geometry, 2), epoch) for epoch in range(2)]
        found.append((losses, {name: value - before[name] for name, value in student.state_dict().items()}))
    (losses, want), (fast_losses, got) = found
    for plain, other in zip(losses, fast_losses, strict=True):
        assert other == pytest.approx(plain, rel=1e-3)
    changed = [name for name in want if want[name].any()]
    assert {name for name in got if got[name].any()} == set(changed) and changed
    # Adam's first step is the sign of the gradient: it may turn where that is 0 but for rounding.
    turned = sum(int(((got[name] - want[name]).abs() > 1e-6).sum()) for name in changed)
    assert turned <= 0.01 * sum(want[name].numel() for name in changed)


# ---- compilation


@inside
def test_later_steps_of_synthesis_compile_nothing(fast):
    recipe = small_recipe("synthesis.batch=2")
    make = Synthesizer(*pair(recipe, partial(CLASS_TOKEN, depth=1)), recipe, engine=fast)
    make.trial(2, steps=1)
    many = len(fast.graphs)
    make.trial(2, steps=3)
    assert len(fast.graphs) == many


@inside
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("channels", [1, 4])
def test_gradients_of_the_grid_survive_compilation(channels, dtype):
    """x is a slice and the result is transposed: layouts that a compiler may change."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(4, 6, 10, generator=generator).to(dtype)
    scale, zero_point = torch.linspace(-0.3, 0.4, channels), torch.linspace(-1.0, 9.3, channels)
    weight = torch.randn(4, 5, 6, generator=generator)

    def loss(x, scale, zero_point):
        shape = (-1, 1, 1) if channels > 1 else ()
        step, zero = (y.reshape(shape) for y in grid.learned_grid(scale, zero_point, 0, 15, 0.1))
        return (grid.fake_quantize(x[..., ::2], step, zero, 0, 15).transpose(1, 2).float() * weight).sum()

    results = []
    for function in (loss, torch.compile(loss, backend="aot_eager", fullgraph=True)):
        inputs = [tensor.clone().requires_grad_() for tensor in (values, scale, zero_point)]
        value = function(*inputs)
        results.append([value, *torch.autograd.grad(value, inputs)])
    for want, got in zip(*results, strict=True):
        assert want.any()
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


# ---- the model afterwards


def assert_untouched(model: nn.Module, before: dict[str, set[str]]) -> None:
    assert {name: set(vars(module)) for name, module in model.named_modules()} == before
    assert not any("forward" in vars(module) or "_conv_forward" in vars(module) for module in model.modules())
    attentions = [module for module in model.modules() if isinstance(module, AttentionProducts)]
    assert attentions and all(attention.fused is None and not attention.listened for attention in attentions)


@inside
def test_the_model_is_afterwards_as_it_was(fast):
    recipe, precision = small_recipe(), torch.get_float32_matmul_precision()
    images = torch.randn(2, 3, *SIZE, generator=torch.Generator().manual_seed(0))
    for model in pair(recipe, CLASS_TOKEN):
        attributes = {name: set(vars(module)) for name, module in model.named_modules()}
        state, output = {name: value.clone() for name, value in model.state_dict().items()}, model(images)
        with fast.applied(model), torch.no_grad():
            assert "forward" in vars(model.blocks[0]) and model.blocks[0].attn.fused is not None
            torch.testing.assert_close(model(images), output, rtol=1e-4, atol=1e-4)
        assert_untouched(model, attributes)
        with pytest.raises(KeyboardInterrupt), fast.applied(model):
            raise KeyboardInterrupt
        assert_untouched(model, attributes)
        assert_same(model.state_dict(), state)
        assert torch.equal(model(images), output)
    assert torch.get_float32_matmul_precision() == precision


@inside
def test_rotary_positions_are_built_once_for_a_size(fast, monkeypatch):
    """timm builds them on the CPU at each pass, which cannot be captured in a CUDA graph."""
    model = expose(small("dinov3"))
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    want, calls, rotary = model(images), [], type(model.rope)
    build = rotary.get_embed
    monkeypatch.setattr(rotary, "get_embed", lambda self, *a, **k: calls.append(a) or build(self, *a, **k))
    for _ in range(2):
        with fast.applied(model), torch.no_grad():
            torch.testing.assert_close(model(images), want, rtol=1e-4, atol=1e-4)
    assert len(calls) == 1
    model(images)
    assert len(calls) == 2


@inside
def test_an_image_that_is_no_whole_number_of_patches(fast):
    """A convolution leaves the rest of the image out."""
    model = expose(CLASS_TOKEN(img_size=(18, 8), depth=1))
    images = torch.randn(2, 3, 18, 8, generator=torch.Generator().manual_seed(0))
    want = model(images)
    with fast.applied(model):
        torch.testing.assert_close(model(images), want, rtol=1e-4, atol=1e-4)


@inside
def test_an_error_within_a_step_leaves_the_models_as_they_were(fast):
    @synthesis_term
    def failing(v):
        raise ZeroDivisionError

    try:
        recipe = small_recipe("synthesis.terms.failing=1")
        models = pair(recipe, CLASS_TOKEN)
        before = [{name: set(vars(module)) for name, module in model.named_modules()} for model in models]
        with pytest.raises(ZeroDivisionError):
            Synthesizer(*models, recipe, engine=fast)(torch.arange(2))
    finally:
        del SYNTHESIS_TERMS["failing"]
    for model, attributes in zip(models, before, strict=True):
        assert_untouched(model, attributes)


# ---- which engine


@outside
def test_the_plain_engine_serves_cpu_and_whoever_asks_for_it():
    progress = Ears()
    for fast in (None, True, False):
        assert pick_engine(torch.device("cpu"), fast, progress) is PLAIN
    assert pick_engine(torch.device("cuda"), False, progress) is PLAIN
    assert not progress.notes


@outside
@pytest.mark.parametrize(
    ("place", "error", "said"),
    [
        ("torch.compile", RuntimeError("no compiler\nand a long story"), "no compiler"),
        ("maskaq.engine.fast.FastEngine", AssertionError(), "AssertionError"),
    ],
)
@needs_triton
def test_where_the_fast_engine_fails_the_plain_one_serves_with_a_note(monkeypatch, place, error, said):
    def fails(*args, **kwargs):
        raise error

    monkeypatch.setattr(place, fails)
    progress = Ears()
    assert pick_engine(torch.device("cuda"), progress=progress) is PLAIN
    assert progress.notes == [f"the fast engine cannot run here, the plain one does: {said}"]
    assert pick_engine(torch.device("cuda")) is PLAIN, "nobody needs to progress"


@outside
def test_without_triton_the_plain_engine_serves_with_a_note(monkeypatch):
    monkeypatch.setitem(sys.modules, "maskaq.engine.fast", None)
    progress = Ears()
    assert pick_engine(torch.device("cuda"), progress=progress) is PLAIN
    assert len(progress.notes) == 1


# ---- how fast it is


@outside
def test_bench_times_both_stages():
    recipe = small_recipe("synthesis.batch=2", "calibration.batch=3")
    timings = list(bench.bench("tiny", expose(tiny_vit()), recipe, steps=2, repeats=2))
    assert [(t.model, t.stage, t.engine, t.batch) for t in timings] == [
        ("tiny", "synthesis", "plain", 2),
        ("tiny", "calibration", "plain", 3),
    ]
    for timing in timings:
        facts = json.loads(json.dumps(timing.to_dict(), allow_nan=False))
        for name in ("microseconds", "fastest", "slowest", "gigaflop", "floor_microseconds", "share_of_floor"):
            assert facts[name] > 0 and math.isfinite(facts[name]), name
        assert facts["fastest"] <= facts["microseconds"] <= facts["slowest"] and facts["setup_seconds"] >= 0
        assert facts["megabytes_per_image"] is None and facts["times_faster_than_release"] is None


@outside
def test_a_bench_counts_the_work_of_a_step_and_not_the_measuring_of_the_pace():
    counted = [
        list(bench.bench("tiny", expose(tiny_vit()), small_recipe(f"calibration.pace={pace}"), steps=1, repeats=1))
        for pace in ("fixed", "error")
    ]
    assert [t.gigaflop for t in counted[0]] == [t.gigaflop for t in counted[1]]


@outside
def test_the_bench_command_prints_a_table_and_writes_json(tmp_path, capfd):
    file = tmp_path / "bench.json"
    sizes = ["--batch", "1", "--calibration-batch", "2", "--steps", "1", "--repeats", "1"]
    more = ["--bits", "w4a8", "--device", "cpu", "--note", "trial", "--json", str(file)]
    assert cli.main(["bench", "cifar10_vit", *sizes, *more]) == 0
    printed = capfd.readouterr().out
    assert all(
        word in printed for word in ("microseconds per image", "cifar10_vit", "synthesis", "calibration", "plain")
    )
    facts = json.loads(file.read_text())
    assert facts["note"] == "trial" and facts["command"].startswith("maskaq bench cifar10_vit --batch 1")
    assert [(t["stage"], t["batch"]) for t in facts["timings"]] == [("synthesis", 1), ("calibration", 2)]
