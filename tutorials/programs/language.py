"""The language of the lesson that runs: its first cell says which, and hints and captions follow."""

from __future__ import annotations

LANGUAGES = ("en", "zh")
_spoken = ["en"]


def use(language: str) -> None:
    """Speak this language from now on."""
    if language not in LANGUAGES:
        raise ValueError(f"There is no lesson in {language!r}. Choose one of {', '.join(LANGUAGES)}.")
    _spoken[0] = language


def spoken() -> str:
    return _spoken[0]


def say(en: str, zh: str) -> str:
    """Return the text in the language of the lesson."""
    return zh if spoken() == "zh" else en
