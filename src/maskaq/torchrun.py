"""What torchrun tells its processes, through the environment. Needs no torch, so that commands start quickly."""

import os


def are_started() -> bool:
    """Whether this process was started by torchrun, as one of several."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ


def rank() -> int:
    """Its number among them; 0 leads, and speaks for all."""
    return int(os.environ["RANK"]) if are_started() else 0


def is_leader() -> bool:
    """Whether this process leads; asks before there is a group."""
    return rank() == 0
