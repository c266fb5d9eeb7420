"""Runs: the loop, opening a finished run, what is handed over."""
