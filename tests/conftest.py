"""Shared by all tests: one thread, because the models are tiny and threads only wait for each other."""

import pytest
import torch

torch.set_num_threads(1)

LONG = ("cli", "engine", "export", "peers", "pretrained", "readme", "report", "run", "web")
"""Files that take long, or whose tests share what took long to make: each goes to one worker, before all others."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """The next free worker takes the next long file, and when there is none any more the next test."""
    if config.getvalue("dist") != "load":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            return next((name for name in LONG if nodeid.startswith(f"tests/test_{name}.py")), nodeid)

    return Scheduling(config, log)
