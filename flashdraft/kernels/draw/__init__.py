"""How a row of logits becomes a token: one rule (rule.py), in torch, in numpy and in Triton."""
