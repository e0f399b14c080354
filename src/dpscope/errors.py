"""Errors: one for mistakes of the user, which the command line shows without a traceback, and failures of a row."""


class UserError(ValueError):
    """Error for a mistake of the user. The message says what is wrong and what to do; the command line exits with 2.

    Example:
        >>> try:
        ...     dpscope.make_config("no-such-model")
        ... except dpscope.UserError as error:
        ...     print(str(error).split(":")[0])
        unknown model 'no-such-model'
    """


class MeasurementFailed(Exception):
    """Failure of a row that ran, but whose figures mean nothing. The message is the reason that the row gives."""


class RankEnded(MeasurementFailed):
    """End of a rank without figures; `status` becomes the row's."""

    def __init__(self, status: str, reason: str) -> None:
        super().__init__(reason)
        self.status = status
