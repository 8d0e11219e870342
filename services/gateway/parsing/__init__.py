"""From the text that a model writes to content, reasoning and tool calls."""
