"""What can go wrong, by whose fault; all user mistakes are `ValueError`s too. No behaviour here."""


class NanoVLLMError(Exception):
    """Base of every error that nanovllm raises on purpose."""


class ConfigError(NanoVLLMError, ValueError):
    """An option, or a combination of options and hardware, that cannot work."""


class RequestError(NanoVLLMError, ValueError):
    """A prompt or its sampling parameters cannot be served; names the prompt's index."""


class CheckpointError(NanoVLLMError, ValueError):
    """The model folder is missing, incomplete, or of an unsupported architecture."""


class WorkerError(NanoVLLMError, RuntimeError):
    """A tensor-parallel rank raised or died; the engine is closed."""
