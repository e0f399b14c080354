"""A small model of layers for tests of the engine, and sums of gradients that are compared."""

from torch import Tensor, nn


def mlp(width: int = 5) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, 7), nn.ReLU(inplace=True), nn.LayerNorm(7), nn.Linear(7, 3))


def gradients(model) -> dict[str, Tensor]:
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def assert_close(found: dict[str, Tensor], truth: dict[str, Tensor], rtol: float = 1e-5) -> None:
    assert found.keys() == truth.keys()
    for name, total in truth.items():
        assert (found[name].double() - total.double()).norm() <= rtol * total.double().norm() + 1e-9, name
