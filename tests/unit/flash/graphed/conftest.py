"""Graphs on the CPU for all tests here."""

from tests.unit.flash.graphed.host_graphs import host_graphs

__all__ = ["host_graphs"]
