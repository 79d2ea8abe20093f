"""The ten tests of the chapter, bound to the reference cache."""

import pytest

from tinyllm.infer.paged import PagedKVCache
from tinyllm.testing.catalogue import CATALOGUE


@pytest.mark.parametrize("name", CATALOGUE)
def test_course(name: str) -> None:
    CATALOGUE[name].test(PagedKVCache)
