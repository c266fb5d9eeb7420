"""Files: atomic writes, and the folder of a run."""
