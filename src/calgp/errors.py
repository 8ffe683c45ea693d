"""The one exception that calgp raises on purpose."""


class CalgpError(Exception):
    """Something a user handed in cannot be used: the message says what was expected, what came and what to do.

    Raised at the border only (files, options, data); inside, the types are trusted. The command line prints it as one
    sentence and exits with status 1.
    """
