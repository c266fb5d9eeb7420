"""A deployed model in the file formats of other runtimes."""
