"""Runs: the loop over rounds, opening a run again, the choice of the saved model."""
