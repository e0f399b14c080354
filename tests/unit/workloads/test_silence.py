"""What draws at random is switched off, whatever it is called."""

from __future__ import annotations

from torch import nn

from dpscope.workloads.workload import silence


class StochasticDepth(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.p = 0.4


def test_dropout_is_switched_off_wherever_it_is():
    class Odd(nn.Module):
        attention_dropout, other = 0.0, 0.2

        def __init__(self):
            super().__init__()
            self.attention_dropout, self.survival_prob, self.other = 0.1, 0.8, 0.2

    model = nn.Sequential(nn.Dropout1d(0.5), nn.Linear(2, 2), Odd(), StochasticDepth(), nn.Dropout(0.0))
    assert silence(model) == 3
    odd = model[2]
    assert (model[0].p, odd.attention_dropout, odd.survival_prob, odd.other) == (0.0, 0.0, 1.0, 0.2)
