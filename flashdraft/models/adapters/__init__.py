"""LoRA folders, merged into the weights of a model as it is loaded."""
