"""Finds entries by their names: those of the library, and those that plugins register."""

import difflib
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

Entry = TypeVar("Entry")
Registered = TypeVar("Registered")

TAKEN = "{kind} {name!r} is already registered: choose another name"
UNKNOWN = "unknown {kind} {name!r}{nearest} Known are {known}; a plugin adds one with @{decorator}"


class Registry(Generic[Entry]):
    """Entries of one kind by name.

    Args:
        kind: what messages call an entry.
        decorator: the public name of the decorator that registers an entry, for messages.
        entries: the entries of the library.
        taken: the message for a name that already has an entry. It is a format string with `kind`,
            `name`, `present` (that entry) and `refused` (the one that is refused).
        unknown: the message for a name without an entry. It is a format string with `kind`, `name`,
            `nearest` (a question, or a full stop), `known` and `decorator`.
    """

    def __init__(
        self,
        kind: str,
        decorator: str,
        entries: Mapping[str, Entry] | None = None,
        *,
        taken: str = TAKEN,
        unknown: str = UNKNOWN,
    ) -> None:
        self.kind = kind
        self.decorator = decorator
        self.entries = dict(entries or {})
        self.taken_message = taken
        self.unknown_message = unknown

    def names(self) -> list[str]:
        """All names that `get` knows, sorted."""
        return sorted(self.entries)

    def is_taken(self, name: str, entry: Entry) -> bool:
        """Returns whether the name is taken, so that `entry` cannot have it."""
        return name in self.entries

    def check(self, name: str, entry: Entry) -> None:
        """Raises ValueError if the entry cannot have the name."""
        if self.is_taken(name, entry):
            present = self.entries.get(name)
            message = self.taken_message
            raise ValueError(
                message.format(kind=self.kind, name=name, present=present, refused=entry)
            )

    def add(self, name: str, entry: Entry) -> None:
        """Adds an entry. Raises ValueError if it cannot have the name."""
        self.check(name, entry)
        self.entries[name] = entry

    def register(self, name: str) -> Callable[[Registered], Registered]:
        """Returns a decorator that adds an entry. It raises ValueError if the entry cannot have the
        name."""

        def decorate(registered: Registered) -> Registered:
            entry: Any = registered
            self.add(name, entry)
            return registered

        return decorate

    def get(self, name: str) -> Entry:
        """Returns the entry of this name. Raises ValueError, with the known names, if there is
        none."""
        if name in self.entries:
            return self.entries[name]
        known = self.names()
        # A name with another first letter is never suggested. For the unknown "dapo" it could be
        # the policy loss "sapo", which is another algorithm.
        alike = [each for each in known if each[:1] == name[:1]]
        matches = difflib.get_close_matches(name, alike, 1)
        nearest = f"; did you mean {matches[0]}?" if matches else "."
        raise ValueError(
            self.unknown_message.format(
                kind=self.kind,
                name=name,
                nearest=nearest,
                known=", ".join(known),
                decorator=self.decorator,
            )
        )
