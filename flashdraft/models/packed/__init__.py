"""Safetensors whose weights are in few bits: their tensors joined into weights, by their makers."""
