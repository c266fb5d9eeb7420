"""Quantization in four levels: grid (maths), quantizers (state), layers (modules), twin (the model)."""
