"""The cache under test: how one is made, and what it promises. Asked once, handed to whatever needs it."""

from typing import Any

from tinyllm.testing.adapters.loading import spelling
from tinyllm.testing.contract import Factory, PagedCache, capabilities
from tinyllm.testing.time_limit import patience


class Subject:
    """A factory, and what the kit has asked it. A Subject is a factory itself.

    Attributes:
        factory: makes the caches.
        capabilities: what it promises (`contract.CAPABILITIES`).
        patience: seconds that one call may take.
        imports: lines of a story that import the factory in a fresh interpreter.
        name: what the factory is called there.
    """

    def __init__(self, factory: Factory) -> None:
        """Raises ValueError: what `factory` declares as its capabilities is none."""
        self.factory = factory
        self.capabilities = capabilities(factory)
        self.patience = patience(factory)
        self.imports, self.name = spelling(factory)

    @classmethod
    def of(cls, factory: Factory) -> "Subject":
        """The subject that a factory is, or a new one."""
        return factory if isinstance(factory, Subject) else cls(factory)

    def __call__(self, *sizes: Any) -> PagedCache:
        """A new cache."""
        return self.factory(*sizes)
