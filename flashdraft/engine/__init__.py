"""Requests in, committed tokens out: schedule, draft, verify, commit."""
