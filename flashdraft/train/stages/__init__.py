"""The stages of a training: the answers, what is learnt from them, the run, the result."""
