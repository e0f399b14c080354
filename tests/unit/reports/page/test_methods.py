"""What the page says of methods: every one in a sentence, and code that trains with it as it is printed."""

from __future__ import annotations

from html import unescape

import pytest

from dpscope.reports.page.render import render_page, render_template
from dpscope.reports.report import Report
from dpscope.vocabulary.methods import BUILT_IN
from tests.made_up import renamed

PRIVATE = [method.name for method in BUILT_IN if method.private]
FOREIGN = "A method of another package than dpscope"


def section(*methods, noise_multiplier=1.0, max_grad_norm=1.0):
    privacy = {"noise_multiplier": noise_multiplier, "max_grad_norm": max_grad_norm}
    return render_template("methods.html.jinja", methods=dict.fromkeys(methods, "#000000"), privacy=privacy)


@pytest.mark.parametrize("method", [method.name for method in BUILT_IN])
def test_every_built_in_method_is_described_and_every_private_one_can_be_switched_to(method):
    assert FOREIGN not in section(method)
    assert ("<code>" in section(method)) is (method in PRIVATE)


def test_a_method_of_another_package_is_said_to_be_one(make_result):
    page = render_page(Report.of([renamed(make_result(), "<b>mine</b>")]))
    assert FOREIGN in page
    assert "<b>mine</b>" not in page
    assert "<code>" not in section("mine")


def test_the_page_says_what_its_methods_are_and_how_to_switch(make_result):
    page = render_page(Report.of([make_result(method=name) for name in ("standard", "flash")]))
    assert "from dpscope.flash import PrivacyEngine" in page
    assert "Ordinary training, not private" in page
    assert "ghost clipping" not in page, "it was not measured"


@pytest.mark.parametrize("method", PRIVATE)
def test_the_printed_lines_train_privately_in_a_loop_that_stays_as_it_is(method):
    torch = pytest.importorskip("torch")
    pytest.importorskip("opacus")
    code = section(method, noise_multiplier=0.0, max_grad_norm=0.25).partition("<code>")[2].partition("</code>")[0]
    model = torch.nn.Linear(4, 3, bias=False)
    before = model.weight.detach().clone()
    data = torch.utils.data.TensorDataset(torch.randn(8, 4) * 100, torch.randint(3, (8,)))
    names = {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=1.0),
        "loader": torch.utils.data.DataLoader(data, batch_size=8),
        "criterion": torch.nn.CrossEntropyLoss(),
    }
    exec(unescape(code), names)  # as a reader would paste it
    model, optimizer, criterion, loader = (names[name] for name in ("model", "optimizer", "criterion", "loader"))
    for x, y in loader:
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()
    moved = (next(model.parameters()) - before).norm().item()
    assert 0 < moved <= 0.25 + 1e-5, "a mean of clipped gradients is no longer than one of them"
