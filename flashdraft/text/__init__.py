"""A checkpoint's tokenizer and chat template at work, in a process that can be killed.

`child` is that process; the rest is what it does with messages. It imports no torch, and nothing of
ours but errors and the killable process.
"""
