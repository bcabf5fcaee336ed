"""The one exception that means "this could not be run".

    loadlens: checkpoint has no config.json; point CHECKPOINT at the folder that vLLM would be given
"""

__all__ = ["CannotRun"]


class CannotRun(Exception):
    """Say in one sentence why a run is UNRESOLVED and what to do about it.

    The command line prints the sentence and exits with 2. Never raised for a law that a run broke:
    that is a Finding, and a result.
    """
