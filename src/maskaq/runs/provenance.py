"""Provenance of a run: device, versions, commit."""

import platform
import subprocess
from pathlib import Path
from typing import Any

import safetensors
import timm
import torch
from torch import nn

import maskaq
from maskaq import ranks
from maskaq.engine import Engine
from maskaq.errors import DeviceError, RunFolderError, first_line
from maskaq.models import geometry
from maskaq.storage.runfolder import RunFolder


def pick_device(device: str | torch.device | None = None) -> torch.device:
    """The requested device, by default CUDA if available; under torchrun each process takes another GPU."""
    if device is None or str(device) == "cuda":
        device = ranks.local_device() or device
    try:
        default = "cuda" if torch.cuda.is_available() else "cpu"
        picked = torch.device(default if device is None else device)
        torch.zeros(1, device=picked).item()
    except TypeError as error:
        raise DeviceError(f"device: expected a name such as cpu or cuda:1, got {device!r}") from error
    except (RuntimeError, AssertionError, ImportError) as error:  # the last: a kind of device without its package
        raise DeviceError(f"device {str(device)!r} cannot be used: {first_line(error)}") from error
    return picked


def describe_run(teacher: nn.Module, source: dict[str, Any] | None, engine: Engine) -> dict[str, Any]:
    """Provenance of a run, for run.json: source of the model, engine, versions, device."""
    described = {"source": source, "task": geometry(teacher).task}
    return described | surroundings(next(teacher.parameters()).device) | {"engine": engine.name}


def surroundings(device: torch.device) -> dict[str, Any]:
    """Versions, commit, platform, device."""
    return {
        "versions": {
            "maskaq": maskaq.__version__,
            "torch": torch.__version__,
            "timm": timm.__version__,
            "safetensors": safetensors.__version__,
            "python": platform.python_version(),
        },
        "commit": commit(),
        "platform": platform.platform(),
        "device": device_name(device),
    }


def check_alike(folder: RunFolder, ours: dict[str, Any], any_device: bool = False) -> None:
    """RunFolderError if the process that leads the run would make other images than this one."""
    facts = folder.refresh().latest_facts
    theirs, mine = ({**f.get("versions", {}), **f} for f in (facts, ours))
    keys = ("maskaq", "torch", "timm", "commit") + (() if any_device else ("device", "engine"))
    differ = [
        f"{key} {theirs.get(key)} there, {mine.get(key)} here" for key in keys if theirs.get(key) != mine.get(key)
    ]
    if differ:
        advice = "install the same versions"
        if any(text.startswith(("device", "engine")) for text in differ):
            advice += ", use the same kind of device (on a CPU: as many threads, OMP_NUM_THREADS)"
        raise RunFolderError(
            f"{folder.root} is led by a process whose images would differ from those made here: "
            f"{'; '.join(differ)}. To help: {advice}"
        )


def commit() -> str | None:
    """The commit of this maskaq, with "-dirty" where files of it were changed; None if it is not run from a clone."""
    root = Path(__file__).parents[3]
    if not (root / ".git").exists() or not (root / "src" / "maskaq").is_dir():
        return None
    asked = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        return subprocess.run(asked, capture_output=True, text=True, check=True, timeout=10).stdout.strip() or None
    except (OSError, subprocess.SubprocessError):
        return None


def device_name(device: torch.device) -> str:
    on_gpu = device.type == "cuda"
    return torch.cuda.get_device_name(device) if on_gpu else f"cpu, {torch.get_num_threads()} threads"
