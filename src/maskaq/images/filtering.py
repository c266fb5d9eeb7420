"""Select generated images that a model recognises well: GenQ's two filters (Li et al. 2024).

Energy: -T log sum exp(z / T) of the logits; low for images like the training data. Patch-similarity entropy (PSAQ-ViT),
summed over layers; high where an image has an object before a background, and low where it is empty or noise.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from timm.data import create_transform
from torch import Tensor, nn

from maskaq.errors import ModelError
from maskaq.images.sets import image_files, read_image
from maskaq.losses.attention import patch_entropy
from maskaq.models import data_config, expose, geometry
from maskaq.models.taps import taps
from maskaq.progress import Progress


@dataclass(frozen=True)
class Score:
    """How well a model recognises an image."""

    file: Path
    energy: float
    entropy: float


@torch.no_grad()
def score_images(
    model: nn.Module,
    folder: str | Path,
    *,
    temperature: float = 1.0,
    device: torch.device | str = "cpu",
    batch: int = 32,
    progress: Progress | None = None,
) -> list[Score]:
    """The scores of every image below a folder, in the order of their names."""
    teacher = expose(model).to(device)
    if not geometry(teacher).classes:
        raise ModelError("energy is of a classifier's logits, and this model has no classes")
    progress = progress or Progress()
    files = image_files(str(folder), 1)
    transform = create_transform(**data_config(model), is_training=False)
    progress.stage(f"score {folder}", len(files))
    found: list[Score] = []
    with taps(teacher, "heads") as seen:
        for start in range(0, len(files), batch):
            part = files[start : start + batch]
            pixels = [transform(read_image(str(file), geometry(teacher).channels)) for file in part]  # type: ignore[operator]
            logits = teacher(torch.stack(pixels).to(device))
            energies = -temperature * torch.logsumexp(logits / temperature, dim=1)
            entropies = _entropies(teacher, seen["heads"])
            found += [Score(*row) for row in zip(part, energies.tolist(), entropies.tolist(), strict=True)]
            progress.advance(len(part))
    return found


def _entropies(teacher: nn.Module, heads: Sequence[Tensor]) -> Tensor:
    layers = zip(geometry(teacher).layers, heads, strict=True)
    return -torch.stack([patch_entropy(layer.window_patches(raw).float()) for layer, raw in layers]).sum(dim=0)


def chosen(scores: Sequence[Score], energy: float, entropy: float) -> list[Score]:
    """Of the share with the lowest energy, the share with the highest entropy; at least one, in the order they come."""
    known = sorted(scores, key=lambda score: score.energy)[: max(1, round(energy * len(scores)))]
    rich = sorted(known, key=lambda score: -score.entropy)[: max(1, round(entropy * len(known)))]
    return [score for score in scores if score in rich]
