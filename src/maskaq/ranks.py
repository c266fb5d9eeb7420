"""Processes that calibrate one student together: the ranks of a torch.distributed group, as torchrun starts them.

One of them is the leader: it owns the run folder and does the work that cannot be shared. `ALONE` is a group of one
process, so that callers need no special case.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

import torch
from torch import Tensor, nn

from maskaq.errors import RankError, first_line
from maskaq.torchrun import are_started

_Value = TypeVar("_Value")

_PATIENCE = timedelta(days=1)  # for work that the leader does alone; a process that dies is noticed at once


class Ranks:
    """A group of one process."""

    rank = 0
    size = 1
    in_graphs = True
    """Whether a step that a CUDA graph captures may contain `sum_`."""

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def part(self, count: int) -> range:
        """The places that this rank takes of a batch of `count` images."""
        return range(count * self.rank // self.size, count * (self.rank + 1) // self.size)

    def sum_(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by its sum over all ranks."""

    def agreed(self, value: _Value) -> _Value:
        """The leader's value on every rank; anything that can be pickled. The others sleep until the leader has it."""
        return value

    def wait(self) -> None:
        """A barrier: returns when all ranks have called it."""

    def follow(self, module: nn.Module) -> None:
        """Give the module the leader's parameters and buffers."""

    @contextmanager
    def leader_first(self) -> Iterator[None]:
        """Context that the other ranks enter when the leader has left it."""
        yield


ALONE = Ranks()


class ProcessGroup(Ranks):
    """The processes of torch's default group: gloo for what is on the CPU, NCCL for what is on GPUs."""

    def __init__(self) -> None:
        import torch.distributed as dist

        self.dist = dist
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self.in_graphs = "nccl" in str(dist.get_backend_config()) or not torch.cuda.is_available()

    def sum_(self, tensors: Sequence[Tensor]) -> None:
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        with _as_rank_error(self.rank):
            self.dist.all_reduce(flat)
        parts = flat.split([tensor.numel() for tensor in tensors])
        torch._foreach_copy_(list(tensors), [part.view_as(x) for part, x in zip(parts, tensors, strict=True)])

    def agreed(self, value: _Value) -> _Value:
        box = [value if self.leads else None]
        with _as_rank_error(self.rank):
            self.dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
        return box[0]  # type: ignore[return-value]

    def wait(self) -> None:
        with _as_rank_error(self.rank):
            self.dist.all_reduce(torch.zeros(1))  # on the CPU, where a wait is a sleep

    def follow(self, module: nn.Module) -> None:
        self.wait()  # asleep: on a GPU, broadcast itself keeps GPU and CPU busy until the leader comes
        state = module.state_dict()
        with _as_rank_error(self.rank), torch.no_grad():
            for value in state.values():
                self.dist.broadcast(value, src=0)
        if not self.leads:
            module.load_state_dict(state)  # quantizers note there that their ranges are set

    @contextmanager
    def leader_first(self) -> Iterator[None]:
        if not self.leads:
            self.agreed(None)
        yield
        if self.leads:
            self.agreed(None)


@contextmanager
def _as_rank_error(rank: int) -> Iterator[None]:
    """Context that turns torch's error for a process that has ended into a RankError."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise RankError(f"rank {rank} lost another rank, whose own message says why: {first_line(error)}") from error


def local_device() -> str | None:
    """The GPU of this process, one of those of its machine; None without torchrun or without a GPU."""
    if not are_started() or not torch.cuda.is_available():
        return None
    return f"cuda:{int(os.environ.get('LOCAL_RANK', 0)) % torch.cuda.device_count()}"


@contextmanager
def joined(device: torch.device) -> Iterator[Ranks]:
    """Context with the group of this process; destroyed afterwards, unless the caller had initialised it."""
    if not are_started():
        yield ALONE
        return
    import torch.distributed as dist

    if dist.is_initialized():  # by the caller
        yield ProcessGroup()
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    one_each = device.type == "cuda" and int(os.environ.get("LOCAL_WORLD_SIZE", 1)) <= torch.cuda.device_count()
    with _as_rank_error(int(os.environ["RANK"])):  # NCCL needs a GPU for each rank; gloo sums on the CPU
        dist.init_process_group("cpu:gloo,cuda:nccl" if one_each else "gloo", timeout=_PATIENCE)
    try:
        yield ProcessGroup()
    finally:
        dist.destroy_process_group()
