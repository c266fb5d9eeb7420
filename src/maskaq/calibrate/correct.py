"""Take the mean error of each channel out of every block's output (activation correction, after Tong et al. 2025).

Block after block, as those behind see the correction: X_P - X_Q, mean over images and tokens, is added to the bias of
the layer that writes last to the block's output. So it costs nothing, and is a constant in every exported file.
"""

from typing import Any

import torch
from torch import Tensor

from maskaq.calibrate.stage import GradientFree
from maskaq.models import streams_of
from maskaq.models.taps import taps
from maskaq.quant.twin import frozen

_LEAST_SCALE = 1e-3  # of a LayerScale, below which a bias cannot reach the output


class Corrector(GradientFree):
    name = "correct"

    @torch.no_grad()
    def fit(self, images: Tensor, epoch: int) -> dict[str, float]:
        streams = streams_of(self.teacher)
        if isinstance(streams, str):
            self.progress.note(f"activations not corrected: {streams}")
            return {"blocks": 0.0}
        writers = dict(writer for stream in streams for writer in stream.writers)
        rows = {block: row for row, block in enumerate(self.geometry.blocks)}
        corrected = 0
        for block, row in self.each([*rows.items()]):
            last = [name for name in writers if name.startswith(f"{block}.")][-1]
            layer: Any = self.student.get_submodule(last)
            if layer.bias is None:
                continue
            error = self._mean_error(images, row)
            if writers[last]:
                gamma: Any = self.student.get_submodule(writers[last]).gamma
                error = torch.where(gamma.abs() > _LEAST_SCALE, error / gamma, 0.0)
            layer.bias.add_(error)
            corrected += 1
        return {"blocks": float(corrected)}

    def _mean_error(self, images: Tensor, row: int) -> Tensor:
        """(C,) of the block that the layer of this number is in."""
        errors = []
        with frozen(self.student), taps(self.teacher, "blocks") as p, taps(self.student, "blocks") as q:
            for part in images.split(32):
                self.teacher(part), self.student(part)
                errors.append((p["blocks"][row] - q["blocks"][row]).flatten(0, -2))
        return torch.cat(errors).mean(dim=0)
