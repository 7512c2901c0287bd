"""Pictures, from what people send to what a vision tower takes.

`child` is the process that decodes them, and that can be killed; nothing here knows models, prompts
or the network.
"""
