"""The one exception for mistakes of the person at the keyboard: shown as a sentence, never as a traceback."""


class UserError(ValueError):
    """What happened, what was expected, what to type next. The command line prints it and exits with 2."""
