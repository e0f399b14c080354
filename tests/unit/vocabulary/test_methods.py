"""The methods one can name."""

from __future__ import annotations

import importlib.metadata

import pytest

from dpscope.errors import UserError
from dpscope.trainers.base import TrainerBase, load_trainer
from dpscope.vocabulary import methods as registry
from dpscope.vocabulary.methods import ENTRY_POINT_GROUP, methods, resolve_method


@pytest.fixture
def installed(monkeypatch):
    """Pretend that packages are installed which offer these methods: {name: "module:Class"}."""

    def install(**offered):
        entries = [importlib.metadata.EntryPoint(name, value, ENTRY_POINT_GROUP) for name, value in offered.items()]
        monkeypatch.setattr(registry, "entry_points", lambda group: entries if group == ENTRY_POINT_GROUP else [])
        methods.cache_clear()

    yield install
    methods.cache_clear()


def test_every_method_has_a_trainer_that_can_be_loaded():
    for method in methods().values():
        assert issubclass(load_trainer(method), TrainerBase)


def test_standard_comes_first_and_is_the_only_method_that_is_not_private():
    assert next(iter(methods())) == "standard"
    assert [name for name, method in methods().items() if not method.private] == ["standard"]


def test_no_name_or_alias_means_two_methods():
    names = [name for method in methods().values() for name in (method.name, *method.aliases)]
    assert len(names) == len(set(names))


def test_a_method_of_another_package_is_found_and_says_whose_it_is(installed):
    installed(mine="dpscope.trainers.base:StandardTrainer")
    assert load_trainer(resolve_method("mine")).__name__ == "StandardTrainer"
    assert resolve_method("mine").label == "from dpscope"
    assert list(methods())[-1] == "mine"


@pytest.mark.parametrize("name", ["standard", "vanilla", "dpsgd"])
def test_a_package_cannot_take_a_name_or_alias_that_is_there(installed, name):
    before = resolve_method(name)
    installed(**{name: "somewhere.else:Trainer"})
    assert resolve_method(name) == before


def test_an_unknown_method_is_answered_with_those_that_exist_others_included(installed):
    installed(mine="mine.trainer:Trainer")
    with pytest.raises(UserError, match=r"unknown method 'mime': choose from standard, .*mine.*vanilla"):
        resolve_method("mime")
