"""Workloads: a model, one batch, a loss. Importing this package does not import torch."""
