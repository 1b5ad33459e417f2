"""Chat templates: specs, the sandbox they render in, and the tracing that tells who wrote which part of the text."""
