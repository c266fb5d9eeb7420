"""Shared by all tests: one thread, because the models are tiny and threads only wait for each other."""

import pytest
import torch

torch.set_num_threads(1)

WHOLE = ("tests/test_export.py", "tests/test_web.py")
"""Files whose tests share what took long to make: one worker runs them all."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Of two workers the next free one takes the next test, the files above first."""
    if config.getvalue("dist") != "load":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            return next((file for file in WHOLE if nodeid.startswith(file)), nodeid)

    return Scheduling(config, log)
