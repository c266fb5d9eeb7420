"""Quantization in four floors: grid (maths), quantizers (state), layers (modules), twin (the model)."""
