"""A loss term of your own: a function of a view that gives one number per image, switched on by a weight.

    python examples/new_loss_term.py

Register before a recipe that names the term is used; the recipe itself may be a file, or overrides as here.
"""

from torch import Tensor
from torch.nn import functional as F

import maskaq
from maskaq.images.sets import to_pixels
from maskaq.losses.terms import CalibrationView, SynthesisView


@maskaq.synthesis_term
def detail(v: SynthesisView) -> Tensor:
    """How much an image differs from itself blurred over 3 x 3 pixels."""
    blurred = F.avg_pool2d(v.images, 3, stride=1, padding=1, count_include_pad=False)
    return (v.images - blurred).square().mean(dim=(1, 2, 3))  # (B,)


@maskaq.calibration_term(needs=("blocks",))  # what must be recorded for it: "heads", "blocks"
def last_block(v: CalibrationView) -> Tensor:
    """Squared error of the last block's output."""
    return (v.blocks[-1] - v.student_blocks[-1]).square().mean(dim=(1, 2))


teacher = maskaq.expose(maskaq.load_model("cifar10_vit"))
for weight in (0.0, 100.0):
    recipe = maskaq.load_recipe(
        "quick",
        "synthesis.images=10",
        "synthesis.steps=20",
        "calibration.epochs=1",
        f"synthesis.terms.detail={weight}",
        "calibration.terms.last_block=1.0",
    )
    student = maskaq.quantized_twin(teacher, recipe.quantization)
    maskaq.init_ranges_(student, maskaq.noise(teacher, 10, seed=0), recipe.quantization)
    images = maskaq.synthesize(teacher, student, recipe)
    losses = maskaq.Calibrator(teacher, student, recipe).epoch(images, epoch=0)
    steps = to_pixels(images.images).diff(dim=-1).abs().mean()
    print(f"detail={weight}: neighbours differ by {steps:.3f}, last_block in calibration is {losses['last_block']:.3f}")
