"""Top-1 of a file of `maskaq export`, with ONNX Runtime alone: python onnx_evaluate.py model.onnx IMAGE_FOLDER

The folder has one sub-folder per class, in the order of the classes. pip install onnxruntime numpy pillow
"""

import json
import sys
from pathlib import Path

import numpy as np
import onnxruntime
from PIL import Image

if len(sys.argv) != 3 or not Path(sys.argv[1]).is_file() or not Path(sys.argv[2]).is_dir():
    sys.exit(__doc__)
session = onnxruntime.InferenceSession(sys.argv[1])
notes = session.get_modelmeta().custom_metadata_map
(_, height, width), crop = json.loads(notes["maskaq.input_size"]), json.loads(notes["maskaq.crop_pct"])
mean, std = (np.array(json.loads(notes[f"maskaq.{key}"]), np.float32) for key in ("mean", "std"))


def ready(path):
    image = Image.open(path).convert("RGB")
    scale = max(height, width) / crop / min(image.size)
    image = image.resize([round(side * scale) for side in image.size], Image.Resampling.BICUBIC)
    left, top = (image.width - width) // 2, (image.height - height) // 2
    pixels = np.asarray(image.crop((left, top, left + width, top + height)), np.float32) / 255
    return ((pixels - mean) / std).transpose(2, 0, 1)


folders = sorted(path for path in Path(sys.argv[2]).iterdir() if path.is_dir())
classes = session.get_outputs()[0].shape[1]
if len(folders) != classes:  # else every label after the first absent one would be another class's
    sys.exit(f"{sys.argv[2]} has {len(folders)} sub-folders, and the model {classes} classes: one for each is needed")
hits = []
for label, folder in enumerate(folders):
    for path in sorted(path for path in folder.iterdir() if path.suffix.lower() in Image.registered_extensions()):
        (logits,) = session.run(["logits"], {"images": ready(path)[None]})
        hits.append(logits.argmax() == label)
if not hits:
    sys.exit(f"{sys.argv[2]} has no images in its sub-folders")
print(f"top-1 {100 * np.mean(hits):.2f} % of {len(hits)} images")
