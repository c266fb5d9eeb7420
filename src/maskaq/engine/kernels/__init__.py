"""Fused Triton kernels: the same maths as the plain ops, in fewer passes over memory."""
