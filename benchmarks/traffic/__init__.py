"""Traffic as a server meets it: arrivals, mixed settings, conversations, a long prompt."""
