"""The one exception for mistakes of the person at the keyboard: shown as a sentence, never as a traceback."""


class UserError(ValueError):
    """Mistake of the user: what happened, what was expected, what to type next. The command line exits with 2."""


class MeasurementFailed(Exception):
    """Failure of a row that ran, but whose figures mean nothing. The message is the reason that the row gives."""


class RankEnded(MeasurementFailed):
    """A rank of a row ended without figures; `status` is the row's."""

    def __init__(self, status: str, reason: str) -> None:
        super().__init__(reason)
        self.status = status
