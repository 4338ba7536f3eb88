"""Launch scripts: what a user's own script would start, found by letting bash run it with stand-ins."""
