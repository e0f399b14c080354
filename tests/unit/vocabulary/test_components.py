"""Components of memory: those that dpscope knows, and those that a user's own rule names."""

from __future__ import annotations

from dpscope.vocabulary.components import COMPONENTS, KEYS, component_named, in_order


def test_a_users_own_component_stands_before_what_is_left_and_keeps_its_name():
    assert in_order(["unattributed", "my_cache", "inputs", "model_parameters"]) == [
        "model_parameters",
        "inputs",
        "my_cache",
        "unattributed",
    ]
    assert component_named("my_cache").label == "my cache"


def test_every_known_component_has_words_and_only_those_of_private_training_a_mark():
    assert tuple(map(component_named, KEYS)) == COMPONENTS
    assert all("_" not in component.label for component in COMPONENTS)
    assert {each.key for each in COMPONENTS if each.marked("*").endswith("*")} == {
        "activation_hooks",
        "per_sample_gradients",
        "norm_samples",
    }
