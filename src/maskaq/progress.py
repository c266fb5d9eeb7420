"""How long work reports to whoever watches it. The library is silent; the command line draws a bar."""


class Watch:
    """Base and default: sees everything, says nothing."""

    def stage(self, title: str, total: int, done: int = 0) -> None:
        """A stage of `total` units begins; `done` of them were finished by an earlier run."""

    def advance(self, units: int = 1, **metrics: float) -> None:
        """Some units of the current stage are done."""

    def forecast(self, seconds: float) -> None:
        """The whole work will take about so long."""

    def note(self, text: str) -> None:
        """Something the user should know, in one line."""
