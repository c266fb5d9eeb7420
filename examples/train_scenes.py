#!/usr/bin/env python3
"""Train a small Mask R-CNN or UperNet on procedural scenes and store it as a float16 safetensors file.

    python examples/train_scenes.py --task detection --minutes 5 --out scenes_detector.safetensors
    python examples/train_scenes.py --task segmentation --minutes 5 --out scenes_segmenter.safetensors

Scenes are drawn on the device, another batch at every step, so that none is seen twice. One training step (drawing,
forward and backward pass, optimiser, weight average) is captured in a CUDA graph, which the host only replays;
``--no-graph`` runs the same step eagerly, and the script restarts itself that way when the capture fails.

The learning rate follows the time that has passed, so that training ends when it should whatever the machine. The
figures at the end are those of the float16 values as stored, on scenes of another seed.
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
from pathlib import Path

import torch
from detector_loss import Objects, detection_losses
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F
from train_cifar10 import GraphCaptureError, ReplayedStep, split_by_decay

from maskaq.images.scenes import HELD_OUT
from maskaq.models.detector import mask_rcnn
from maskaq.models.segmenter import upernet
from maskaq.randomness import fold, image_keys
from maskaq.tasks.metrics import Confusion, Instances
from maskaq.zoo.scenes import CLASSES, boxes_of_masks, draw

SIZE = (128, 128)
SWIN = dict(
    backbone="swin_tiny_patch4_window7_224",
    img_size=SIZE,
    window_size=4,
    embed_dim=24,
    depths=(2, 2, 4, 1),
    num_heads=(1, 2, 4, 8),
    drop_path_rate=0.0,
)
DETECTOR = dict(
    width=48,
    box_width=128,
    mask_width=48,
    mask_layers=2,
    anchor_scale=5,
    finest=28,
    proposals=100,
    per_level=4,
    detections=20,
)
BUILDERS: dict[str, Callable[[], nn.Module]] = {
    "detection": lambda: mask_rcnn(num_classes=len(CLASSES), **SWIN, **DETECTOR),
    "segmentation": lambda: upernet(num_classes=1 + len(CLASSES), width=48, **SWIN),
}


def normalised(model: nn.Module, images: Tensor) -> Tensor:
    """Images in 0..1, rounded to bytes -> what the model reads."""
    record = model.pretrained_cfg
    images = (images * 255).round() / 255
    channels = zip(images.unbind(1), record["mean"], record["std"], strict=True)
    return torch.stack([(channel - mean) / std for channel, mean, std in channels], dim=1)


def class_map(masks: Tensor, labels: Tensor) -> Tensor:
    """(B, H, W): 0 where nothing lies, else 1 + the class."""
    return ((1 + labels)[:, :, None, None] * masks).sum(dim=1)


def loss_of(task: str, model: nn.Module, keys: Tensor) -> Tensor:
    images, masks, labels = draw(keys, SIZE)
    images = normalised(model, images)
    with torch.autocast(images.device.type, dtype=torch.bfloat16, enabled=images.is_cuda, cache_enabled=False):
        if task == "segmentation":
            return F.cross_entropy(model(images).float(), class_map(masks, labels))
        objects = Objects(boxes_of_masks(masks), labels, masks)
        return sum(detection_losses(model, images, objects, fold(keys, "sampler")).values()).mean()


# ---- evaluation


@torch.no_grad()
def evaluate(task: str, model: nn.Module, count: int, device: torch.device, batch: int = 50) -> dict[str, float]:
    """The metrics of held-out scenes, in float32."""
    model.eval()
    judge = Confusion(1 + len(CLASSES)) if task == "segmentation" else Instances(len(CLASSES))
    for start in range(0, count, batch):
        numbers = torch.arange(start, min(count, start + batch), device=device)
        images, masks, labels = draw(image_keys(HELD_OUT, numbers), SIZE)
        images = normalised(model, images)
        if task == "segmentation":
            for found, truth in zip(model(images).argmax(1), class_map(masks, labels), strict=True):
                judge.add(found, truth)
        else:
            for found, own, label in zip(model.detect(images), masks, labels, strict=True):
                there = label >= 0
                truth = {"boxes": boxes_of_masks(own[there]), "labels": label[there], "masks": own[there]}
                judge.add(found, truth, SIZE)
    if task == "segmentation":
        return {"mIoU": judge.miou, "mIoU error": judge.standard_error, "n": count}
    boxes, masks = judge.precision("boxes"), judge.precision("masks")
    return {
        "AP box": boxes.ap,
        "AP box error": boxes.standard_error,
        "AP mask": masks.ap,
        "AP mask error": masks.standard_error,
        "AP50 box": boxes.ap50,
        "AP50 mask": masks.ap50,
        "n": count,
    }


# ---- training


def train(args: argparse.Namespace, model: nn.Module, device: torch.device) -> tuple[int, float]:
    """Train the model in place, and give it the moving average of its weights; steps done and seconds taken."""
    parameters = list(model.parameters())
    average = [p.detach().clone() for p in parameters]
    rate, follow = torch.zeros((), device=device), torch.zeros((), device=device)
    clock, last_loss = torch.zeros(1, dtype=torch.long, device=device), torch.zeros((), device=device)
    slots = torch.arange(args.batch, device=device)
    optimizer = torch.optim.AdamW(
        split_by_decay(model, args.weight_decay),
        lr=rate,
        betas=(0.9, 0.99),
        capturable=device.type == "cuda",
        fused=True,
    )

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of(args.task, model, image_keys(args.seed, clock * args.batch + slots))
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, args.clip)
        optimizer.step()
        with torch.no_grad():
            change = torch._foreach_sub(parameters, average)
            torch._foreach_mul_(change, follow)
            torch._foreach_add_(average, change)
            last_loss.copy_(loss.detach())
            clock.add_(1)

    run_step = ReplayedStep(step, args.graph)
    model.train()
    seconds, steps, reported = 60 * args.minutes, 0, 0
    start = time.perf_counter()
    while (elapsed := time.perf_counter() - start) < seconds:
        share = elapsed / seconds
        rate.fill_(args.lr * min(1, (steps + 1) / args.warmup) * 0.5 * (1 + math.cos(math.pi * share)))
        follow.fill_(max(1 - args.average, 1 / (1 + steps)))
        for _ in range(10 if args.graph else 1):
            run_step()
            steps += 1
        loss = last_loss.item()  # waits, so that the time is that of the device
        if not math.isfinite(loss):
            raise SystemExit(f"step {steps}: the loss is no longer finite; try a lower --lr")
        if elapsed >= reported:
            print(f"{args.task}: step {steps}  loss {loss:.4f}  {elapsed:.0f} s", flush=True)
            reported += args.report
            if args.watch and steps > args.warmup:
                with_average(args, model, parameters, average, device)
    with torch.no_grad():
        torch._foreach_copy_(parameters, average)
    return steps, time.perf_counter() - start


def with_average(
    args: argparse.Namespace, model: nn.Module, parameters: list, average: list, device: torch.device
) -> None:
    """Print the metrics of the moving average as it is now."""
    own = [p.detach().clone() for p in parameters]
    with torch.no_grad():
        torch._foreach_copy_(parameters, average)
        print(
            {key: round(value, 1) for key, value in evaluate(args.task, model, args.watch, device).items()}, flush=True
        )
        torch._foreach_copy_(parameters, own)
    model.train()


def store(path: Path, model: nn.Module, card: dict) -> None:
    state = {k: (v.half() if v.is_floating_point() else v).contiguous().cpu() for k, v in model.state_dict().items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(state, path, metadata={key: json.dumps(value) for key, value in card.items()})


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--task", choices=sorted(BUILDERS), required=True)
    add("--out", type=Path, required=True, help="the safetensors file to write")
    add("--minutes", type=float, required=True, help="of training; the evaluation comes after it")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--seed", type=int, default=0)
    add("--batch", type=int, default=128)
    add("--lr", type=float, default=2e-3)
    add("--weight-decay", type=float, default=0.05)
    add("--clip", type=float, default=1.0)
    add("--warmup", type=int, default=200, help="steps")
    add("--average", type=float, default=0.998, help="decay of the weight average")
    add("--held-out", type=int, default=1000, help="scenes of the evaluation")
    add("--report", type=float, default=20, help="seconds between reports")
    add("--watch", type=int, default=0, help="scenes to evaluate on at each report")
    add("--no-graph", dest="graph", action="store_false")
    add("--init", type=Path, help="weights to go on from: a file that this script wrote")
    args = parser.parse_args(argv)
    device = torch.device(args.device)
    args.graph = args.graph and device.type == "cuda"
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.benchmark = True
    torch.manual_seed(args.seed)
    model = BUILDERS[args.task]().to(device, memory_format=torch.channels_last)
    if args.init:
        model.load_state_dict(load_file(args.init))
    count = sum(p.numel() for p in model.parameters())
    print(f"{args.task}: {count:,} parameters, {2 * count / 1e6:.2f} MB as float16", flush=True)
    try:
        steps, seconds = train(args, model, device)
    except GraphCaptureError as error:
        print(f"no CUDA graph ({error}): again without", flush=True)
        os.execv(sys.executable, [sys.executable, *sys.argv, "--no-graph"])
    words = [Path(word).name if "/" in word else word for word in sys.argv[1:]]
    card = {
        "architecture": model.architecture,
        "mean": model.pretrained_cfg["mean"],
        "std": model.pretrained_cfg["std"],
        "classes": CLASSES,
        "command": shlex.join(["python", "examples/train_scenes.py", *words]),
        "steps": steps,
        "seconds": round(seconds),
    }
    store(args.out, model, card)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    model.load_state_dict(load_file(args.out))
    card["metrics"] = {key: round(value, 2) for key, value in evaluate(args.task, model, args.held_out, device).items()}
    store(args.out, model, card)
    print(
        f"{args.task}: {steps} steps in {seconds:.0f} s, {args.out.stat().st_size:,} bytes, {card['metrics']}",
        flush=True,
    )


if __name__ == "__main__":
    main()
