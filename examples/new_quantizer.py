"""A quantizer of your own: a class and a name.

    python examples/new_quantizer.py

This one rounds every step up to a power of two, so that rescaling is a shift of bits.
"""

from torch import Tensor
from torch.utils.data import DataLoader

import maskaq
from maskaq import zoo
from maskaq.images.sets import TensorImages
from maskaq.quant.quantizers import Static


@maskaq.quantizer("power_of_two")
class PowerOfTwo(Static):
    """A fixed range whose step is a power of two."""

    def _store(self, scale: Tensor, zero_point: Tensor) -> None:
        super()._store(2 ** scale.log2().ceil(), zero_point)


teacher = maskaq.expose(maskaq.load_model("cifar10_vit"))
test_set = DataLoader(TensorImages(*zoo.test_images(), teacher), batch_size=100)
for weight in ("static", "power_of_two"):
    recipe = maskaq.load_recipe("quick", f"quantization.weight={weight}", bits="w4a8")
    student = maskaq.quantized_twin(teacher, recipe.quantization)
    maskaq.init_ranges_(student, maskaq.noise(teacher, 32, seed=0), recipe.quantization)
    steps = student.head.weight_quantizer.scale[:3].tolist()
    print(f"{weight:13} {maskaq.evaluate(student, test_set)}; steps of the classifier: {steps} ...")
