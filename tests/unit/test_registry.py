"""A registry: its entries by name, and what is refused."""

import pytest

from verl_like.registry import Registry


def numbers() -> Registry[int]:
    return Registry("number", "register_number", {"one": 1, "two": 2})


def test_an_entry_is_found_by_its_name_and_a_decorated_one_stays_what_it_is():
    registry = numbers()
    assert registry.get("two") == 2
    assert registry.register("three")(3) == 3
    assert registry.get("three") == 3
    assert registry.names() == ["one", "three", "two"]


def test_a_name_that_is_taken_is_refused_also_for_the_same_entry():
    registry = numbers()
    for entry in (1, 5):
        with pytest.raises(ValueError, match=r"^number 'one' is already registered: choose ano"):
            registry.add("one", entry)
    assert registry.get("one") == 1


def test_an_unknown_name_is_refused_with_the_nearest_that_begins_alike_and_all_that_are_known():
    known = r" Known are one, two; a plugin adds one with @register_number$"
    with pytest.raises(ValueError, match=r"^unknown number 'onn'; did you mean one\?" + known):
        numbers().get("onn")
    with pytest.raises(ValueError, match=r"^unknown number 'wo'\." + known):
        numbers().get("wo")


def test_a_registry_says_it_in_words_of_its_own():
    registry = Registry(
        "number",
        "register_number",
        {"one": 1},
        taken="{name} is {present} and not {refused}",
        unknown="there is no {kind} {name}, only {known}",
    )
    with pytest.raises(ValueError, match=r"^one is 1 and not 5$"):
        registry.add("one", 5)
    with pytest.raises(ValueError, match=r"^there is no number \{two\}, only one$"):
        registry.get("{two}")


def test_what_is_registered_in_one_registry_is_not_in_another():
    entries = {"one": 1}
    registry = Registry("number", "register_number", entries)
    registry.add("two", 2)
    assert entries == {"one": 1}
