"""From a model's text to messages: reasoning, content and tool calls, by one machine that is driven by data."""
