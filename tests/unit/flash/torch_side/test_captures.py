"""Steps that a CUDA graph would repeat, and steps that are compiled as a whole: noise is never that of another step."""

import pytest
import torch
import torch.nn.functional as F

from dpscope.errors import UserError
from tests.unit.flash.compiled.compiling import Graphs
from tests.unit.flash.private_training import make_data, make_model, make_private, moved, sgd

pytestmark = pytest.mark.usefixtures("fresh_graphs")

X, Y = make_data()[:8]


@pytest.fixture
def capture(monkeypatch):
    """Begins a capture, as far as torch says."""

    def begin():
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)

    return begin


def test_a_private_forward_is_not_captured_by_hand(capture):
    model, _, _ = make_private(made := make_model(), sgd(made))
    capture()
    with pytest.raises(UserError, match=r"captured in a CUDA graph by hand.*make_graphed_step"):
        model(X)
    with torch.no_grad():
        model(X)


def test_a_private_step_is_not_captured_by_hand(capture):
    model, optimizer, _ = make_private(made := make_model(), sgd(made))
    F.cross_entropy(model(X), Y).backward()
    capture()
    for step in (optimizer.step, optimizer.pre_step):
        with pytest.raises(UserError, match="each replay would add the same noise"):
            step()


def test_a_loop_body_that_is_compiled_as_a_whole_draws_fresh_noise_in_every_step():
    model, optimizer, _ = make_private(made := make_model(), sgd(made), noise_multiplier=10.0)
    graphs = Graphs()

    @torch.compile(backend=graphs)
    def body():
        optimizer.zero_grad()
        F.cross_entropy(model(X), Y).backward()
        optimizer.step()

    moves = []
    for _ in range(3):
        before = [parameter.detach().clone() for parameter in model.parameters()]
        body()
        moves.append(torch.cat([move.flatten() for move in moved(before, model)]).detach())
    without_noise = 8 * 0.5 / 16  # samples, C, expected batch size: as far as two steps may move without noise, each
    for one, other in ((0, 1), (1, 2), (0, 2)):
        assert (moves[one] - moves[other]).norm() > 2 * 2 * without_noise
    assert graphs.count
