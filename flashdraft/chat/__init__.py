"""Conversations to prompts, and answers to reasoning, text and tool calls."""
