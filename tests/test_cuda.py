"""What the fast engine promises on a real GPU, where its steps are replayed and its kernels are compiled.

They compile for minutes, so that only `make test-gpu` runs them.
"""

import os
from dataclasses import replace

import pytest
import timm
import torch
from helpers import Ears, hook, small_recipe

from maskaq import load_model, quantize
from maskaq.calibrate.calibrator import Calibrator
from maskaq.calibrate.reconstruction import Reconstructor
from maskaq.engine import PLAIN, pick_engine
from maskaq.images.stored import noise
from maskaq.images.synthesis import Synthesizer
from maskaq.models import expose
from maskaq.quant.grid import fake_quantize
from maskaq.quant.rotation import Rotation, hadamard
from maskaq.quant.twin import init_ranges_, quantized_twin
from maskaq.recipe.schema import Reconstruct
from maskaq.storage.runfolder import RunFolder

pytestmark = pytest.mark.skipif(os.environ.get("MASKAQ_TEST_GPU") != "1", reason="make test-gpu runs it, on a CUDA GPU")
each_model = pytest.mark.parametrize("name", ["cifar10_vit", "cifar10_swin"])

RECIPE = small_recipe(
    "synthesis.start=dead_leaves",
    "synthesis.images=32",
    "synthesis.batch=32",
    "synthesis.steps=12",
    "refresh.steps=6",
    "calibration.batch=32",
    "calibration.epochs=8",
    "calibration.optimizer=adamw",
    "calibration.terms.block_error=10",
    "refresh.every=4",
)


@pytest.fixture(scope="module")
def fast():
    ears = Ears()
    engine = pick_engine(torch.device("cuda"), progress=ears)
    assert engine.captures, ears.notes
    return engine


def models(name):
    teacher = expose(load_model(name)).cuda()
    student = quantized_twin(teacher, RECIPE.quantization)
    init_ranges_(student, noise(teacher, 16, 0), RECIPE.quantization)
    return teacher, student


def leaves(name):
    return Synthesizer(*models(name), replace(RECIPE, synthesis=replace(RECIPE.synthesis, steps=0)))(torch.arange(32))


@each_model
def test_images_go_where_the_plain_engine_takes_them(fast, name):
    one = replace(RECIPE, synthesis=replace(RECIPE.synthesis, steps=1))
    gradients, losses = [], []
    for engine in (PLAIN, fast):
        synthesizer = Synthesizer(*models(name), one, engine=engine)
        synthesizer(torch.arange(32))
        gradients.append(synthesizer._buffers.images.grad.flatten(1))
        whole = Synthesizer(*models(name), RECIPE, engine=engine)
        whole(torch.arange(32))
        losses.append(whole.curves[-1])
    assert torch.cosine_similarity(*gradients).median() > 0.9  # of the first step, before any is replayed
    assert losses[1] == pytest.approx(losses[0], rel=0.25)  # of the last, which is


@each_model
def test_calibration_goes_where_the_plain_engine_takes_it(fast, name):
    images, ends = leaves(name), []
    for engine in (PLAIN, fast):
        calibrator = Calibrator(*models(name), RECIPE, engine=engine)
        ends.append([calibrator.epoch(images, epoch)["loss"] for epoch in range(8)])
    for losses in ends:
        assert losses[-1] < losses[0]  # there is a way to go
    # Between them ways part: codes of 4 bits turn on the last digit of a bfloat16.
    assert ends[1][0] == pytest.approx(ends[0][0], rel=0.05)
    assert ends[1][-1] == pytest.approx(ends[0][-1], rel=0.15)


@pytest.mark.parametrize("name", ["scenes_segmenter", "scenes_detector"])
def test_dense_models_calibrate_as_with_the_plain_engine(fast, name):
    scenes, ends = leaves(name)[:8], []
    recipe = replace(RECIPE, calibration=replace(RECIPE.calibration, batch=4))
    for engine in (PLAIN, fast):
        calibrator = Calibrator(*models(name), recipe, engine=engine)
        ends.append([calibrator.epoch(scenes, epoch)["loss"] for epoch in range(4)])  # replayed from the second on
    assert ends[1] == pytest.approx(ends[0], rel=0.15)


@pytest.mark.parametrize("tokens", [49, 64])
def test_gradients_behind_a_padded_layout_are_the_plain_ones(fast, tokens):
    """Rows of 49 x 32 values are padded. torch 2.11 read them in another order than it wrote them."""
    torch.manual_seed(0)
    shapes = (100, tokens, 288), (288, 288), (100, 3, tokens, 32)
    x, weight, grad = (torch.randn(*shape, device="cuda", dtype=torch.bfloat16) for shape in shapes)
    x.requires_grad_()

    def product(x):
        q, k, v = (x @ (weight / 20)).reshape(100, tokens, 3, 3, 32).permute(2, 0, 3, 1, 4).unbind(0)
        return q.tanh() * k.sin() * v.cos()

    want, got = (torch.autograd.grad(f(x), x, grad)[0].float() for f in (product, fast.compiled(product)))
    assert ((got - want).norm() / want.norm()).item() < 0.05


def test_the_rotation_kernel_gives_the_plain_values_and_gradients():
    """bfloat16, which Triton's interpreter cannot multiply; a few values change codes."""
    from maskaq.engine.kernels.rotation import rotated_gelu  # it needs triton

    torch.manual_seed(0)
    x, dy = torch.randn(2, 33, 197, 768, device="cuda", dtype=torch.bfloat16)
    rotation = Rotation(hadamard(32)).cuda()
    found = []
    for values in (x.float(), x):
        inputs = [values, torch.tensor([0.05], device="cuda"), torch.tensor([6.0], device="cuda")]
        inputs = [tensor.requires_grad_() for tensor in inputs]
        if values.dtype == torch.float32:
            y = fake_quantize(rotation(torch.nn.functional.gelu(values)), *inputs[1:], 0, 15)
        else:
            y = rotated_gelu(values, rotation.matrix, *inputs[1:], 0, 15)
        found.append([y, *torch.autograd.grad(y, inputs, dy.abs().to(y.dtype))])  # sums far from 0
    for want, got in zip(*found, strict=True):
        assert (got.float() - want).norm() < 0.1 * want.norm()


def test_a_model_that_builds_positions_on_the_cpu_is_captured(fast):
    torch.manual_seed(0)
    teacher = expose(timm.create_model("vit_small_patch16_dinov3", img_size=64, depth=2, num_classes=10)).cuda()
    student = quantized_twin(teacher, RECIPE.quantization)
    init_ranges_(student, noise(teacher, 4, 0), RECIPE.quantization)
    synthesizer = Synthesizer(teacher, student, RECIPE, engine=fast)
    synthesizer(torch.arange(32))
    assert synthesizer._buffers.advance.graph is not None


def test_a_step_that_cannot_be_captured_goes_on_eagerly():
    from maskaq.engine.fast import _Replayed  # it needs triton

    notes, total = [], torch.zeros(1, device="cuda")

    def step():
        total.add_(total.cpu().cuda() * 0 + 1)  # asks the host

    repeated = _Replayed(step, torch.device("cuda"), notes.append)
    for _ in range(6):
        repeated()
    torch.cuda.synchronize()
    assert total.item() == 6 and len(notes) == 1


@each_model
def test_block_after_block_ends_as_the_plain_one_does(fast, name):
    blocks = Reconstruct(epochs=48, lr=1e-3, range_lr=1.0)
    recipe = replace(RECIPE, calibration=replace(RECIPE.calibration, stages=("reconstruct",), reconstruct=blocks))
    images, ends = leaves(name), []
    for engine in (PLAIN, fast):
        reconstructor = Reconstructor(*models(name), recipe, engine=engine)
        told = [reconstructor.epoch(images, epoch)["loss"] for epoch in reconstructor.epochs]
        ends.append([told[epochs.stop - 1] for epochs in map(reconstructor.epochs_of, range(len(reconstructor.units)))])
    assert ends[1] == pytest.approx(ends[0], rel=0.15)
    assert sum(ends[1]) < 3 * len(ends[1])  # both errors are below their first values on the whole


@each_model
def test_a_run_that_stopped_is_finished_by_another(fast, name, tmp_path, monkeypatch):
    def stop():
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        hook(patch.setattr, "maskaq.calibrate.calibrator:Calibrator.epoch", 6, stop)
        quantize(load_model(name), RECIPE, tmp_path / "run", checkpoint_seconds=0)
    ears = Ears()
    result = quantize(load_model(name), RECIPE, tmp_path / "run", progress=ears)
    assert [stage for stage in ears.stages if stage[0].startswith("calibrate")] == [
        ("calibrate, round 2 of 2", 4 * 32, 32)
    ]
    assert all(torch.isfinite(p).all() for p in result.model.parameters())
    assert RunFolder.read(tmp_path / "run").facts["engine"] == "fast"
    assert (tmp_path / "run" / "quantized" / "model.safetensors").exists()
