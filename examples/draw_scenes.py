"""Draw procedural scenes as PNG files: images of the kind that the embedded detector and segmenter were trained on.

    python examples/draw_scenes.py scenes --count 64
    maskaq quantize scenes_segmenter --recipe demo-scenes+images:scenes --bits w3a3 --out runs/ceiling --data scenes

A run on them is NOT data-free: it is the ceiling that synthetic images are measured against. `--data scenes` takes
scenes of another seed.
"""

import argparse
from pathlib import Path

from PIL import Image

from maskaq.zoo.scenes import scene


def main() -> None:
    parser = argparse.ArgumentParser(description="draw procedural scenes as PNG files")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0, help="of the scenes; 0 is that of training")
    parser.add_argument("--size", type=int, default=128, help="pixels of both sides")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    for index in range(arguments.count):
        drawn = scene(arguments.seed, index, (arguments.size, arguments.size))
        Image.fromarray(drawn.image.permute(1, 2, 0).numpy()).save(arguments.folder / f"scene_{index:04d}.png")
    print(f"{arguments.count} scenes of seed {arguments.seed} in {arguments.folder}")


if __name__ == "__main__":
    main()
