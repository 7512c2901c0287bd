"""From a row of the target's logits to its token, and which drafts that accepts."""
