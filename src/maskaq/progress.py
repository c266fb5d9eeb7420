"""Progress: callbacks for long-running work. The library is silent by default; the command line draws a bar."""


class Progress:
    """Base class and default: does nothing. Subclass it to follow a run."""

    def stage(self, title: str, total: int, done: int = 0) -> None:
        """A stage of `total` units begins; `done` of them were finished by an earlier run."""

    def advance(self, units: int = 1, **metrics: float) -> None:
        """Some units of the current stage are done."""

    def forecast(self, seconds: float) -> None:
        """Estimated seconds of the whole work."""

    def note(self, text: str) -> None:
        """One line that the user should know."""
