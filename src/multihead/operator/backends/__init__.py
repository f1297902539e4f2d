"""The same definition several times over: `reference` to read, `torch` to run."""
