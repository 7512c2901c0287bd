"""Processes that can be killed: what a checkpoint or a client brings runs there, within limits.

`pool` is our end, `child` theirs, `frames` what goes between. None of it knows what is run.
"""
