"""Pictures, films and pages, from what people send to what a vision tower takes.

`child`, `film_child` and `page_child` are the processes that decode them, and that can be killed;
nothing here knows models or prompts.
"""
