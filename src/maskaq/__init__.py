"""maskaq: make a vision transformer small without its training data.

    import maskaq
    result = maskaq.quantize(timm_model, recipe="quick", bits="w4a4", out="runs/mine")

The names below are the public API; each comes from the file that its stage lives in, and is imported when first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.1"

_HOME = {
    "quantize": "maskaq.run",
    "load_recipe": "maskaq.config",
    "Recipe": "maskaq.config",
    "load_model": "maskaq.models.load",
    "expose": "maskaq.models",
    "quantized_twin": "maskaq.quant.twin",
    "init_ranges_": "maskaq.quant.twin",
    "noise": "maskaq.run",
    "synthesize": "maskaq.synthesis",
    "Calibrator": "maskaq.calibration",
    "evaluate": "maskaq.evaluation",
    "image_folder": "maskaq.data",
    "open_run": "maskaq.results",
    "save_pretrained": "maskaq.pretrained",
    "from_pretrained": "maskaq.pretrained",
    "write_report": "maskaq.results",
    "inspect_model": "maskaq.inspection",
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
    from maskaq.calibration import Calibrator
    from maskaq.config import Recipe, load_recipe
    from maskaq.data import image_folder
    from maskaq.errors import MaskaqError
    from maskaq.evaluation import evaluate
    from maskaq.inspection import inspect_model
    from maskaq.losses.terms import calibration_term, synthesis_term
    from maskaq.models import expose
    from maskaq.models.load import load_model
    from maskaq.pretrained import from_pretrained, save_pretrained
    from maskaq.quant.quantizers import quantizer
    from maskaq.quant.twin import init_ranges_, quantized_twin
    from maskaq.results import open_run, write_report
    from maskaq.run import noise, quantize
    from maskaq.synthesis import synthesize


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'maskaq' has no attribute {name!r}; public names: {', '.join(__all__)}")
    return getattr(importlib.import_module(_HOME[name]), name)
