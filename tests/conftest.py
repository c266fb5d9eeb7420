"""Shared by all tests: one thread, because the models are tiny and threads only wait for each other."""

import torch

torch.set_num_threads(1)
