"""Move the scales of channels from activations into weights (RepQ-ViT, Li et al. 2023).

Behind a LayerNorm, channels differ so much that each wants a range of its own, which integer arithmetic does not allow.
So each channel's own scale s_c and zero point z_c go into the norm in front of the layer and the weights behind it, and
one scale and zero point for the whole tensor are left, with the codes that the channels' own would have given:

    r = s_c / s,  b = (z - z_c) s;   norm: weight / r, bias / r - b;   layer: W r, bias + (W r) b

The float model computes the same as before. Where a recipe finds ranges behind quantized layers (`range_inputs`), those
of all other activations are found anew, as what they were found behind has changed.
"""

from typing import Any

import torch
from torch import Tensor, nn

from maskaq.calibrate.stage import GradientFree
from maskaq.models import geometry, streams_of
from maskaq.models.structure import Reader
from maskaq.quant import ranges
from maskaq.quant.quantizers import Log, Quantizer
from maskaq.quant.twin import float_inputs, set_activation_ranges_

_VALUES = 1 << 12  # of each channel


class Reparametrizer(GradientFree):
    """The stage that moves the scales of every layer that reads a LayerNorm, except the classifier."""

    name = "reparametrize"

    @torch.no_grad()
    def fit(self, images: Tensor, epoch: int) -> dict[str, float]:
        readers, reason = norm_readers(self.teacher)
        if reason:
            self.progress.note(f"not reparametrized: {reason}")
        inputs = float_inputs(self.student, images, {reader.layers[0] for reader in readers})
        for reader in self.each(readers):
            self._fold(reader, inputs[reader.layers[0]][0])
        if self.scheme.range_inputs == "quantized":
            folded = {self.student.get_submodule(name).input_quantizer for reader in readers for name in reader.layers}
            set_activation_ranges_(self.student, images, self.scheme, keep=folded)  # type: ignore[arg-type]
        return {"layers": float(sum(len(reader.layers) for reader in readers))}

    def _fold(self, reader: Reader, values: Tensor) -> None:
        norm: Any = self.student.get_submodule(reader.norm)
        layers: list[Any] = [self.student.get_submodule(name) for name in reader.layers]
        quantizer = layers[0].input_quantizer
        if not isinstance(quantizer, Quantizer) or quantizer.site.role != "activation":
            return
        bits, find = quantizer.site.bits, ranges.RANGES[quantizer.site.range]
        columns = values.flatten(0, -2)
        columns = columns[:: max(1, -(-len(columns) // _VALUES))].T  # (C, M)
        own_scale, own_zero = ranges.affine(*find(columns, bits, False, self.scheme.percentile), bits)
        scale = own_scale.mean()
        shifts = all(layer.bias is not None for layer in layers) and norm.bias is not None
        zero = own_zero.mean().round()
        ratio = own_scale / scale
        shift = (zero - own_zero) * scale if shifts else torch.zeros_like(own_zero)
        norm.weight.div_(ratio)
        if norm.bias is not None:
            norm.bias.div_(ratio).sub_(shift)
        for layer in layers:
            layer.weight.mul_(ratio)
            if shifts:
                layer.bias.add_(layer.weight @ shift)
            if isinstance(layer.weight_quantizer, Quantizer):
                method = layer.weight_quantizer.site.range
                layer.weight_quantizer.set_range(layer.weight, method, self.scheme.percentile)
            if not isinstance(layer.input_quantizer, Quantizer):
                continue
            if shifts and not isinstance(layer.input_quantizer, Log):
                layer.input_quantizer._store(scale[None], zero[None])
            else:
                method = layer.input_quantizer.site.range
                layer.input_quantizer.set_range(columns.T / ratio - shift, method, self.scheme.percentile)


def norm_readers(model: nn.Module) -> tuple[list[Reader], str]:
    """Layers that read a residual stream through a LayerNorm with a weight, and why there are none, if so."""
    streams = streams_of(model)
    if isinstance(streams, str):
        return [], streams
    last = geometry(model).last
    found = [
        reader for stream in streams for reader in stream.readers if reader.norm and not {*reader.layers} & {*last}
    ]
    weighted = [r for r in found if getattr(model.get_submodule(r.norm), "weight", None) is not None]
    return weighted, "" if weighted else "no norm has a weight"
