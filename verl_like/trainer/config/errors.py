"""The error of a configuration that cannot run."""


class ConfigError(ValueError):
    """A configuration that cannot run; the text is for the person who wrote it."""
