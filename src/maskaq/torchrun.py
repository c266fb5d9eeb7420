"""The environment variables that torchrun sets. Needs no torch, so that commands start quickly."""

import os


def are_started() -> bool:
    """Whether this process was started by torchrun, as one of several."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ


def rank() -> int:
    """The number of this process; 0, the leader, without torchrun. Only the leader prints."""
    return int(os.environ["RANK"]) if are_started() else 0


def is_leader() -> bool:
    """Whether this process is the leader; known before the process group exists."""
    return rank() == 0
