"""What is found by its name: the library's own entries, and those that plugins register."""

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
        kind: what an entry is called in messages.
        decorator: the public name of the decorator that registers one, for messages.
        entries: the library's own.
        taken: the message for a name that has an entry: a format string of `kind`, `name`, that
            entry, `present`, and the one that is refused, `refused`.
        unknown: the message for a name without an entry: a format string of `kind`, `name`,
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
        self.entries: dict[str, Entry] = dict(entries or {})
        self.taken_message = taken
        self.unknown_message = unknown

    def names(self) -> list[str]:
        """All names that `get` knows, sorted."""
        return sorted(self.entries)

    def is_taken(self, name: str, entry: Entry) -> bool:
        """True if `name` cannot be given to `entry`."""
        return name in self.entries

    def check(self, name: str, entry: Entry) -> None:
        """Raises ValueError for an entry that cannot have the name."""
        if self.is_taken(name, entry):
            present = self.entries.get(name)
            raise ValueError(
                self.taken_message.format(kind=self.kind, name=name, present=present, refused=entry)
            )

    def add(self, name: str, entry: Entry) -> None:
        """Makes `entry` known as `name`. Raises as `check` does."""
        self.check(name, entry)
        self.entries[name] = entry

    def register(self, name: str) -> Callable[[Registered], Registered]:
        """Returns a decorator that makes an entry known as `name`; it raises as `check` does."""

        def decorate(registered: Registered) -> Registered:
            entry: Any = registered
            self.add(name, entry)
            return registered

        return decorate

    def get(self, name: str) -> Entry:
        """Returns the entry known as `name`.

        Raises:
            ValueError: there is none; the message lists the known ones.
        """
        if name not in self.entries:
            known = self.names()
            # Another first letter makes another acronym: dapo is no sapo.
            alike = [each for each in known if each[:1] == name[:1]]
            nearest = difflib.get_close_matches(name, alike, 1)
            raise ValueError(
                self.unknown_message.format(
                    kind=self.kind,
                    name=name,
                    nearest=f"; did you mean {nearest[0]}?" if nearest else ".",
                    known=", ".join(known),
                    decorator=self.decorator,
                )
            )
        return self.entries[name]
