"""The method stage by stage, on the embedded CIFAR-10 ViT. The budget is tiny: it shows how, not how well.

    python examples/quickstart.py

`maskaq.quantize(model, recipe, out=...)` does all of this in one call, and stores it so that it can be resumed.
"""

from torch.utils.data import DataLoader

import maskaq
from maskaq import zoo
from maskaq.images.sets import TensorImages, to_pixels
from maskaq.models import geometry

recipe = maskaq.load_recipe(
    "quick",
    "synthesis.images=30",
    "synthesis.steps=10",
    "synthesis.batch=30",
    "calibration.epochs=6",
    "calibration.batch=5",
    bits="w3a3",
)
seed = 0

# The teacher is an exposed copy of the model; the student is its quantized twin.
teacher = maskaq.expose(maskaq.load_model("cifar10_vit"))
student = maskaq.quantized_twin(teacher, recipe.quantization)
test_set = DataLoader(TensorImages(*zoo.test_images(), teacher), batch_size=100)
print("full precision           ", maskaq.evaluate(teacher, test_set))

# A range is never set by what happens to pass: first noise sets it, so that there is a student to synthesize against.
maskaq.init_ranges_(student, maskaq.noise(teacher, recipe.quantization.range_images, seed), recipe.quantization)
images = maskaq.synthesize(teacher, student, recipe, seed=seed)

# Then the synthetic images set it again, and calibration starts from there.
first = geometry(teacher).normalise(to_pixels(images.images[: recipe.quantization.range_images]))
maskaq.init_ranges_(student, first, recipe.quantization)
print("ranges from the images   ", maskaq.evaluate(student, test_set))

calibrator = maskaq.Calibrator(teacher, student, recipe, seed=seed)
for epoch in range(recipe.calibration.epochs):
    print(f"epoch {epoch}: loss {calibrator.epoch(images, epoch)['loss']:.3f}")
print("calibrated               ", maskaq.evaluate(student, test_set))
