"""Recipes: every setting of a run, and the shipped ones."""
