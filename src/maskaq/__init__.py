"""maskaq: quantize vision transformers without any training data.

    import maskaq
    result = maskaq.quantize(timm_model, recipe="quick", bits="w4a4", out="runs/mine")

The names below are the public API; each comes from the file that its stage lives in, and is imported when first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.3.0"

_HOME = {
    "quantize": "maskaq.runs.quantize",
    "load_recipe": "maskaq.recipe.schema",
    "Recipe": "maskaq.recipe.schema",
    "load_model": "maskaq.models.load",
    "expose": "maskaq.models",
    "quantized_twin": "maskaq.quant.twin",
    "init_ranges_": "maskaq.quant.twin",
    "noise": "maskaq.images.stored",
    "synthesize": "maskaq.images.synthesis",
    "Calibrator": "maskaq.calibrate.calibrator",
    "evaluate": "maskaq.tasks",
    "image_folder": "maskaq.images.sets",
    "open_run": "maskaq.runs.opened",
    "save_pretrained": "maskaq.artifact.saved",
    "from_pretrained": "maskaq.artifact.saved",
    "write_report": "maskaq.runs.opened",
    "inspect_model": "maskaq.quant.inspection",
    "synthesis_term": "maskaq.losses.terms",
    "calibration_term": "maskaq.losses.terms",
    "quantizer": "maskaq.quant.quantizers",
    "MaskaqError": "maskaq.errors",
}

__all__ = [
    "Calibrator",
    "MaskaqError",
    "Recipe",
    "calibration_term",
    "evaluate",
    "expose",
    "from_pretrained",
    "image_folder",
    "init_ranges_",
    "inspect_model",
    "load_model",
    "load_recipe",
    "noise",
    "open_run",
    "quantize",
    "quantized_twin",
    "quantizer",
    "save_pretrained",
    "synthesis_term",
    "synthesize",
    "write_report",
]

if TYPE_CHECKING:
    from maskaq.artifact.saved import from_pretrained, save_pretrained
    from maskaq.calibrate.calibrator import Calibrator
    from maskaq.errors import MaskaqError
    from maskaq.images.sets import image_folder
    from maskaq.images.stored import noise
    from maskaq.images.synthesis import synthesize
    from maskaq.losses.terms import calibration_term, synthesis_term
    from maskaq.models import expose
    from maskaq.models.load import load_model
    from maskaq.quant.inspection import inspect_model
    from maskaq.quant.quantizers import quantizer
    from maskaq.quant.twin import init_ranges_, quantized_twin
    from maskaq.recipe.schema import Recipe, load_recipe
    from maskaq.runs.opened import open_run, write_report
    from maskaq.runs.quantize import quantize
    from maskaq.tasks import evaluate


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'maskaq' has no attribute {name!r}; public names: {', '.join(__all__)}")
    return getattr(importlib.import_module(_HOME[name]), name)
