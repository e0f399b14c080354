"""Queries of autograd's graph: where tensors come from, and if it is being run backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def in_backward() -> bool:
    """Return True during a backward pass. A forward in it is a checkpoint's rerun."""
    return torch._C._current_graph_task_id() != -1


def nodes_behind(tensors: list[Tensor]) -> list[Any]:
    """Return the nodes of autograd's graph that tensors come from."""
    nodes: list[Any] = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    seen, found = set(nodes), []
    while nodes:
        node = nodes.pop()
        found.append(node)
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                nodes.append(following)
    return found


def leaves_behind(tensors: list[Tensor]) -> list[Tensor]:
    """Return the leaves that autograd reaches from tensors."""
    return [node.variable for node in nodes_behind(tensors) if hasattr(node, "variable")]
