"""Measurements as a JSON file."""

import time
from typing import Any

import torch

from maskaq.cli.arguments import Invocation
from maskaq.runs import provenance
from maskaq.storage import files


def write_figures(file: str, figures: dict[str, Any], invocation: Invocation, device: torch.device) -> None:
    """What was measured, with the day, the command and where it ran."""
    header = {"date": time.strftime("%Y-%m-%d"), "command": invocation.command_line}
    files.write_json_atomic(file, header | provenance.surroundings(device) | figures)
