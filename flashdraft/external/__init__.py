"""vLLM and SGLang: the same pair on the engines people already run."""
