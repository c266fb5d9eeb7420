"""maskaq: make a vision transformer small without its training data."""

__version__ = "0.1.0"
