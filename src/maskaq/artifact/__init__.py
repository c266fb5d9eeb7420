"""The quantized model as files: saved folder, model card, exports."""
