"""Solutions of lesson 7, the hunt. Try first: `check` gives hints. What each case shows is told in cases.md."""

import torch

case_6, case_7, case_8, case_9, case_10 = "b", "a", "e", "f", "h"


def loss(logits, labels):
    return torch.nn.functional.cross_entropy(logits, labels, ignore_index=-100)


def make_scores(table, users):
    rows = table.t().contiguous()  # once
    return lambda: torch.nn.functional.linear(users, rows)


def make_validation(model, batch):
    total = torch.zeros(())

    @torch.no_grad()
    def step():
        nonlocal total
        total = total + (model(batch) - 1).square().mean()
        return total

    return step


ANSWERS = {
    "7.1": (case_6,),
    "7.2": (case_7,),
    "7.3": (case_8,),
    "7.4": (case_9,),
    "7.5": (case_10,),
    "7.6": (loss,),
    "7.7": (make_scores,),
    "7.8": (make_validation,),
}
