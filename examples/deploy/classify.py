"""The five most likely classes of an image, with ONNX Runtime alone: python classify.py model.onnx IMAGE [IMAGE ...]

The file is one of `maskaq export`: it carries its preprocessing and the names of its classes.
pip install onnxruntime numpy pillow
"""

import json
import sys
import time
from pathlib import Path

import numpy as np
import onnxruntime
from PIL import Image, UnidentifiedImageError


class Classifier:
    """An exported classifier and what its metadata says of its input."""

    def __init__(self, file: str, threads: int = 0) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        self.session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
        entries = self.session.get_modelmeta().custom_metadata_map
        if "maskaq.input_size" not in entries:
            raise ValueError(f"{file} has no maskaq metadata: expected a file of `maskaq export`")
        notes = {
            key: json.loads(entries[f"maskaq.{key}"]) for key in ("input_size", "mean", "std", "crop_pct", "labels")
        }
        self.channels, self.height, self.width = notes["input_size"]
        self.crop = notes["crop_pct"]
        self.mean, self.std = (np.array(notes[key], np.float32) for key in ("mean", "std"))
        if any(values.shape != (self.channels,) or not np.isfinite(values).all() for values in (self.mean, self.std)):
            raise ValueError(f"{file} has damaged metadata: expected mean and std of {self.channels} channels")
        classes = self.session.get_outputs()[0].shape[1]
        self.labels = [str(i) for i in range(classes)] if notes["labels"] is None else notes["labels"]
        if not isinstance(self.labels, list) or [type(label) for label in self.labels] != [str] * classes:
            raise ValueError(f"{file} has damaged metadata: expected {classes} labels")
        self.resample = Image.Resampling[entries["maskaq.interpolation"].upper()]

    def prepared(self, image: Image.Image) -> np.ndarray:
        """(1, C, H, W): resized, the middle cut out, normalised."""
        image = image.convert("RGB" if self.channels == 3 else "L")
        scale = max(self.height, self.width) / self.crop / min(image.size)
        image = image.resize([round(side * scale) for side in image.size], self.resample)
        left, top = (image.width - self.width) // 2, (image.height - self.height) // 2
        image = image.crop((left, top, left + self.width, top + self.height))
        pixels = np.asarray(image, np.float32).reshape(self.height, self.width, self.channels) / 255
        return ((pixels - self.mean) / self.std).transpose(2, 0, 1)[None]

    def __call__(self, image: Image.Image, count: int = 5) -> tuple[list[tuple[str, float]], float]:
        """The most likely classes with their probabilities, and the milliseconds that the model took."""
        images = self.prepared(image)
        began = time.perf_counter()
        (logits,) = self.session.run(["logits"], {"images": images})
        milliseconds = 1e3 * (time.perf_counter() - began)
        powers = np.exp(logits[0] - logits[0].max())
        best = np.argsort(-powers)[:count]
        return [(self.labels[i], float(powers[i] / powers.sum())) for i in best], milliseconds


def main(words: list[str]) -> None:
    if len(words) < 2:
        sys.exit(__doc__)
    if not Path(words[0]).is_file():
        sys.exit(f"{words[0]} is not a file: expected an .onnx file of `maskaq export`")
    try:
        classify = Classifier(words[0])
        classify(Image.new("RGB", (classify.width, classify.height)))  # the first run takes longer than others
    except Exception as error:  # the runtime's own classes
        sys.exit(
            f"cannot use {words[0]}: {error}; expected an undamaged .onnx file of `maskaq export`: export it again"
        )
    for name in words[1:]:
        try:
            with Image.open(name) as image:
                found, milliseconds = classify(image)
        except (OSError, UnidentifiedImageError) as error:
            sys.exit(f"cannot read {name} as an image: {error}")
        print(f"{name}   {milliseconds:.1f} ms")
        for label, probability in found:
            print(f"  {100 * probability:5.1f} %  {label}")


if __name__ == "__main__":
    main(sys.argv[1:])
