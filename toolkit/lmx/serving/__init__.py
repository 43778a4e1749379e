"""The OpenAI endpoint on the engine: `lmx serve`."""
