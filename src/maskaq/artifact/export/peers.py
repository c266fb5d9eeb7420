"""The same model from the quantizers that a user would pick instead, each fed with the same images.

All at 8 bits, with the settings that their own pages recommend for a transformer on an x86 CPU.
"""

import copy
import importlib.util
import logging
import tempfile
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from maskaq.artifact.export.runtimes import Candidate, Run, runner
from maskaq.errors import ExportError


def available() -> list[str]:
    """Names of the tools that are installed, in the order in which they are run."""
    needed = {"quantize_dynamic": "onnxruntime", "quantize_static": "onnxruntime", "NNCF": "nncf", "torchao": "torchao"}
    found = [name for name, package in needed.items() if importlib.util.find_spec(package)]
    return [name for name in found if name != "NNCF" or importlib.util.find_spec("openvino")]


def make_peers(
    model: nn.Module, float_file: str | Path, images: Tensor, folder: str | Path, calibrated_on: str = ""
) -> list[Candidate]:
    """Quantize a full-precision model with every installed tool.

    Args:
        float_file: the model as ONNX in float32.
        images: normalised (N, C, H, W), what the tools that calibrate do it on.
        folder: where their files are written.
        calibrated_on: what the images are, where they are not the first set: it is put behind the names, and tools
            that need no images are left out.
    """
    makers: dict[str, Any] = {
        "quantize_dynamic": partial(_dynamic, float_file),
        "quantize_static": partial(_static, float_file, images),
        "NNCF": partial(_nncf, float_file, images),
        "torchao": partial(_torchao, model),
    }
    peers = []
    for name in available():
        needs_images = name in ("quantize_static", "NNCF")
        if calibrated_on and not needs_images:
            continue
        label = f"{name}, {calibrated_on}" if calibrated_on else name
        level = logging.root.manager.disable
        logging.disable(max(level, logging.WARNING))  # ONNX Runtime logs a line for each LayerNorm
        try:
            peers.append(makers[name](label, Path(folder)))
        except Exception as error:  # every tool raises classes of its own
            reason = str(error).strip().splitlines()
            raise ExportError(f"{name} could not quantize the model: {reason[-1] if reason else error!r}") from error
        finally:
            logging.disable(level)
    return peers


def _of_file(name: str, runtime: str, file: Path) -> Candidate:
    size = sum(path.stat().st_size for path in file.parent.glob(f"{file.stem}.*"))
    return Candidate(name, runtime, size / 1e6, partial(runner, file))


def _dynamic(float_file: str | Path, name: str, folder: Path) -> Candidate:
    from onnxruntime.quantization import QuantType, quantize_dynamic

    file = folder / f"{_plain(name)}.onnx"
    with _prepared(float_file) as prepared:
        quantize_dynamic(prepared, file, per_channel=True, weight_type=QuantType.QInt8)
    return _of_file(name, "onnxruntime", file)


def _static(float_file: str | Path, images: Tensor, name: str, folder: Path) -> Candidate:
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

    class Images(CalibrationDataReader):
        def __init__(self) -> None:
            self.batches = iter(images.split(8))

        def get_next(self) -> dict[str, np.ndarray] | None:
            batch = next(self.batches, None)
            return None if batch is None else {"images": batch.numpy()}

    file = folder / f"{_plain(name)}.onnx"
    with _prepared(float_file) as prepared:
        quantize_static(
            prepared,
            file,
            Images(),
            quant_format=QuantFormat.QDQ,
            per_channel=True,
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
        )
    return _of_file(name, "onnxruntime", file)


class _prepared:
    """Context with the file that ONNX Runtime's quantizers want: shapes inferred and the graph optimised."""

    def __init__(self, file: str | Path) -> None:
        self.file = file

    def __enter__(self) -> str:
        import onnx
        from onnxruntime.quantization.shape_inference import quant_pre_process

        self.folder = tempfile.TemporaryDirectory()
        place = f"{self.folder.name}/prepared.onnx"
        quant_pre_process(str(self.file), place, skip_symbolic_shape=True)
        proto = onnx.load(place)
        del proto.graph.value_info[:]  # quantize_dynamic transposes weights, and trips over the shapes of before
        onnx.save(proto, place)
        return place

    def __exit__(self, *_: Any) -> None:
        self.folder.cleanup()


def _nncf(float_file: str | Path, images: Tensor, name: str, folder: Path) -> Candidate:
    import nncf
    import openvino

    from maskaq.artifact.export.openvino import read

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        data = nncf.Dataset([image.numpy() for image in images.split(1)])
        settings: dict[str, Any] = {"model_type": nncf.ModelType.TRANSFORMER, "subset_size": len(images)}
        found = nncf.quantize(read(float_file), data, **settings)
    file = folder / f"{_plain(name)}.xml"
    openvino.save_model(found, file, compress_to_fp16=False)
    return _of_file(name, "openvino", file)


def _torchao(model: nn.Module, name: str, folder: Path) -> Candidate:
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

    found = copy.deepcopy(model).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantize_(found, Int8DynamicActivationInt8WeightConfig())
    numbers = sum(p.numel() for p in model.parameters())
    linear = sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear))
    megabytes = (4 * (numbers - linear) + linear) / 1e6  # of the tensors: it has no file format for runtimes

    def load(threads: int) -> Run:
        def run(batch: np.ndarray) -> np.ndarray:
            torch.set_num_threads(threads)
            with torch.inference_mode():
                return found(torch.from_numpy(batch)).numpy()

        return run

    return Candidate(name, "pytorch", megabytes, load)


def _plain(name: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in name)
